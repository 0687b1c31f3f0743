"""``torchproof tune`` ends with the exit code, the error and the folder that it promises."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from torchproof.bundle.read import open_bundle
from torchproof.cli.main import main
from torchproof.runtimes import RUNTIMES
from torchproof.types import Proof, decode

RANDOM = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5)

def net():
    return Net(), [torch.ones(3, 8)]
"""


@pytest.fixture(autouse=True)
def _eager_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchproof.tune.request.RUNTIMES", {"eager": RUNTIMES["eager"]})


def test_exit_0_and_the_json_that_is_stored(app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is the result alone; where stderr is no terminal, progress is plain lines on it."""
    out = tmp_path / "out" / "app.tp"
    assert main(["tune", str(app), "-o", str(out), "--budget", "1s", "--format", "json"]) == 0
    said = capsys.readouterr()
    proof = decode(said.out, Proof, what="stdout")
    assert proof.trials == open_bundle(out).proof.trials
    stored = json.loads((out / "proof.json").read_text())
    printed = json.loads(said.out)
    assert {**printed, "target": None} == {**stored, "target": None}, "but for the path, which is the bundle's own"
    assert "checking" in said.err
    assert "measuring eager" in said.err
    assert "\x1b" not in said.err


def test_exit_1_for_a_model_whose_answers_are_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In eval mode: no answer could be held to another."""
    (tmp_path / "noise.py").write_text(RANDOM)
    assert main(["tune", str(tmp_path / "noise.py:net"), "-o", str(tmp_path / "out" / "app.tp")]) == 1
    said = capsys.readouterr()
    assert "random-in-eval-mode" in said.err
    assert "help:" in said.err
    assert said.out == ""
    assert os.listdir(tmp_path) == ["noise.py"]


def test_exit_3_where_nothing_meets_the_limits(app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "app.tp"
    assert main(["tune", str(app), "-o", str(out), "--budget", "1s", "--max-memory", "1MiB", "--p99", "1us"]) == 3
    said = capsys.readouterr()
    err = " ".join(said.err.split())
    assert "nothing met the limits" in err
    assert "eager, 1 thread: p99" in err
    assert "> 0.001 ms; memory" in err
    assert "MiB > 1 MiB" in err
    assert said.out == ""
    assert os.listdir(tmp_path) == ["project"]


def test_a_bad_destination_is_refused_before_the_search(
    app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["tune", str(app), "-o", str(tmp_path / "mine")]) == 2
    said = capsys.readouterr().err
    assert "is no bundle" in said
    assert "checking" not in said


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("measuring", signal.SIGINT, 130),
        ("building", signal.SIGINT, 130),
        ("measuring", signal.SIGTERM, 143),
    ],
)
def test_a_signal_leaves_nothing_behind(
    app: Path, tmp_path: Path, wait_for: Callable[..., None], moment: str, number: int, code: int
) -> None:
    """While a trial runs; and while more artifacts wait to be built than there are cores.

    The exit code is the shell's: 128 and the signal's number.
    """
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    for folder in (out, temporary):
        folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchproof", "tune", str(app), "-o", str(out / "app.tp")],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        assert process.stderr is not None
        assert any(moment in line for line in process.stderr)
        wait_for(lambda: psutil.Process(process.pid).children(), "no child was started")
        children = psutil.Process(process.pid).children(recursive=True)
        assert os.listdir(out) != []
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stdout) == (code, "")
    assert stderr.endswith("interrupted\n") == (number == signal.SIGINT)
    assert "Traceback" not in stderr
    wait_for(lambda: not any(child.is_running() for child in children), "a child survived")
    assert os.listdir(out) == []
    assert [n for n in os.listdir(temporary) if "torchinductor" not in n] == [], "but for the folder torch itself makes"
