"""The server's end of its processes: zygotes, and the replicas that they fork off."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchproof.errors import TrialError, revive
from torchproof.serve.dispatch import Holder
from torchproof.serve.memwatch import MemoryWatch
from torchproof.serve.wire import (
    WHERE,
    WHERE_S,
    Begin,
    Exited,
    Failed,
    Fork,
    Forked,
    Kill,
    Message,
    Prepared,
    Reader,
    Ready,
    Reply,
    Report,
    Setup,
    pack,
)
from torchproof.types.serving import MemorySample

# A process that loads is looked at so often, and given up after so many looks of which none saw a thread that had run.
LOOK_S = 1.0
NUM_STILL = 120
log = logging.getLogger("torchproof.serve")


class Replica(asyncio.Protocol):
    """One replica.

    Attributes:
        number: counts up; never used again.
        holder: what the dispatcher knows of it.
        ready: what it says once it answers; raises what it could not be loaded for.
        ended: done once its process is gone or going.
        retired: done once it should be replaced while it still answers.
        why: why it was ended by us; empty where it ended by itself.
        watch: what it has said of its memory; ``memory`` is the last of it.
    """

    def __init__(self, number: int, pid: int, end: socket.socket, on_reply: "Callable[[Replica, Reply], None]") -> None:
        loop = asyncio.get_running_loop()
        self.number, self.pid = number, pid
        self.holder = Holder(send=self.send, progress=lambda: cpu_progress(pid))
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.retired: asyncio.Future[None] = loop.create_future()
        self.memory: MemorySample | None = None
        self.watch = MemoryWatch()
        self.num_fallbacks = 0
        self.why = ""
        self.zygote: Zygote | None = None
        self._reader: Reader[Reply] = Reader(Reply)
        self._on_reply = on_reply
        self._socket = end
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        for reply in self._reader.feed(data):
            if isinstance(reply, Failed):
                self._fail(revive(reply.error))
            elif isinstance(reply, Ready):
                self.memory = reply.memory
                if not self.ready.done():
                    self.ready.set_result(reply)
            else:
                self._on_reply(self, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            # A write to a process that has just ended closes the transport, with what it had said still unread: which
            # request it was at, and answers. The socket itself is open until this method returns.
            self._read_the_rest()
        self._fail(TrialError("crashed", "it ended while it was loaded"))
        if not self.ended.done():
            self.ended.set_result(None)

    def gone(self) -> None:
        """Its process has ended. What the user's code has forked may still hold the socket open."""
        self._read_the_rest()
        self.close()

    def _read_the_rest(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 18):
                self.data_received(data)

    async def loaded(self, limit_s: float | None) -> None:
        """Waits until it answers.

        Raises:
            TorchproofError, UserCodeError: it can't be loaded.
            TrialError: it ended, took longer than ``limit_s``, or none of its threads ran for two minutes.
        """
        await _loaded(self.ready, self.pid, limit_s)

    def send(self, message: Message) -> None:
        """Writes it, or holds it until the replica reads."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def close(self) -> None:
        """Ends the connection; a replica that is well ends then."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, exc: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(exc)
            self.ready.exception()  # known; nobody may be waiting


T = TypeVar("T")


async def _loaded(ready: "asyncio.Future[T]", pid: int, limit_s: float | None) -> T:
    """What a process says when it has loaded; raises what it could not, or that it hangs."""
    began, last, num_still = time.monotonic(), -1.0, 0
    while not (await asyncio.wait({ready}, timeout=LOOK_S))[0]:
        if limit_s is not None and time.monotonic() - began > limit_s:
            raise TrialError("timed out", "it did not load in the time that the first one took, many times over")
        seen = seconds_run(pid)
        num_still = num_still + 1 if seen == last else 0
        last = seen
        if num_still >= NUM_STILL:
            still_s = NUM_STILL * LOOK_S
            raise TrialError("timed out", f"none of its threads ran for {still_s:.0f} s while it was loaded")
    return ready.result()


class Zygote:
    """A process that forks replicas.

    Attributes:
        refusal: why it may not fork after what it has loaded; empty when it may.
    """

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        self.refusal = ""
        self._loop = asyncio.get_running_loop()
        self._socket, end = socket.socketpair()
        self._socket.setblocking(False)
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchproof.serve.zygote", str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # what the user's code prints must not mix with the result
                pass_fds=(end.fileno(),),
                env={"TQDM_DISABLE": "1", **os.environ, **environment},  # no progress bars in the log
                start_new_session=True,  # Ctrl-C is for the server
            )
        self._reader: Reader[Report] = Reader(Report)
        self._prepared: asyncio.Future[str] = self._loop.create_future()
        self._forks: deque[asyncio.Future[int]] = deque()
        self._replicas: dict[int, Replica] = {}  # those that nobody has told to end
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._socket.send(pack(setup))

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    async def prepared(self) -> None:
        """Waits until it has loaded what replicas share.

        Raises:
            TorchproofError, UserCodeError, TrialError: it could not, or hangs.
        """
        try:
            self.refusal = await _loaded(self._prepared, self._process.pid, None)
        except TrialError as exc:
            if exc.kind == "timed out":
                self._process.send_signal(WHERE)
                await asyncio.sleep(WHERE_S)
            raise

    async def fork(self, number: int, begin: Begin, on_reply: Callable[[Replica, Reply], None]) -> Replica:
        """A new replica, which loads now.

        Raises:
            TrialError: the zygote has ended.
        """
        ours, theirs = socket.socketpair()
        pid: asyncio.Future[int] = self._loop.create_future()
        with theirs:
            try:
                socket.send_fds(self._socket, [pack(Fork())], [theirs.fileno()])
            except OSError:
                ours.close()
                raise TrialError("crashed", "the process that forks replicas has ended") from None
        self._forks.append(pid)
        ours.setblocking(False)
        replica = Replica(number, await pid, ours, on_reply)
        self._replicas[replica.pid] = replica
        await self._loop.create_unix_connection(lambda: replica, sock=ours)
        replica.send(begin)
        return replica

    def kill(self, pid: int, *, hung: bool = False) -> None:
        """Ends a replica at once; where it hangs the log says in which line."""
        self._replicas.pop(pid, None)
        with contextlib.suppress(OSError):
            self._socket.send(pack(Kill(pid=pid, hung=hung)))

    def close(self) -> None:
        """Ends it, and its replicas with it."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            lost = TrialError("crashed", "the process that loads the model has ended; its output says more")
            waiting: list[asyncio.Future[Any]] = [self._prepared, *self._forks]
            for future in waiting:
                if not future.done():
                    future.set_exception(lost)
                    future.exception()
            return
        for report in self._reader.feed(data):
            if isinstance(report, Prepared):
                self._prepared.set_result(report.refusal)
            elif isinstance(report, Failed):
                self._prepared.set_exception(revive(report.error))
            elif isinstance(report, Forked):
                self._forks.popleft().set_result(report.pid)
            elif isinstance(report, Exited):
                replica = self._replicas.pop(report.pid, None)
                level = logging.WARNING if replica and report.status else logging.DEBUG
                log.log(level, "replica process %s ended: %s", report.pid, _status(report.status))
                if replica:
                    replica.gone()


def _status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-status, f'signal {-status}')}"


def cpu_progress(pid: int) -> tuple[float, bool]:
    """CPU seconds that a process has used, and whether one of its threads runs or waits for the CPU."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        tasks = Path(f"/proc/{pid}/task").iterdir()
        states = [task.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0] for task in tasks]
    except (OSError, IndexError):
        return time.monotonic(), True  # no such file system, or it is just ending: nothing can be said
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), "R" in states


def seconds_run(pid: int) -> float:
    """CPU seconds of a process and of what it has started, to the nanosecond: a thread that only wakes up shows."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        return own + sum(seconds_run(int(child)) for task in tasks for child in (task / "children").read_text().split())
    except (OSError, ValueError, IndexError):
        return time.monotonic()  # no such file system, or one is just ending: nothing can be said
