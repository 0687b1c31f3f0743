"""A fresh process that answers calls, and may crash, hang or eat memory without harm to the caller."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from torchproof import errors
from torchproof.errors import TrialError, UserCodeError

POLL_S = 0.1  # between looks at the process and its memory
GRACE_S = 5.0  # between the end of a process's pipe and its own
LOG_TAIL_BYTES = 8192

CALL_ERRORS = (TrialError, errors.TorchproofError, UserCodeError)  # what ``FreshProcess.call`` raises


class FreshProcess:
    """A child process with a handler object in it; its public methods are called one at a time, arguments as JSON.

    Args:
        handler: ``package.module:Class``, made in the child without arguments.
        environment: variables that differ from this process's; None removes one.
        memory_limit_bytes: resident memory of the child and its own children at which it is ended.
        folder: its working folder; None is this process's.

    Attributes:
        started: ``time.perf_counter()`` when the process was asked for.
        peak_bytes: the largest resident memory seen, the child's own children included.
    """

    def __init__(
        self,
        handler: str,
        *,
        environment: Mapping[str, str | None] | None = None,
        memory_limit_bytes: int | None = None,
        folder: str | None = None,
    ) -> None:
        self.handler = handler
        self.peak_bytes = 0
        self._memory_limit_bytes = memory_limit_bytes
        self._over_limit = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        # What it leaves in its temporary folder goes with it, as it will be killed; and no candidate finds another's.
        self._temporary = tempfile.TemporaryDirectory(prefix="torchproof-", ignore_cleanup_errors=True)
        changed = {**os.environ, "TMPDIR": self._temporary.name}
        for key, value in (environment or {}).items():
            if value is None:
                changed.pop(key, None)
            else:
                changed[key] = value
        calls_in, self._calls = os.pipe()
        self._answers, answers_out = os.pipe()
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchproof.measure.child", handler, str(calls_in), str(answers_out)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(calls_in, answers_out),
                env=changed,
                cwd=folder,
                start_new_session=True,  # its own group: a kill takes compilers and pools with it
            )
        finally:
            os.close(calls_in)
            os.close(answers_out)
        self._buffer = b""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The child's process id, which is also its group's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def call(self, method: str, *, timeout_s: float, **arguments: Any) -> Any:
        """One call, answered with plain JSON values.

        Raises:
            TrialError: the handler raised (``failed``), the process died (``crashed``), gave no answer in time
                (``timed out``) or was ended for its memory (``out of memory``).
            TorchproofError, UserCodeError: the handler raised one; raised again here.
        """
        try:
            os.write(self._calls, msgspec.json.encode({"method": method, "arguments": arguments}) + b"\n")
        except BrokenPipeError:
            raise self._death() from None
        answer = self._read_line(timeout_s)
        if "error" in answer:
            raise errors.revive(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        """Ends the process and everything it started; a call that waits for it elsewhere raises ``TrialError``."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself in between
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """``kill``, and lets go of the pipes."""
        self.kill()
        self._watcher.join()
        for fd in (self._calls, self._answers):
            if fd >= 0:
                os.close(fd)
        self._calls = self._answers = -1
        self._log.close()
        self._temporary.cleanup()

    def log_tail(self) -> str:
        """The end of what the child printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")

    def _read_line(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self.kill()
                raise TrialError("timed out", f"no answer in {round(timeout_s, 1):g} s")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise self._death()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        result: dict[str, Any] = msgspec.json.decode(line)
        return result

    def _death(self) -> TrialError:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return TrialError("crashed", "it closed the pipe to its caller")
        if self._over_limit:
            limit = self._memory_limit_bytes or 0
            return TrialError(
                "out of memory", f"ended at {self.peak_bytes / 2**20:.0f} MiB, limit {limit / 2**20:.0f} MiB"
            )
        said = self._last_words()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return TrialError("crashed", f"killed by {name}{said}")
        return TrialError("crashed", f"exited with code {code}{said}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log_tail().splitlines() if line.strip()]
        return f": {lines[-1][:200]}" if lines else ""

    def _watch(self) -> None:
        while self._process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, _tree_bytes(self._process.pid))
            if self._memory_limit_bytes is not None and self.peak_bytes > self._memory_limit_bytes:
                self._over_limit = True
                self.kill()
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what a process that ended by itself left behind


def _tree_bytes(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended while we counted
    return total


def as_trial_error(exc: Exception) -> TrialError:
    """One of ``CALL_ERRORS`` as the end of a trial, where it must not be the end of the run."""
    if isinstance(exc, TrialError):
        return exc
    if isinstance(exc, UserCodeError):
        return TrialError("failed", f"{exc.doing}: {exc.trace.rstrip().rpartition(chr(10))[2]}")
    return TrialError("failed", str(exc))
