"""What goes to the client, in how many writes, and what a refusal costs."""

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import uvicorn
from tests.serve.conftest import Client
from torch import nn
from uvicorn.server import ServerState

import torchproof as tp
from torchproof.serve import protocol
from torchproof.serve.protocol import Protocol

ClientOf = Callable[..., Client]


class Wire(asyncio.Transport):
    """What was written, one entry a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(app: Any, wire: Wire, state: ServerState) -> Protocol:
    """A connection of a client's; needs a running loop."""
    config = uvicorn.Config(app, http=Protocol, log_config=None, lifespan="off", date_header=False)
    config.load()
    connection = Protocol(config=config, server_state=state, app_state={})
    connection.connection_made(wire)
    return connection


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
        connected(app, wire, state).data_received(request)
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


BODY = b'{"values": [1]}'
POST = b"POST /predict HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Plain(tp.Service):
    """The values themselves."""

    def load(self) -> nn.Module:
        return nn.Identity()

    def encode(self, request: Any) -> Any:
        return torch.tensor(request["values"], dtype=torch.float32)

    def decode(self, outputs: Any, request: Any) -> Any:
        return {"values": outputs}

    def samples(self) -> Iterable[Any]:
        return [{"values": [1.0]}]


def talked(client: Client, *requests: bytes, before: Callable[[], object] = lambda: None) -> tuple[Wire, int]:
    """What one connection gets for chunks of bytes, and how many tasks they took.

    Args:
        before: is called between the last chunk and the tasks' first steps.
    """
    wire, state = Wire(), ServerState()

    async def talk() -> int:
        connection = connected(client.app, wire, state)
        for request in requests:
            connection.data_received(request)
        num_tasks = len(state.tasks)
        before()
        while state.tasks:
            await asyncio.gather(*state.tasks)
        connection.connection_lost(None)
        return num_tasks

    return wire, client.run(talk())


def test_an_accepted_request_is_answered(client_of: ClientOf) -> None:
    client = client_of(Plain())
    wire, num_tasks = talked(client, POST)
    assert num_tasks == 1
    assert b"".join(wire.writes).endswith(b'\r\n\r\n{"values":[1.0]}')
    assert (client.count("ok"), client.dispatcher.depth) == (1, 0)


def test_a_refusal_takes_no_task_and_says_the_same(client_of: ClientOf) -> None:
    client = client_of(Plain())
    client.dispatcher.closed = "the server is stopping"
    wire, num_tasks = talked(client, POST)
    assert (num_tasks, wire.reading) == (0, False)
    (write,) = wire.writes
    answer = client.post("/predict", content=BODY, headers={"x-request-id": "mine"})  # through the app alone
    lines = [b"%b: %b\r\n" % header for header in answer.headers.raw]
    assert write == b"".join([b"HTTP/1.1 503 Service Unavailable\r\n", *lines, b"\r\n", answer.content])
    assert b"retry-after: 1\r\n" in write
    assert client.count("not_ready") == 2


def test_a_refusal_that_trying_again_would_not_help_does_not_stop_the_reading(client_of: ClientOf) -> None:
    client = client_of(Plain())
    wire, _ = talked(client, POST.replace(b"host", b"content-encoding: br\r\nhost"))
    assert b"".join(wire.writes).startswith(b"HTTP/1.1 415 ")
    assert wire.reading
    wire, _ = talked(client, b"HEAD /predict HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"".join(wire.writes).startswith(b"HTTP/1.1 405 ")
    assert b"".join(wire.writes).endswith(b"\r\n\r\n")
    assert client.count("client_error") == 2


def test_who_was_refused_is_read_again_after_the_pause(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next tick, together with others."""
    monkeypatch.setattr(protocol, "REFUSED_PAUSE_S", 0.02)
    client = client_of(Plain())
    client.dispatcher.closed = "the server is stopping"
    dues: list[float] = []

    async def talk() -> float:
        loop, wire = asyncio.get_running_loop(), Wire()
        call_at = loop.call_at

        def noted(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
            if callback.__name__ == "resume_reading":
                dues.append(when)
            return call_at(when, callback, *args, **options)

        connection = connected(client.app, wire, ServerState())
        start = loop.time()
        monkeypatch.setattr(loop, "call_at", noted)
        connection.data_received(POST)
        assert not wire.reading
        assert connection.timeout_keep_alive_task is not None  # one that never asks again is closed
        while not wire.reading:
            await asyncio.sleep(0.001)
        assert loop.time() - start >= 0.02
        return start

    start = client.run(asyncio.wait_for(talk(), 30))
    (due,) = dues
    assert due >= start + 0.02
    assert math.isclose(due, round(due / protocol.TICK_S) * protocol.TICK_S, rel_tol=1e-12)


@pytest.mark.parametrize("head", [b"POST /predict HTTP/1.1\r\nconnection: close", b"POST /predict HTTP/1.0"])
def test_a_refused_client_that_wants_no_more_is_left(head: bytes, client_of: ClientOf) -> None:
    client = client_of(Plain())
    client.dispatcher.closed = "the server is stopping"
    wire, _ = talked(client, POST.replace(b"POST /predict HTTP/1.1", head))
    assert wire.closed
    assert b"connection: close\r\n" in wire.writes[0]


def test_thousands_of_requests_at_once_are_all_refused(client_of: ClientOf) -> None:
    """Those behind an accepted one as well, when that is answered."""
    client = client_of(Plain(), max_queue=1)
    wire, num_tasks = talked(client, POST * 3000, before=lambda: setattr(client.dispatcher, "closed", "stopping"))
    answers = b"".join(wire.writes).split(b"HTTP/1.1 ")[1:]
    assert num_tasks == 1
    assert [answer[:3] for answer in answers] == [b"200", *[b"503"] * 2999]
    client.dispatcher.closed = "stopping"
    wire, num_tasks = talked(client, POST * 3000)
    assert (num_tasks, b"".join(wire.writes).count(b"HTTP/1.1 503 ")) == (0, 3000)


def test_a_full_queue_refuses_before_the_others_have_begun(client_of: ClientOf) -> None:
    """The place is taken when the head is there, so that all that come at once aren't let in."""
    client = client_of(Plain(), max_queue=2)

    async def talk() -> list[bytes]:
        wires, state = [Wire() for _ in range(4)], ServerState()
        for wire in wires:
            connected(client.app, wire, state).data_received(POST)
        assert len(state.tasks) == 2
        await asyncio.gather(*state.tasks)
        return [b"".join(wire.writes)[9:12] for wire in wires]

    assert client.run(talk()) == [b"200", b"200", b"429", b"429"]
    assert client.count("refused_queue_full") == 2


def test_the_place_of_a_client_that_leaves_within_its_body_is_free_again(client_of: ClientOf) -> None:
    client = client_of(Plain(), max_queue=1)

    async def talk() -> int:
        state = ServerState()
        connection = connected(client.app, Wire(), state)
        connection.data_received(POST[:-1])
        depth = client.dispatcher.depth
        connection.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return depth

    assert (client.run(talk()), client.dispatcher.depth) == (1, 0)
    assert client.count("disconnected") == 1
