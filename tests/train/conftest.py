"""Recipes of a few lines, trained in real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"
GUARD_S = 240

RECIPE = """
import os
import random
import torch
from torch import nn
from torch.utils.data import Dataset
import torchproof as tp

class Points(Dataset):
    noise = 0.0
    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = self.x.sum(1) + 0.1 * torch.randn(n, generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + self.noise * random.random(), self.y[i]

class Fit(tp.Recipe):
    batch_size = 16
    num_epochs = 2
    max_grad_norm = 1.0
    dropout = 0.0
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(self.dropout), nn.Linear(16, 1))
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).squeeze(1), y)
    def train_data(self):
        return Points(107)
    def eval_data(self):
        return Points(31)
    def metrics(self, model, batch):
        x, y = batch
        return {"mse": nn.functional.mse_loss(model(x).squeeze(1), y)}
"""


class Trained(NamedTuple):
    """How a call ended."""

    code: int
    out: str
    err: str
    run: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.run / "proof.json").read_text())
        return report


Train = Callable[..., Trained]


@pytest.fixture
def recipe() -> str:
    return RECIPE


def start_training(folder: Path, options: Sequence[str], code: str, run: str) -> "subprocess.Popen[str]":
    """Of the recipe of this code, which is written into the folder beside the run."""
    (folder / "recipe.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "-m", "torchproof", "train", str(folder / "recipe.py"), "-o", str(folder / run), *options],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train_to_end(folder: Path, options: Sequence[str], code: str, run: str) -> Trained:
    with start_training(folder, options, code, run) as process:
        try:
            out, err = process.communicate(timeout=GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
            raise
    return Trained(process.returncode, out, err, folder / run)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts to train in the folder ``run`` of the test."""

    def started(*options: str, code: str = RECIPE, run: str = "run") -> "subprocess.Popen[str]":
        return start_training(tmp_path, options, code, run)

    return started


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """The same, to its end."""

    def trained(*options: str, code: str = RECIPE, run: str = "run") -> Trained:
        return train_to_end(tmp_path, options, code, run)

    return trained


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A run that nothing happens to, and that other runs are compared with; made once for all tests."""
    done: dict[tuple[object, ...], Trained] = {}

    def trained(*options: str, code: str = RECIPE) -> Trained:
        asked = (*options, code)
        if asked not in done:
            done[asked] = train_to_end(tmp_path_factory.mktemp("undisturbed"), options, code, "run")
            assert done[asked].code == 0, done[asked].err
        return done[asked]

    return trained
