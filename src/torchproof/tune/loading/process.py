"""A process with DataLoader workers, which takes along what they would leave in shared memory."""

import contextlib
import time
from pathlib import Path

import psutil

from torchproof.measure.process import GRACE_S, FreshProcess

SHARED_MEMORY = Path("/dev/shm")  # where torch puts it on Linux
POLL_S = 0.01


class LoaderProcess(FreshProcess):
    """A ``FreshProcess`` whose workers may be killed while they hand over a batch.

    torch makes a file, and removes its name once it is open; a worker that is killed in between leaves it: measured, 8
    files after some 350 processes that trained in turns.
    """

    def kill(self) -> None:
        """``FreshProcess.kill``, and removes the shared memory of these processes that still has a name."""
        tree = self._tree()
        super().kill()
        _wait(tree)
        for process in tree:
            for path in SHARED_MEMORY.glob(f"torch_{process.pid}_*"):
                path.unlink(missing_ok=True)

    def _tree(self) -> list[psutil.Process]:
        if not self.alive:  # its number may be another's by now
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []


def _wait(tree: list[psutil.Process]) -> None:
    """Until none of them can make another file; who takes the orphans is not ours to know, so zombies are as good."""
    end = time.monotonic() + GRACE_S
    while any(_alive(process) for process in tree) and time.monotonic() < end:
        time.sleep(POLL_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
