"""Recipes of a few lines, trained in real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts to train the recipe of this code in the folder ``run`` of the test."""

    def started(*options: str, code: str = RECIPE, run: str = "run") -> "subprocess.Popen[str]":
        (tmp_path / "recipe.py").write_text(code)
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torchproof",
                "train",
                str(tmp_path / "recipe.py"),
                "-o",
                str(tmp_path / run),
                *options,
            ],
            env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def train(start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path) -> Train:
    """The same, to its end."""

    def trained(*options: str, code: str = RECIPE, run: str = "run") -> Trained:
        with start(*options, code=code, run=run) as process:
            try:
                out, err = process.communicate(timeout=GUARD_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it
                raise
        return Trained(process.returncode, out, err, tmp_path / run)

    return trained
