"""A replica: a process that holds the model, takes jobs from its socket and answers them."""

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Callable

from torchproof.errors import describe
from torchproof.runtimes.fallbacks import num_fallbacks
from torchproof.serve.engine import Engine
from torchproof.serve.facts import find_facts, schema_of, touch
from torchproof.serve.load import Prepared, load
from torchproof.serve.lone import Threads
from torchproof.serve.memory import sample
from torchproof.serve.wire import Begin, Cancel, Check, Failed, Health, Job, Message, Reader, Ready, Request, pack
from torchproof.types.serving import Facts

log = logging.getLogger("torchproof.serve")


class Link:
    """The replica's end of its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader: Reader[Request] = Reader(Request)

    def receive(self, *, block: bool) -> list[Request] | None:
        """What has come; with ``block`` at least one. None once the other end is closed."""
        requests: list[Request] = []
        while not requests:
            try:
                data = self._socket.recv(1 << 18, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionError:
                return None
            if not data:
                return None
            requests += self._reader.feed(data)
        return requests

    def send(self, replies: list[Message]) -> None:
        """All of them, in order."""
        self._socket.sendall(b"".join(map(pack, replies)))


def open_engine(prepared: Prepared, begin: Begin, send: Callable[[list[Message]], None]) -> tuple[Engine, Facts | None]:
    """The engine, warmed up and proven; the facts where this is the first one.

    Raises:
        UsageError, RefusedError, UserCodeError: see ``load`` and ``find_facts``.
    """
    known = begin.facts
    loaded = load(prepared, begin.num_threads, known.choice if known else None)
    found = None
    if known is None:
        known = found = find_facts(loaded, begin.asked, begin.name)[0]
    else:
        touch(loaded, known.costs)
    engine = Engine(
        loaded=loaded,
        schema=schema_of(loaded, known.caps, begin.name),
        caps=known.caps,
        costs=known.costs,
        canary=lambda: loaded.canary.look(1),
        send=send,
        threads=Threads(loaded.choice.candidate.num_threads, begin.lone_cores) if begin.lone_cores else None,
    )
    return engine, found


def run(link: Link, prepare: Callable[[], Prepared]) -> None:
    """Answers until the socket is closed. What goes wrong before the first answer is said and ends it."""
    requests = link.receive(block=True)
    if not requests:
        return
    begin, *rest = requests
    assert isinstance(begin, Begin)
    try:
        prepared = prepare()
        if begin.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, begin.cores)
        engine, facts = open_engine(prepared, begin, link.send)
        _give_back_memory()
    except (Exception, SystemExit) as exc:  # noqa: BLE001  the user's code may raise anything; the server says it
        link.send([Failed(error=describe(exc))])
        return
    link.send([Ready(facts=facts, memory=sample(0))])
    handle(engine, rest)
    while (received := link.receive(block=not engine.busy)) is not None:
        handle(engine, received)
        if engine.busy:
            engine.step()


def handle(engine: Engine, requests: list[Request]) -> None:
    """Takes what has come; answers of requests that can't be read are sent at once."""
    for request in requests:
        if isinstance(request, Job):
            engine.take(request)
        elif isinstance(request, Cancel):
            engine.cancel(request)
        elif isinstance(request, Check):
            engine.flush()
            wrong = engine.loaded.canary.look()
            engine.send([Health(wrong=wrong, memory=sample(engine.num_requests), num_fallbacks=num_fallbacks())])
    engine.flush()


def _give_back_memory() -> None:
    """What loading and the proof have freed goes back to the system, where malloc is glibc's."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
