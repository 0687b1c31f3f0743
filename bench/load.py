"""Load for HTTP servers: raw keep-alive connections, closed loop (N clients) and open loop (Poisson arrivals).

It uses the standard library only, so it runs in any server's environment. Bodies are kept in the samples and checked
after the run, so that the check takes nothing from the load.
"""

import asyncio
import ctypes
import itertools
import os
import random
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

Error = Literal["", "connection", "timeout"]

RECONNECT_S = 0.05  # after an error, or a closed loop against a dead server would be a busy loop


class Sample(NamedTuple):
    """One request.

    Attributes:
        sent_s: since the start of the load; in the open loop the time at which it was due, so that a generator that
            falls behind is seen in the latency.
        latency_s: until the whole answer was here, or until the error.
        status: HTTP; 0 where there was no answer.
        request_index: which of the requests.
        error: "connection" where it was refused, reset, or closed before the end of the answer.
    """

    sent_s: float
    latency_s: float
    status: int
    request_index: int
    body: bytes
    error: Error = ""


def post(
    path: str, body: bytes, content_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> bytes:
    """A raw POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: bench", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def throughput(samples: Sequence[Sample], duration_s: float, status: int = 200) -> float:
    """Answers with this status that were here by ``duration_s``, per second."""
    return sum(s.status == status and s.sent_s + s.latency_s <= duration_s for s in samples) / duration_s


async def closed_loop(
    host: str, port: int, requests: Sequence[bytes], *, clients: int, duration_s: float, timeout_s: float = 30.0
) -> list[Sample]:
    """Each client sends its next request when it has its answer; those in flight at the end are waited for.

    Returns:
        The samples in the order of their ends.
    """
    samples: list[Sample] = []
    indices = itertools.cycle(range(len(requests)))
    start = time.monotonic()

    async def client() -> None:
        pool: list[_Connection] = []
        while (sent := time.monotonic()) - start < duration_s:
            index = next(indices)
            answer = await _ask(pool, host, port, requests[index], timeout_s)
            samples.append(Sample(sent - start, time.monotonic() - sent, answer[0], index, answer[1], answer[2]))
            if answer[2]:
                await asyncio.sleep(RECONNECT_S)
        _close(pool)

    await asyncio.gather(*(client() for _ in range(clients)))
    return samples


async def open_loop(
    host: str, port: int, requests: Sequence[bytes], *, rps: float, duration_s: float, seed: int, timeout_s: float
) -> list[Sample]:
    """Requests arrive when they are due, whatever the server does, over as many connections as that takes.

    Args:
        rps: mean of the Poisson arrivals.
        timeout_s: after it a request is given up, and its connection closed.

    Returns:
        The samples in the order of their ends.
    """
    dues = list(itertools.takewhile(lambda due: due < duration_s, _arrivals(random.Random(seed), rps)))
    samples: list[Sample] = []
    pool: list[_Connection] = []
    connecting: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    all_ended = loop.create_future()
    start = time.monotonic()

    def ended(number: int, answer: _Answer, connection: _Connection | None = None) -> None:
        latency_s = time.monotonic() - start - dues[number]
        samples.append(Sample(dues[number], latency_s, answer[0], number % len(requests), answer[1], answer[2]))
        if connection is not None and not connection.closed:
            pool.append(connection)
        if len(samples) == len(dues) and not all_ended.done():
            all_ended.set_result(None)

    def send(number: int, connection: _Connection, deadline: float) -> None:
        # No task: at thousands of requests a second that would take cores from the server.
        connection.send(requests[number % len(requests)], deadline, lambda answer: ended(number, answer, connection))

    async def connect(number: int, deadline: float) -> None:
        connection, error = await _connect(host, port, deadline)
        if connection is None:
            ended(number, (0, b"", error))
        else:
            send(number, connection, deadline)

    with _Timer() as timer:
        for number, due in enumerate(dues):
            if start + due > time.monotonic():
                await timer.until(start + due)
            deadline = loop.time() + timeout_s
            if (connection := _idle(pool)) is not None:
                send(number, connection, deadline)
            else:
                task = asyncio.create_task(connect(number, deadline))
                connecting.add(task)
                task.add_done_callback(connecting.discard)
    if dues:
        await all_ended
    _close(pool)
    return samples


def _arrivals(rng: random.Random, rps: float) -> "itertools.accumulate[float]":
    return itertools.accumulate(rng.expovariate(rps) for _ in itertools.count())


class _Timer:
    """Sleeps to the microsecond: asyncio's own timers round up to the next millisecond, as epoll does."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = asyncio.get_running_loop()
        self._rang: asyncio.Future[None] | None = None

    def __enter__(self) -> "_Timer":
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def until(self, due: float) -> None:
        """Returns at ``due`` of ``time.monotonic()``."""
        self._rang = self._loop.create_future()
        seconds, rest = divmod(due, 1.0)
        absolute = 1  # TFD_TIMER_ABSTIME
        setting = struct.pack("@qqqq", 0, 0, int(seconds), max(1, int(rest * 1e9)))
        if self._libc.timerfd_settime(self._fd, absolute, setting, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rang

    def _ring(self) -> None:
        os.read(self._fd, 8)  # or it goes on ringing
        if self._rang is not None and not self._rang.done():
            self._rang.set_result(None)


_Answer = tuple[int, bytes, Error]


async def _ask(pool: "list[_Connection]", host: str, port: int, request: bytes, timeout_s: float) -> _Answer:
    """Over an idle connection of the pool, or a new one, which the pool gets if it can be used again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    connection = _idle(pool)
    if connection is None:
        connection, error = await _connect(host, port, deadline)
        if connection is None:
            return 0, b"", error
    answered: asyncio.Future[_Answer] = loop.create_future()

    def done(answer: _Answer) -> None:
        if not answered.done():  # whoever waited may be gone
            answered.set_result(answer)

    connection.send(request, deadline, done)
    answer = await answered
    if not connection.closed:
        pool.append(connection)
    return answer


def _idle(pool: "list[_Connection]") -> "_Connection | None":
    """The last that was used: the least likely to be closed by the server just now."""
    while pool:
        connection = pool.pop()
        if not connection.closed:
            return connection
    return None


async def _connect(host: str, port: int, deadline: float) -> "tuple[_Connection | None, Error]":
    try:
        async with asyncio.timeout_at(deadline):
            return (await asyncio.get_running_loop().create_connection(_Connection, host, port))[1], ""
    except TimeoutError:
        return None, "timeout"
    except OSError:
        return None, "connection"


def _close(pool: "list[_Connection]") -> None:
    for connection in pool:
        connection.close()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._done: Callable[[_Answer], None] | None = None
        self._buffer = bytearray()
        self._read_body: Callable[[bool], bytes | None] | None = None

    def send(self, request: bytes, deadline: float, done: "Callable[[_Answer], None]") -> None:
        """Calls ``done`` once, at the end of the answer, or at the deadline, of the loop's time."""
        self._done = done
        self._timer = self._loop.call_at(deadline, self._end, 0, b"", "timeout")
        self._transport.write(request)

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's isn't one by its class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._done is None:
            self.close()  # nobody asked
            return
        while self._read_body is None:
            if (end := self._buffer.find(b"\r\n\r\n")) < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
            self._read_head(head)
        self._advance(at_end=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is not None and self._read_body is not None and exc is None:
            self._advance(at_end=True)
        self._end(0, b"", "connection")

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(b"\r\n")
        self._status = int(status_line.split(b" ", 2)[1])
        if self._status < 200:  # 100 Continue: another head follows
            return
        headers = {name.strip(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._keep = headers.get(b"connection") != b"close"
        if headers.get(b"transfer-encoding") == b"chunked":
            self._chunks: list[bytes] = []
            self._read_body = self._chunked
        elif b"content-length" in headers or self._status in (204, 304):
            self._length = int(headers.get(b"content-length", 0))
            self._read_body = self._sized
        else:
            self._keep = False
            self._read_body = self._until_end

    def _advance(self, at_end: bool) -> None:
        assert self._read_body is not None
        body = self._read_body(at_end)
        if body is not None:
            self._end(self._status, body, "")

    def _sized(self, at_end: bool) -> bytes | None:
        if len(self._buffer) < self._length:
            return None
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        return body

    def _chunked(self, at_end: bool) -> bytes | None:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:end].partition(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            del self._buffer[: end + 2 + size + 2]
            if not size:  # no trailers, which no server here sends
                return b"".join(self._chunks)
        return None

    def _until_end(self, at_end: bool) -> bytes | None:
        return bytes(self._buffer) if at_end else None

    def _end(self, status: int, body: bytes, error: Error) -> None:
        if self._done is None:
            return
        done, self._done = self._done, None
        self._timer.cancel()
        keep = not error and self._keep and not self._buffer
        self._read_body = None
        if not keep and not self.closed:
            self.close()
        done((status, body, error))
