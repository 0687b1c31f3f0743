"""The HTTP face: requests to the model on a short path of their own, everything else through Starlette."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torchproof.errors import UsageError
from torchproof.serve import logs
from torchproof.serve.dispatch import Dispatcher, Ended, Entry
from torchproof.serve.keys import Keys, read_keys
from torchproof.serve.metrics import Metrics, Outcome
from torchproof.serve.problem import CLIENT_GONE, MEDIA_TYPE, problem
from torchproof.serve.supervisor import Supervisor
from torchproof.serve.tracing import Tracer
from torchproof.serve.wire import Answer, Format, Job
from torchproof.types.serving import Caps

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREDICT = "/predict"
INFER = "/v2/models/{name}/infer"  # as the metrics name it
REQUEST = "torchproof.request"  # where the scope has what was admitted before there was a task for it
# From here on a request is slow enough to be logged, as a share of its deadline.
SLOW_SHARE = 0.5

FORMATS: dict[bytes, Format] = {b"application/vnd.safetensors": "safetensors", b"application/x-npy": "npy"}


@dataclass
class Settings:
    """What the user set.

    Attributes:
        name: of the model, in the URLs of the Open Inference Protocol.
        key_file: of the API keys; None where everybody may ask.
    """

    name: str
    deadline_s: float
    key_file: Path | None = None


log = logging.getLogger("torchproof.serve")


class _RefusedError(Exception):
    """A request that the model doesn't see."""

    def __init__(self, outcome: Outcome, status: int, detail: str) -> None:
        super().__init__(detail)
        self.ended = Ended(outcome, status, detail)


@dataclass(slots=True)
class Request:
    """A request to the model, as its head says; ``refused`` tells why it gets no place in the queue.

    Attributes:
        arrived, deadline: of ``time.monotonic()``.
        held_bytes: reserved for the body, which is read where there is a place only.
    """

    route: str
    arrived: float
    headers: dict[bytes, bytes]
    id: str
    span: "Span | None"
    refused: Ended | None = None
    deadline: float = 0.0
    format: Format = "json"
    held_bytes: int = 0


class Response(NamedTuple):
    """What the client gets."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class App:
    """The ASGI app."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        supervisor: Supervisor,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        from torchproof.serve.pages import pages

        self.dispatcher, self.supervisor, self.metrics, self.settings = dispatcher, supervisor, metrics, settings
        self.keys: Keys | None = None
        self.read_keys()
        self._tracer: Tracer | None = None
        self._ids = itertools.count(1)
        model = f"/v2/models/{settings.name}"
        self._infer_paths = (f"{model}/infer", f"{model}/versions/1/infer")
        self._pages = pages(self)

    def read_keys(self) -> None:
        """Reads the file of keys again.

        Raises:
            UsageError: it can't be used; the keys before it stay.
        """
        if self.settings.key_file is not None:
            self.keys = read_keys(self.settings.key_file)

    def trace(self, tracer: Tracer | None) -> None:
        """Sends a span for each request from now on."""
        self._tracer = tracer

    async def reload(self) -> str:
        """Reads keys and model again; what went wrong, so that the old ones stay, or nothing."""
        try:
            self.read_keys()
        except UsageError as exc:
            log.error("reload failed, what was served before goes on: %s", exc)
            self.metrics.reloaded(False)
            return str(exc)
        return await self.supervisor.reload()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = scope.pop(REQUEST, None) or self.admit(scope)
        if request is not None:
            await self._infer(request, receive, send)
        else:
            await self._pages(scope, receive, send)

    def admit(self, scope: Scope) -> Request | None:
        """Takes a place in the queue for a request, or refuses it; None where it isn't one to the model."""
        path = scope["path"]
        if path == PREDICT:
            route = PREDICT
        elif path in self._infer_paths:
            route = INFER
        else:
            return None
        headers = dict(scope["headers"])
        id_sent = headers.get(b"x-request-id")
        request_id = logs.request_id(id_sent.decode("latin-1") if id_sent is not None else None)
        span = self._tracer.start(route, scope["headers"], path) if self._tracer else None
        request = Request(route, time.monotonic(), headers, request_id, span)
        try:
            request.refused = self._reserve(request, scope)
        except _RefusedError as exc:
            request.refused = exc.ended
        return request

    def refuse(self, request: Request, refused: Ended) -> Response:
        """The answer to a request that is refused, which ends here."""
        self._count(request, refused)
        return _response(request, refused)

    def _reserve(self, request: Request, scope: Scope) -> Ended | None:
        """Takes the place, and notes what was asked; what there is no room for has taken none.

        Raises:
            _RefusedError: it would be refused whatever room there is.
        """
        headers = request.headers
        if scope["method"] != "POST":
            raise _RefusedError("client_error", 405, f"{scope['path']} answers POST only")
        if self.keys is not None and not self.keys.allows(scope["headers"]):
            raise _RefusedError("client_error", 401, "send a key as Authorization: Bearer KEY or X-API-Key: KEY")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise _RefusedError("client_error", 415, "send the body without a content encoding")
        left_s = _deadline_s(headers.get(b"x-deadline"), self.settings.deadline_s)
        request.deadline = request.arrived + left_s
        caps = self.supervisor.facts.caps if self.supervisor.facts else None
        declared = headers.get(b"content-length", b"")
        num_bytes = int(declared) if declared.isdigit() else 0
        if caps is not None and num_bytes > caps.max_body_bytes:
            raise _too_large(num_bytes, caps)
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        request.format = "v2" if request.route is INFER else FORMATS.get(content_type, "json")
        if caps is not None and request.format in ("npy", "safetensors") and num_bytes > caps.max_item_bytes:
            raise _too_large(num_bytes, caps)
        # Of a chunked body it isn't known.
        request.held_bytes = num_bytes if declared or caps is None else caps.max_body_bytes
        return self.dispatcher.reserve(num_bytes, left_s, request.held_bytes)

    async def _infer(self, request: Request, receive: Receive, send: Send) -> None:
        result: Answer | Ended
        queued_s = 0.0
        try:
            if request.refused is not None:
                result = request.refused
            else:
                result, queued_s = await self._answer(request, receive)
        except _RefusedError as exc:
            result = exc.ended
        response = _response(request, result)
        try:
            if response.status != CLIENT_GONE:
                await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
                await send({"type": "http.response.body", "body": response.body})
        finally:  # the client has its answer by now
            seconds = self._count(request, result, queued_s)
            logs.current_request.set(request.id)
            slow_s = SLOW_SHARE * self.settings.deadline_s
            logs.log_access(request.route, _outcome(result), result.status, seconds, slow_s)

    def _count(self, request: Request, result: Answer | Ended, queued_s: float = 0.0) -> float:
        """Tells metrics and traces how it ended; the seconds that it took."""
        seconds = time.monotonic() - request.arrived
        outcome = _outcome(result)
        self.metrics.answered(request.route, outcome, seconds)
        answer = result if isinstance(result, Answer) else None
        if answer is not None:
            self.metrics.ran(answer, queued_s)
        if request.span is not None and self._tracer is not None:
            self._tracer.end(request.span, outcome, answer, result.status)
        return seconds

    async def _answer(self, request: Request, receive: Receive) -> tuple[Answer | Ended, float]:
        """What the replica says, or why it was not asked in the end; and the seconds before it was.

        Raises:
            _RefusedError: it is not asked at all.
        """
        assert self.supervisor.facts is not None  # nothing is accepted before there are any
        caps = self.supervisor.facts.caps
        reserved = True
        try:
            body = await _read(receive, caps, request.deadline)
            is_list = request.format == "json" and body[:64].lstrip().startswith(b"[")
            if len(body) > caps.max_item_bytes and not is_list and request.format != "v2":
                raise _too_large(len(body), caps)
            job = Job(
                id=next(self._ids),
                format=request.format,
                body=body,
                deadline=request.deadline,
                header_length=_header_length(request.headers) if request.format == "v2" else 0,
                request_id=request.id,
            )
            answered: asyncio.Future[tuple[Answer | Ended, float]] = asyncio.get_running_loop().create_future()

            def done(result: Answer | Ended, queued_s: float) -> None:
                if not answered.done():
                    answered.set_result((result, queued_s))

            connection = getattr(receive, "__self__", None)
            entry = Entry(
                job=job,
                cost_s=self.dispatcher.costs.of(len(body)),
                arrived=time.monotonic(),
                done=done,
                # uvicorn's; asking receive() would take a task for each request.
                gone=lambda: bool(getattr(connection, "disconnected", False)),
                num_bytes=request.held_bytes,
            )
            reserved = False
            self.dispatcher.submit(entry)
        finally:
            if reserved:
                self.dispatcher.release(request.held_bytes)
        return await answered


async def _read(receive: Receive, caps: Caps, deadline: float) -> bytes:
    """The body; never more than the cap of it is held.

    Raises:
        _RefusedError: 413 too large, 408 it doesn't come in time, 499 the client has gone.
    """
    chunks = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + deadline - time.monotonic()):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _RefusedError("disconnected", CLIENT_GONE, "the client has gone")
                body: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                if not chunks and not more and len(body) <= caps.max_body_bytes:
                    return body
                chunks += body
                if len(chunks) > caps.max_body_bytes:
                    raise _too_large(len(chunks), caps, more)
                if not more:
                    return bytes(chunks)
    except TimeoutError:
        raise _RefusedError("client_error", 408, "the body did not come before the deadline") from None


def _too_large(num_bytes: int, caps: Caps, more: bool = False) -> _RefusedError:
    if num_bytes > caps.max_body_bytes:
        seen = f"more than {caps.max_body_bytes}" if more else str(num_bytes)
        detail = f"the body has {seen} bytes; at most {caps.max_body_bytes} are taken"
    else:
        detail = f"the request has {num_bytes} bytes; at most {caps.max_item_bytes} are taken for one"
    return _RefusedError("too_large", 413, detail)


def _deadline_s(header: bytes | None, deadline_s: float) -> float:
    """The header can shorten the deadline only."""
    if header is None:
        return deadline_s
    try:
        asked = float(header)
    except ValueError:
        asked = -1.0
    if not asked > 0:
        raise _RefusedError("client_error", 400, "X-Deadline is a number of seconds above 0")
    return min(asked, deadline_s)


def _header_length(headers: dict[bytes, bytes]) -> int:
    value = headers.get(b"inference-header-content-length", b"0")
    if not value.isdigit() or len(value) > 18:  # what msgpack can't carry to the replica is no length either
        raise _RefusedError("client_error", 400, "Inference-Header-Content-Length is a number of bytes")
    return int(value)


def _outcome(result: Answer | Ended) -> Outcome:
    if isinstance(result, Ended):
        return result.outcome
    if result.status < 400:
        return "ok"
    if result.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "too_large"
    return "client_error" if result.status < 500 else "error"


def _response(request: Request, result: Answer | Ended) -> Response:
    status = result.status
    more: list[tuple[bytes, bytes]] = []
    if isinstance(result, Answer) and status < 400:
        body, content_type = result.body, result.content_type.encode()
        more = [(name.lower().encode(), value.encode()) for name, value in result.headers.items()]
    else:
        body, content_type = _error(request.route, result)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            more.append((b"allow", b"POST"))
        elif status == HTTPStatus.UNAUTHORIZED:
            more.append((b"www-authenticate", b"Bearer"))
        elif isinstance(result, Ended) and result.retry_after_s:
            more.append((b"retry-after", b"%d" % result.retry_after_s))
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request.id.encode()),
        *more,
    ]
    return Response(status, headers, body)


def _error(route: str, result: Answer | Ended) -> tuple[bytes, bytes]:
    detail = result.body.decode() if isinstance(result, Answer) else result.detail
    if route is INFER:
        return msgspec.json.encode({"error": detail}), b"application/json"
    return problem(result.status, detail), MEDIA_TYPE.encode()
