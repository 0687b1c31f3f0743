"""uvicorn's HTTP protocol, with each answer in one write, and refusals that cost next to nothing."""

import asyncio
import math
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from torchproof.serve.app import REQUEST, App, Request, Response, Scope

# A client that was refused is read again after so long: one that asks at once again must not keep a core busy. Those
# whose time has come in the same tick are read together: a wake-up costs more than a refusal.
REFUSED_PAUSE_S = 0.1
TICK_S = 0.01


class Protocol(HttpToolsProtocol):
    """Sends the head of an answer together with its body, and refuses a request before there is a task for it.

    uvicorn writes head and body one after the other, and each write is a packet that wakes the client up, as
    ``TCP_NODELAY`` is set.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._joined = _Joined(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, self._joined))

    def on_response_complete(self) -> None:
        self._joined.flush()  # there is no body after HEAD, 204 and 304
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # One of several that came at once is left to its task: refused here, each would start the next one, in a
        # recursion that has no limit.
        own: Any = self.config.app if isinstance(self.config.app, App) and not self.pipeline else None
        scope = cast(Scope, cycle.scope)
        request: Request | None = own.admit(scope) if own is not None else None
        if request is None:
            super()._start_asgi_task(cycle, app)
        elif request.refused is None or not request.refused.retry_after_s:
            scope[REQUEST] = request
            super()._start_asgi_task(cycle, own)
        else:
            self._answer(cycle, own.refuse(request, request.refused))
            self.flow.pause_reading()
            due = self.loop.time() + REFUSED_PAUSE_S
            self.loop.call_at(math.ceil(due / TICK_S) * TICK_S, self.flow.resume_reading)

    def _answer(self, cycle: RequestResponseCycle, response: Response) -> None:
        status, headers, body = response
        head = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        self.transport.writelines([STATUS_LINE[status], *head, b"\r\n", body])
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


class _Joined:
    """A transport that holds the head of an answer back until what comes next."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines([head, data])  # one write, without a copy of the body
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()
