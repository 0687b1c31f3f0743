"""What goes to the client, and in how many writes."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from torchproof.serve.protocol import Protocol


class Wire(asyncio.Transport):
    """What was written, one entry a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def asked(request: bytes, status: int, parts: list[bytes], *, fail: bool = False) -> Wire:
    """What an app that answers with these parts of a body sends."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if fail:
            raise ValueError
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": part is not parts[-1]})

    async def talk() -> Wire:
        state, wire = ServerState(), Wire()
        config = uvicorn.Config(app, http=Protocol, log_config=None, lifespan="off")
        config.load()
        protocol = Protocol(config=config, server_state=state, app_state={})
        protocol.connection_made(wire)
        protocol.data_received(request)
        await asyncio.gather(*state.tasks)
        return wire

    return asyncio.run(talk())


GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("body", [b"an answer", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_is_one_write(body: bytes) -> None:
    (write,) = asked(GET, 200, [body]).writes
    assert write.startswith(b"HTTP/1.1 200 OK\r\n")
    assert write.endswith(b"\r\n\r\n" + body)


def test_the_parts_of_a_body_follow_as_they_come() -> None:
    part = b"HTTP/1.1 200 OK\r\n\r\n"
    writes = asked(GET, 200, [b"one", part, b"three"]).writes
    assert writes[0].endswith(b"\r\n\r\none")
    assert b"".join(writes).endswith(b"\r\n\r\none" + part + b"three")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204)])
def test_an_answer_without_a_body_is_sent(method: bytes, status: int) -> None:
    wire = asked(GET.replace(b"GET", method), status, [b""])
    assert b"".join(wire.writes).startswith(b"HTTP/1.1 %d " % status)
    assert b"".join(wire.writes).endswith(b"\r\n\r\n")


def test_100_continue_is_sent_before_the_body_is_there() -> None:
    request = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n1"
    first, second = asked(request, 200, [b"answer"]).writes
    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert second.endswith(b"\r\n\r\nanswer")


def test_the_head_of_an_answer_that_fails_is_sent_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    wire = asked(GET, 200, [b"answer"], fail=True)
    assert wire.closed
    assert len(wire.writes) == 1
    assert wire.writes[0].endswith(b"content-length: 6\r\n\r\n")
    assert "Exception in ASGI application" in caplog.text


def test_the_last_answer_of_a_connection_is_whole() -> None:
    wire = asked(GET.replace(b"host", b"connection: close\r\nhost"), 200, [b"answer"])
    assert wire.closed
    assert b"".join(wire.writes).endswith(b"\r\n\r\nanswer")
