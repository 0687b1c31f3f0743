"""``torchproof doctor`` end to end on this machine: text that fits, JSON that decodes strictly, torch left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchproof.types import decode
from torchproof.types.doctor import DoctorReport

SRC = str(Path(__file__).parents[2] / "src")


def doctor(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environ |= {"PYTHONPATH": SRC, "COLUMNS": "80", **variables}
    command = [sys.executable, "-m", "torchproof", "doctor", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def fake_torch(tmp_path: Path) -> str:
    """A search path whose torch is one file: quick to import, and three threads."""
    (tmp_path / "torch.py").write_text("get_num_threads = lambda: 3\nget_num_interop_threads = lambda: 2\n")
    info = tmp_path / "torch-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return f"{tmp_path}{os.pathsep}{SRC}"


def test_text(fake_torch: str) -> None:
    done = doctor(PYTHONPATH=fake_torch)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "torch      9.9, 3 intra-op and 2 inter-op threads\n" in done.stdout
    assert "\x1b[" not in done.stdout


def test_json(fake_torch: str) -> None:
    done = doctor("--format", "json", PYTHONPATH=fake_torch, OMP_WAIT_POLICY="passive")
    assert (done.returncode, done.stderr) == (0, "")
    report = decode(done.stdout, DoctorReport, what="doctor")
    assert report.torch is not None
    assert report.torch.num_threads == 3
    assert report.environment.variables["OMP_WAIT_POLICY"] == "passive"
    assert report.usable_cores is not None
    assert report.environment.usable_cores == report.usable_cores.estimate


def test_empty_torch_logs_is_found() -> None:
    """With the installed torch: ``TORCH_LOGS=""`` breaks its import, and doctor lives on and says so."""
    pytest.importorskip("torch")
    done = doctor("--format", "json", TORCH_LOGS="")
    report = decode(done.stdout, DoctorReport, what="doctor")
    assert done.returncode == 0
    assert report.torch is not None
    broken = bool(report.torch.error)  # a later torch may cure it; then nothing is said
    assert broken is any(advice.name == "torch-logs-empty" for advice in report.advice)


def test_stays_free_of_torch() -> None:
    code = "import sys, torchproof.cli.doctor; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    environ = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_has_examples() -> None:
    done = doctor("--help")
    assert done.returncode == 0
    assert "Examples:\n    torchproof doctor\n" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
