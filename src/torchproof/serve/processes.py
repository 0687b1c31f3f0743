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
from typing import Any

from torchproof.errors import TrialError, revive
from torchproof.serve.dispatch import Holder
from torchproof.serve.wire import (
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
    """

    def __init__(self, number: int, pid: int, end: socket.socket, on_reply: "Callable[[Replica, Reply], None]") -> None:
        loop = asyncio.get_running_loop()
        self.number, self.pid = number, pid
        self.holder = Holder(send=self.send, progress=lambda: cpu_progress(pid))
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.retired: asyncio.Future[None] = loop.create_future()
        self.memory: MemorySample | None = None
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
            with contextlib.suppress(OSError):
                while data := self._socket.recv(1 << 18):
                    self.data_received(data)
        self._fail(TrialError("crashed", "it ended while it was loaded"))
        if not self.ended.done():
            self.ended.set_result(None)

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
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the server
            )
        self._reader: Reader[Report] = Reader(Report)
        self._prepared: asyncio.Future[str] = self._loop.create_future()
        self._forks: deque[asyncio.Future[int]] = deque()
        self._killed: set[int] = set()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._socket.send(pack(setup))

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    async def prepared(self) -> None:
        """Waits until it has loaded what replicas share.

        Raises:
            TorchproofError, UserCodeError, TrialError: it could not.
        """
        self.refusal = await self._prepared

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
        await self._loop.create_unix_connection(lambda: replica, sock=ours)
        replica.send(begin)
        return replica

    def kill(self, pid: int) -> None:
        """Ends a replica at once."""
        self._killed.add(pid)
        with contextlib.suppress(OSError):
            self._socket.send(pack(Kill(pid=pid)))

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
                log.log(
                    logging.DEBUG if report.status == 0 or report.pid in self._killed else logging.WARNING,
                    "replica process %s ended: %s",
                    report.pid,
                    _status(report.status),
                )


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
