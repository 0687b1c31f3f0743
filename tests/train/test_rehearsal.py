"""Rehearsals in real processes: every planted bug is found by its own rule, and its near miss is not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from torchproof.errors import RefusedError, UserCodeError
from torchproof.target.resolve import resolve
from torchproof.train.rehearsal import rehearse

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
GUARD_S = 240

RECIPE = """
import os, random, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
import torchproof as tp

RANK = int(os.environ.get("RANK", 0))

class Points(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = self.x.sum(1)
        {data}
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        {item}
        return self.x[i], self.y[i]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)
        {net}
    def forward(self, x):
        h = torch.relu(self.body(x))
        {forward}
        return self.head(h).squeeze(1)

{top}

class Fit(tp.Recipe):
    batch_size = 16
    def model(self):
        net = Net()
        {model}
        return net
    def optimizer(self, model):
        {optimizer}
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def scheduler(self, optimizer):
        {scheduler}
        return None
    def loss(self, model, batch):
        x, y = batch[0], batch[1]
        {loss}
        return nn.functional.mse_loss(model(x), y)
    def train_data(self):
        {train_data}
        return Points(40)
    def eval_data(self):
        return Points(13)
    def metrics(self, model, batch):
        {metrics}
        return {{"mse": nn.functional.mse_loss(model(batch[0]), batch[1])}}
"""
PLACES = re.findall(r"\{(\w+)\}", RECIPE)


def recipe(**code: str) -> str:
    """The recipe with lines of code put in its places."""
    assert set(code) <= set(PLACES)
    indented = {place: "\n        ".join(code.get(place, "pass").splitlines()) for place in PLACES}
    return RECIPE.format(**{**indented, "top": code.get("top", "")})


class Rehearsed(NamedTuple):
    """How ``train --rehearse`` ended."""

    code: int
    report: dict[str, Any]
    err: str

    @property
    def codes(self) -> list[str]:
        return [finding["code"] for finding in self.report["findings"]]

    @property
    def verdicts(self) -> dict[str, str]:
        return {checked["name"]: checked["verdict"] for checked in self.report["checked"]}

    @property
    def message(self) -> str:
        return str(self.report["findings"][0]["message"])


def start(path: Path, *options: str, folder: Path | None = None) -> "subprocess.Popen[str]":
    """Where a line has 80 columns."""
    return subprocess.Popen(
        [sys.executable, "-m", "torchproof", "train", str(path), "--rehearse", *options],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Rehearsed]:
    """Rehearses the recipe of this code."""

    def rehearsed(code: str) -> Rehearsed:
        (tmp_path / "recipe.py").write_text(code)
        with start(tmp_path / "recipe.py", "--format", "json") as process:
            out, err = process.communicate(timeout=GUARD_S)
        return Rehearsed(process.returncode, json.loads(out) if out else {}, err)

    return rehearsed


Run = Callable[[str], Rehearsed]

BUGS = {
    "never used": (
        "TP401",
        "no batch uses pooler.weight, pooler.bias",
        {"net": "self.pooler = nn.Linear(8, 8)"},
    ),
    "used in every second step": (
        "TP401",
        "only some of 8 batches use extra.weight",
        {
            "net": "self.extra, self.calls = nn.Linear(8, 8, bias=False), 0",
            "forward": "self.calls += 1\nif self.calls % 2:\n    h = h + self.extra(h)",
        },
    ),
    "left out at random": (
        "TP401",
        "only some of 8 batches use extra.weight",
        {
            "net": "self.extra = nn.Linear(8, 8, bias=False)",
            "forward": "if torch.rand(()) < 0.5:\n    h = h + self.extra(h)",
        },
    ),
    "an iterator behind getitem": (
        "TP402",
        "ignores the index",
        {
            "data": "self.calls = -1",
            "item": "self.calls += 1\ni = self.calls % len(self)",
        },
    ),
    "shuffled without a seed": (
        "TP403",
        "train_data() is not the same on each rank",
        {
            "train_data": "data = Points(40)\ndata.x = data.x[random.sample(range(40), 40)]\n"
            "data.y = data.x.sum(1)\nreturn data"
        },
    ),
    "split without a seed": (
        "TP403",
        "train_data() is not the same on each rank",
        {"train_data": "return torch.utils.data.random_split(Points(40), [30, 10])[0]"},
    ),
    "shuffled below an index that each sample has": (
        "TP403",
        "another sample",
        {
            "data": "self.order = np.random.permutation(n)",
            "item": "return self.x[self.order[i]], self.y[self.order[i]], i",
        },
    ),
    "noise that each rank draws once": (
        "TP403",
        "another value in a part of the sample",
        {"data": "self.x += torch.randn(n, 6)"},
    ),
    "the order of a set": (
        "TP403",
        "another sample",
        {
            "train_data": "names = list({f'name {i}' for i in range(40)})\n"
            "data = Points(40)\n"
            "data.x = torch.tensor([[float(n.split()[1])] * 6 for n in names])\n"
            "data.y = data.x[:, 0] / 40\n"
            "return data"
        },
    ),
    "a share for each rank": (
        "TP404",
        "40 on rank 0, 41 on rank 1",
        {"train_data": "return Points(40 + RANK)"},
    ),
    "a share for each rank, of the same length": (
        "TP403",
        "train_data() is not the same on each rank: 16 of 16 indices give another sample",
        {"train_data": "return torch.utils.data.Subset(Points(40), range(RANK, 40, 2))"},
    ),
    "weights from entropy": (
        "TP405",
        "head.weight",
        {"model": "net.head.weight.data = torch.from_numpy(np.random.default_rng().normal(size=(1, 8))).float()"},
    ),
    "another layer on one rank": (
        "TP405",
        "other names or shapes",
        {"model": "if RANK: net.head = nn.Linear(8, 1, bias=False)"},
    ),
    "loss calls the network it has kept": (
        "TP406",
        "4 of 4 parameters",
        {"model": "self.net = net", "loss": "return nn.functional.mse_loss(self.net(x), y)"},
    ),
    "a running mean in an attribute": (
        "TP407",
        "others after loading are model.mean",
        {
            "net": "self.mean = torch.zeros(())",
            "forward": "if self.training: self.mean = 0.5 * self.mean + h.mean().detach()\nh = h - self.mean",
        },
    ),
    "momentum outside of the state": (
        "TP407",
        "optimizer.velocity",
        {
            "top": "class Heavy(torch.optim.SGD):\n"
            "    velocity = None\n"
            "    @torch.no_grad()\n"
            "    def step(self, closure=None):\n"
            "        params = [p for group in self.param_groups for p in group['params']]\n"
            "        old = self.velocity or [torch.zeros_like(p) for p in params]\n"
            "        self.velocity = [0.9 * v + p.grad for v, p in zip(old, params)]\n"
            "        for v, p in zip(self.velocity, params): p.sub_(0.01 * v)\n",
            "optimizer": "return Heavy(model.parameters(), lr=0.01)",
        },
    ),
    "a schedule that starts again": (
        "TP407",
        "scheduler.last_epoch",
        {
            "top": "class Decay(torch.optim.lr_scheduler.ExponentialLR):\n"
            "    def load_state_dict(self, state_dict): pass\n",
            "scheduler": "return Decay(optimizer, 0.9)",
        },
    ),
    "a generator held by the dataset": (
        "TP504",
        "in both DataLoader workers, 32 of 32 times",
        {
            "data": "self.rng = np.random.default_rng(0)",
            "item": "return self.x[i] + float(self.rng.normal()), self.y[i]",
        },
    ),
    "the same seed in each worker's generator, each epoch": (
        "TP504",
        "in each epoch",
        {
            "data": "self.rng = None",
            "item": "info = torch.utils.data.get_worker_info()\n"
            "self.rng = self.rng or random.Random(info.id if info else 9)\n"
            "return self.x[i] + self.rng.random(), self.y[i]",
        },
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_by_its_own_rule_alone(run: Run, bug: str) -> None:
    code, message, changes = BUGS[bug]
    done = run(recipe(**changes))
    assert done.report, done.err
    assert set(done.codes) == {code}  # once for each of the datasets that have it
    assert message in done.message
    is_error = done.report["findings"][0]["severity"] == "error"
    assert done.code == is_error


NEAR_MISSES = {
    "frozen, dropout, batch norm, buffers, counters": {
        "net": "self.frozen = nn.Linear(8, 8).requires_grad_(False)\n"
        "self.norm, self.drop, self.calls = nn.BatchNorm1d(8), nn.Dropout(0.5), 0\n"
        "self.register_buffer('scale', torch.ones(8), persistent=False)",
        "forward": "self.calls += 1\nh = self.drop(self.norm(self.frozen(h) * self.scale))",
        "top": "import logging\nlog = logging.getLogger('torch.distributed')",
        "optimizer": "self.log, model.logs = log, [log]",
        "model": "net = nn.SyncBatchNorm.convert_sync_batchnorm(net)",
    },
    "random numbers of the global generators, duplicates": {
        "data": "self.x[6:12] = self.x[:6]\nself.y[6:12] = self.y[:6]",
        "item": "return self.x[i] + np.random.normal() + random.random() + torch.randn(6), self.y[i]",
        "model": "nn.init.constant_(net.head.bias, random.random() + np.random.rand())",
    },
    "a generator of each worker's own, another on each rank; equal samples": {
        "data": "self.x[:], self.y[:], self.rng = self.x[0], self.y[0], None",
        "item": "self.rng = self.rng or random.Random()\nreturn self.x[i] + self.rng.random(), self.y[i]",
    },
    "shuffled and permuted with a seed": {
        "data": "self.order = torch.randperm(n, generator=torch.Generator().manual_seed(0))",
        "item": "i = self.order[i]",
        "train_data": "seeded = torch.Generator().manual_seed(0)\n"
        "return torch.utils.data.random_split(Points(40), [30, 10], seeded)[0]",
    },
    "state in buffers, and in the optimizer's state": {
        "net": "self.register_buffer('mean', torch.zeros(()))",
        "forward": "if self.training: self.mean.copy_(0.5 * self.mean + h.mean().detach())\nh = h - self.mean",
        "optimizer": "return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
        "scheduler": "return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)",
    },
    "used in every batch by another way": {
        "net": "self.extra = nn.Linear(8, 8, bias=False)",
        "forward": "h = h + (self.extra(h) if torch.rand(()) < 0.5 else 0.0 * self.extra.weight.sum())",
    },
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_is_not_found(run: Run, near_miss: str) -> None:
    done = run(recipe(**NEAR_MISSES[near_miss]))
    assert done.report, done.err
    assert done.report["findings"] == []
    assert set(done.verdicts.values()) <= {"fine", "undecided"}
    assert done.code == 0


def test_a_step_that_is_random_in_itself_is_undecided(run: Run) -> None:
    """Fresh processes disagree with each other, so that another step proves no lost state."""
    done = run(recipe(net="self.rng = random.Random(time.time_ns())", forward="h = h * self.rng.random()"))
    assert done.codes == []
    assert done.verdicts["checkpoint"] == "undecided"


def test_steps_of_a_loss_that_is_not_finite_are_undecided(run: Run) -> None:
    """Parameters that are all NaN are the same whatever happens."""
    done = run(recipe(loss="return model(x).mean() * float('nan')"))
    assert done.codes == []
    assert {name for name, verdict in done.verdicts.items() if verdict == "undecided"} == {"steps", "checkpoint"}


def test_data_that_no_worker_can_read_leaves_the_rest(run: Run) -> None:
    done = run(recipe(item="assert torch.utils.data.get_worker_info() is None"))
    assert done.codes == []
    assert {name for name, verdict in done.verdicts.items() if verdict != "fine"} == {"workers"}
    assert "AssertionError" in done.report["checked"][1]["detail"]


def test_the_smallest_recipe(run: Run) -> None:
    done = run(recipe(train_data="return Points(3)").replace("batch_size = 16", "batch_size = 1"))
    assert (done.codes, done.code) == ([], 0), done.err
    assert set(done.verdicts.values()) == {"fine"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "return (model(x) - y) ** 2"}, "error: loss() returned a tensor of shape (4,), no scalar"),
        ({"item": "1 / 0"}, "reading samples of train_data() raised ZeroDivisionError"),
        ({"metrics": "raise KeyError('acc')"}, "error: metrics() raised KeyError"),
        ({"train_data": "return []"}, "train_data() is empty"),
        ({"train_data": "raise OSError('no disk')"}, "error: train_data() raised OSError"),
        (
            {
                "top": "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self): yield 1\n",
                "train_data": "return Stream()",
            },
            "error: train_data() returned a Stream, which has no length",
        ),
        ({"model": "return 3"}, "model() returned a int"),
        ({"model": "net.head = nn.LazyLinear(1)"}, "model() returned head.weight without a shape"),
        ({"model": "if RANK: raise ValueError('no file')"}, "error: model() raised ValueError (on rank 1)"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_once(run: Run, changes: dict[str, str], message: str) -> None:
    done = run(recipe(**changes))
    assert (done.code, done.report) == (2, {})
    assert message in " ".join(done.err.split())
    assert done.err.count("error:") == 1
    assert str(SRC) not in done.err


@pytest.mark.parametrize("place", ["train_data", "model", "loss"])
def test_a_rank_that_dies_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "recipe.py").write_text(recipe(**{place: "if RANK == 1: os.kill(os.getpid(), 9)"}))
    with pytest.raises(RefusedError, match=r"rank 1 crashed while .*: killed by SIGKILL"):
        rehearse(resolve(str(tmp_path / "recipe.py")))


@pytest.mark.parametrize("place", ["train_data", "model", "optimizer"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, place: str) -> None:
    """The other one waits for it in a collective, or has answered."""
    code = recipe(**{place: "if RANK == 1:\n    while True: pass"})
    (tmp_path / "recipe.py").write_text(code)
    with pytest.raises(RefusedError, match="rank 1 timed out while"):
        rehearse(resolve(str(tmp_path / "recipe.py")), call_s=10)


def test_an_error_of_one_rank_is_told_from_those_of_ranks_that_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(recipe(metrics="if RANK == 1: raise KeyError('acc')"))
    with pytest.raises(UserCodeError, match=r"metrics\(\) raised KeyError \(on rank 1\)"):
        rehearse(resolve(str(tmp_path / "recipe.py")))


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(recipe(model=f"open('{tmp_path}/here', 'w').close()\nwhile True: pass"))
    process = start(tmp_path / "recipe.py")
    end = time.monotonic() + GUARD_S
    while not (tmp_path / "here").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not any(rank.is_running() for rank in ranks)


def test_the_example_in_the_docs_says_what_it_shows(tmp_path: Path) -> None:
    """All of it, but for the seconds that it took."""
    page = (ROOT / "docs" / "training-rehearsal.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    shown = page.split("--rehearse\n")[1].split("```")[0]
    (tmp_path / "noisy.py").write_text(code)
    (tmp_path / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    with start(Path("noisy.py:NoisyDigits"), folder=tmp_path) as process:
        out, _ = process.communicate(timeout=GUARD_S)
    assert re.sub(r"in \d+ s", "in 6 s", out) == re.sub(r"in \d+ s", "in 6 s", shown)
