"""Artifacts are built side by side, and an interrupt ends all of it at once."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from torchproof.errors import TrialError
from torchproof.tune import building
from torchproof.tune.building import Built, build_all
from torchproof.tune.candidates import Variant

PATIENCE_S = 20.0  # of a job that nobody ends


class Process:
    """Takes the place of a fresh process: builds until it is killed."""

    started: list["Process"]

    def __init__(self, handler: str, **options: object) -> None:
        self.killed = threading.Event()
        self.outlived = False
        self.started.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed.set()

    def call(self, method: str, **arguments: Any) -> Any:
        self.outlived = not self.killed.wait(PATIENCE_S)
        raise TrialError("crashed", "killed by SIGKILL")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    Process.started = []
    monkeypatch.setattr(building, "FreshProcess", Process)
    return Process.started


def build(tmp_path: Path, progress: Any, *, deadline: float = 1e9, num: int = 4) -> dict[Variant, Built]:
    variants = [Variant(f"runtime{i}", f"module:Runtime{i}", "float32") for i in range(num)]
    return build_all(
        variants, {}, tmp_path, num_threads=1, at_once=1, deadline=deadline, memory_limit_bytes=1 << 30,
        progress=progress,
    )  # fmt: skip


def test_an_interrupt_ends_what_runs_and_starts_nothing_that_waits(started: list[Process], tmp_path: Path) -> None:
    """One job at a time: the second would be taken up the moment the first is killed."""

    def interrupt(text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not started:
            assert time.monotonic() < deadline
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, interrupt)
    assert not any(process.outlived for process in started)
    assert all(process.killed.is_set() for process in started)


def test_after_the_deadline_nothing_is_begun(started: list[Process], tmp_path: Path) -> None:
    said: list[str] = []
    results = build(tmp_path, said.append, deadline=time.monotonic() - 1, num=2)
    assert [(str(built.error), built.error and built.error.kind) for built in results.values()] == [
        ("no time left to build it; a larger --budget gives it some", "not built")
    ] * 2
    assert said[0] == "building runtime0, runtime1"
