"""Listens, starts what is served, answers and stops: uvicorn around the app."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from torchproof.errors import UsageError
from torchproof.machine.memory import usable_memory
from torchproof.serve.app import INFER, PREDICT, App, Settings
from torchproof.serve.dispatch import Dispatcher
from torchproof.serve.metrics import Metrics
from torchproof.serve.protocol import Protocol
from torchproof.serve.supervisor import Supervisor
from torchproof.serve.tracing import open_tracer
from torchproof.serve.wanted import Wanted
from torchproof.types.serving import Facts, MemorySample

# Of the machine's memory, for the bodies of all requests that wait: each is there twice, here and in its replica.
QUEUE_MEMORY_SHARE = 0.05
BACKLOG = 2048  # uvicorn's own default


@dataclass(frozen=True)
class Listening:
    """How the server meets its clients.

    Attributes:
        grace_s: that requests in flight get after SIGTERM.
        certfile, keyfile: PEM files for TLS; None without.
    """

    socket: socket.socket
    max_queue: int
    grace_s: float
    certfile: Path | None = None
    keyfile: Path | None = None

    @property
    def url(self) -> str:
        """``http://127.0.0.1:8000``."""
        host, port = self.socket.getsockname()[:2]
        scheme = "https" if self.certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: the port is in use or not allowed, or the host is none of this machine's addresses.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            message, help = f"port {port} on {host} is in use", "name another with --port; --port 0 takes a free one"
        elif exc.errno == errno.EACCES:
            message, help = f"port {port} needs privileges that this process lacks", "name one above 1023 with --port"
        else:
            message = f"{host} is no address of this machine: {(exc.strerror or str(exc)).lower()}"
            help = "--host 127.0.0.1 for this machine only, --host 0.0.0.0 for all its addresses"
        raise UsageError(message, help=help) from None


def serve(
    listening: Listening,
    wanted: Wanted,
    settings: Settings,
    on_ready: Callable[[Facts, int, tuple[MemorySample, ...]], None],
) -> None:
    """Answers until SIGINT or SIGTERM, then finishes the requests in flight. SIGHUP reloads.

    Args:
        on_ready: called once the model answers, with the number of replicas, 0 where it runs in this process, and the
            memory of each one that is up.

    Raises:
        TorchproofError, UserCodeError, TrialError: it can't be served.
    """
    retried: list[Callable[[int], None]] = []
    max_bytes = QUEUE_MEMORY_SHARE * usable_memory()
    dispatcher = Dispatcher(listening.max_queue, lambda number: retried[0](number), max_bytes)
    supervisor: Supervisor
    metrics = Metrics(
        (PREDICT, INFER), lambda: dispatcher.depth, lambda: supervisor.replicas(), lambda: supervisor.memory()
    )
    retried.append(metrics.retried)
    supervisor = Supervisor(dispatcher, metrics)
    app = App(dispatcher, supervisor, metrics, settings)
    config = uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(listening.grace_s)),
        ssl_certfile=listening.certfile,
        ssl_keyfile=listening.keyfile,
    )
    try:
        config.load()
    except OSError as exc:
        raise UsageError(
            f"the TLS certificate or key can't be used: {exc}", help="name PEM files that belong together"
        ) from None
    server = uvicorn.Server(config)
    with _stopped_by_signals(server), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_run(server, listening, wanted, app, on_ready))


async def _run(
    server: uvicorn.Server,
    listening: Listening,
    wanted: Wanted,
    app: App,
    on_ready: Callable[[Facts, int, tuple[MemorySample, ...]], None],
) -> None:
    supervisor, dispatcher = app.supervisor, app.dispatcher
    loop = asyncio.get_running_loop()

    async def start() -> None:
        try:
            generation = await supervisor.start(wanted)
            app.trace(open_tracer())  # after the processes: what sends spans has a thread
            assert generation.facts is not None
            await supervisor.filled()
            on_ready(generation.facts, len(generation.keepers), tuple(supervisor.memory().values()))
        except BaseException:
            server.should_exit = True
            raise

    asked = asyncio.Event()

    async def reloads() -> None:
        await asyncio.wait([starting])
        while True:  # a signal during a reload asks for another one after it
            await asked.wait()
            asked.clear()
            await app.reload()

    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError, AttributeError):
        loop.add_signal_handler(signal.SIGHUP, asked.set)  # not in a thread, not on Windows
    starting = asyncio.create_task(start())
    watching = asyncio.create_task(supervisor.watch())
    stopping = asyncio.create_task(_close_when(server, dispatcher))
    reloading = asyncio.create_task(reloads())
    try:
        await server.serve(sockets=[listening.socket])
        if starting.done():
            starting.result()  # raises what it raised
        else:
            starting.cancel()
            await asyncio.wait([starting])
        if watching.done():
            watching.result()
    finally:
        for task in (stopping, watching, reloading):
            task.cancel()
        await supervisor.close()


async def _close_when(server: uvicorn.Server, dispatcher: Dispatcher) -> None:
    """Says that nothing more is accepted once the server is to stop."""
    while not server.should_exit:
        await asyncio.sleep(0.05)
    dispatcher.closed = "the server is stopping"


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """A signal before or after uvicorn's own handling stops the server, and doesn't end the process.

    uvicorn raises a signal again once it has shut down, for whoever handled it before; by default that is death by
    SIGTERM, or a KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
