"""What workers that are killed leave in shared memory goes with them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchproof.tune.loading.process import SHARED_MEMORY, LoaderProcess

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")

HANDLER = """
import multiprocessing, os, pathlib, signal, time

def name(pid):
    return pathlib.Path(f"/dev/shm/torch_{pid}_1_planted")

def worker(told):
    name(os.getpid()).write_bytes(b"batch")
    told.set()
    if STOPS:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

class Handler:
    def leave(self):
        context = multiprocessing.get_context("fork")
        told = context.Event()
        self.worker = context.Process(target=worker, args=(told,))
        self.worker.start()
        told.wait()
        name(os.getpid()).write_bytes(b"batch")
        return [os.getpid(), self.worker.pid]
"""


@pytest.fixture
def anothers() -> Iterator[Path]:
    """A file of a process that has nothing to do with it: this one."""
    path = SHARED_MEMORY / f"torch_{os.getpid()}_1_planted"
    path.write_bytes(b"batch")
    yield path
    path.unlink()


@pytest.mark.parametrize("stops", [False, True])
def test_named_shared_memory_of_killed_processes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anothers: Path, stops: bool
) -> None:
    """That of the process and of its worker, running or stopped; nobody else's."""
    (tmp_path / "leaving.py").write_text(HANDLER.replace("STOPS", str(stops)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)]))
    with LoaderProcess("leaving:Handler") as process:
        pids = process.call("leave", timeout_s=90.0)
        left = [SHARED_MEMORY / f"torch_{pid}_1_planted" for pid in pids]
        assert all(path.exists() for path in left)
    assert not any(path.exists() for path in left)
    assert anothers.exists()
