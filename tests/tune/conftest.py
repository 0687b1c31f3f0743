"""A twenty-line model that does its work a hundred times over, and the table of runtimes that are tried on it."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchproof.runtimes import RUNTIMES
from torchproof.target.resolve import resolve
from torchproof.tune import TuneRequest

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
DEADLINE_S = 90.0

APP = """
import torch
import torchproof as tp
from torchproof.runtimes import RUNTIMES

RUNTIMES["fast"] = "fake_runtimes:Fast"  # the bundle's own code brings the runtime that its plan names

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)
    def forward(self, x):
        for _ in range(100):
            y = self.linear(x)
        return y

class Service(tp.Service):
    def load(self):
        return Net()
    def encode(self, request: list[float]):
        return {"x": torch.tensor(request)}
    def decode(self, outputs, request):
        return outputs.tolist()
    def samples(self):
        return [[float(i == j) + 0.1 * i for i in range(16)] for j in range(6)]
"""

Ask = Callable[..., TuneRequest]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes can be imported here and in every child; what the model registers here is forgotten again."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(HERE)]))
    # One thread count, one precision, short timings: what is tested is how a run ends.
    monkeypatch.setattr("torchproof.tune.search.thread_counts", lambda environment: (1,))
    monkeypatch.setattr("torchproof.runtimes.eager.Eager.precisions", ("float32",))
    monkeypatch.setattr("torchproof.tune.measuring.RATE_S", 0.02)
    monkeypatch.delitem(sys.modules, "fake_runtimes", raising=False)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "app.py"
    path.parent.mkdir()
    path.write_text(APP)
    return path


@pytest.fixture
def ask(app: Path, tmp_path: Path) -> Ask:
    """A request for the model with eager and the fakes named: ``ask("fast=Fast", budget_s=60)``."""

    def make(*fakes: str, **options: object) -> TuneRequest:
        table = {"eager": RUNTIMES["eager"]}
        for fake in fakes:
            name, _, kind = fake.partition("=")
            table[name] = f"fake_runtimes:{kind}"
        return TuneRequest(resolve(str(app)), tmp_path / "out" / "app.tp", runtimes=table, **options)  # type: ignore[arg-type]

    (tmp_path / "out").mkdir()
    return make


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object], str], None]:
    """Polls until a condition holds; fails at a deadline."""

    def wait(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    return wait
