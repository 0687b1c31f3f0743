"""A user's project of a few files, prepared once by the process that prepares the real ones."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchproof.bundle.write import write_bundle
from torchproof.machine.environment import read_environment
from torchproof.measure.process import FreshProcess
from torchproof.target.resolve import resolve
from torchproof.types import (
    SCHEMA,
    Candidate,
    CheckReport,
    Choice,
    GoldenSummary,
    Limits,
    Plan,
    Proof,
    Target,
    Tolerance,
)

TIMEOUT_S = 120.0

FILES = {
    "app.py": """
        from pathlib import Path
        import torch
        import torchproof as tp
        from helpers import scale
        from parts.inner import SHIFT

        class Net(torch.nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.linear = torch.nn.Linear(4, 3)
                self.factor = factor
            def forward(self, x):
                return self.linear(x) * self.factor + SHIFT

        class Service(tp.Service):
            files = ("data/*.txt", "labels.json")
            def __init__(self):
                self.factor = scale(Path(__file__).with_name("data").joinpath("factor.txt").read_text())
            def load(self):
                return Net(self.factor)  # random weights: only the stored ones give the golden answers
            def encode(self, request: list[float]):
                return {"x": torch.tensor(request)}
            def decode(self, outputs, request):
                return outputs.tolist()
            def samples(self):
                return [[1.0, 2.0, 3.0, float(i)] for i in range(4)]
        """,
    "helpers.py": """
        def scale(text):
            return float(text)
        """,
    "parts/__init__.py": "",
    "parts/inner.py": "SHIFT = 0.5\n",
    "data/factor.txt": "2.5",
    "data/notes.txt": "read by nobody",
    "labels.json": "[]",
    "unused.py": "raise SystemExit('nobody imports this')\n",
    "secret.env": "TOKEN=1\n",
}


@dataclass(frozen=True)
class Project:
    """A user's folder, and what ``Prepare`` wrote and said about it."""

    folder: Path
    target: Target
    work: Path
    done: dict[str, Any]

    def proof(self, artifact: str = "artifacts/eager-float32") -> Proof:
        report = msgspec.convert(self.done["report"], CheckReport)
        choice = Choice(candidate=Candidate(runtime="eager"), max_batch_size=2, padding=False, artifact=artifact)
        return Proof(
            schema=SCHEMA,
            torchproof="0.1.0",
            created="2030-01-01T00:00:00+00:00",
            target=self.target,
            signature=report.signature,
            traffic=report.traffic,
            environment=read_environment(),
            limits=Limits(),
            tolerance=Tolerance(),
            golden=GoldenSummary(num_rows=self.done["num_golden_rows"], precision=self.done["precision"]),
            batching=True,
            padding=False,
            baseline="eager, default threads",
            reference="eager, 1 thread",
            speedup=None,
            plan=Plan(chosen=choice, runners_up=(), decisions=(), holds_while={}),
            trials=(),
            findings=(),
            search_s=1.0,
        )

    def write(
        self,
        path: Path,
        *,
        proof: Proof | None = None,
        prove: Callable[[Path], None] | None = None,
        artifacts: dict[str, Path] | None = None,
    ) -> Path:
        write_bundle(
            path,
            proof or self.proof(),
            golden=self.work / "golden.safetensors",
            weights=self.work / "weights.safetensors",
            artifacts=artifacts or {},
            code=[Path(file) for file in self.done["code"]],
            prove=prove,
        )
        return path


def prepare(root: Path) -> Project:
    """Writes the project and checks it in a fresh process."""
    folder, work = root / "project", root / "work"
    work.mkdir(parents=True)
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    target = resolve(str(folder / "app.py"))
    with FreshProcess("torchproof.tune.jobs:Prepare") as process:
        done = process.call(
            "run", timeout_s=TIMEOUT_S, target=msgspec.to_builtins(target), traffic=None, folder=str(work)
        )
    return Project(folder, target, work, done)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return prepare(tmp_path_factory.mktemp("project"))


@pytest.fixture
def new_project(tmp_path: Path) -> Callable[[], Project]:
    """One that a test may destroy."""
    return lambda: prepare(tmp_path / "own")
