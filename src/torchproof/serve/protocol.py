"""uvicorn's HTTP protocol, with each answer in one write."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    """Sends the head of an answer together with its body.

    uvicorn writes them one after the other, and each write is a packet that wakes the client up, as ``TCP_NODELAY`` is
    set.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._joined = _Joined(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, self._joined))

    def on_response_complete(self) -> None:
        self._joined.flush()  # there is no body after HEAD, 204 and 304
        super().on_response_complete()


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
