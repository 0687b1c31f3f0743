"""Listens, loads, answers and stops: uvicorn around the app, with the model on its own thread."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from torchproof.errors import UsageError
from torchproof.serve.app import create_app
from torchproof.serve.model import Model

if TYPE_CHECKING:
    from torchproof.serve.answer import Answerer

# Seconds that requests in flight get after a signal: below the 30 s after which Kubernetes sends SIGKILL.
GRACE_S = 25
BACKLOG = 2048  # uvicorn's own default


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


def url_of(listener: socket.socket) -> str:
    """``http://127.0.0.1:8000``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    listener: socket.socket, open_model: "Callable[[], Answerer]", on_ready: "Callable[[Answerer], None]"
) -> bool:
    """Answers until SIGINT or SIGTERM, then finishes the requests in flight.

    Args:
        open_model: called on the model's thread, while health is answered already. What it raises stops the server and
            is raised here.
        on_ready: called once the model answers.

    Returns:
        False where the model's thread is still at work, which would hold up the end of the process.
    """
    model = Model()
    config = uvicorn.Config(
        create_app(model),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    with _stopped_by_signals(server):
        try:
            asyncio.run(_run(server, listener, model, open_model, on_ready))
        finally:
            ended = model.close()
    return ended


async def _run(
    server: uvicorn.Server,
    listener: socket.socket,
    model: Model,
    open_model: "Callable[[], Answerer]",
    on_ready: "Callable[[Answerer], None]",
) -> None:
    async def load() -> None:
        try:
            on_ready(await model.load(open_model))
        except BaseException:
            server.should_exit = True
            raise

    loading = asyncio.create_task(load())
    await server.serve(sockets=[listener])
    if loading.done():
        loading.result()  # raises what it raised
    else:
        loading.cancel()


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
