"""The HTTP face: requests to the model on a short path of their own, everything else through Starlette."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

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

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREDICT = "/predict"
INFER = "/v2/models/{name}/infer"  # as the metrics name it
# A client that was refused is read again after so long: one that asks at once again must not keep a core busy.
REFUSED_PAUSE_S = 0.1
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

    def __init__(self, outcome: Outcome, status: int, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.outcome, self.status, self.detail, self.retry_after_s = outcome, status, detail, retry_after_s


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
        path = scope["path"]
        if path == PREDICT:
            await self._infer(scope, receive, send, PREDICT)
        elif path in self._infer_paths:
            await self._infer(scope, receive, send, INFER)
        else:
            await self._pages(scope, receive, send)

    async def _infer(self, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        start = time.monotonic()
        headers = dict(scope["headers"])
        id_sent = headers.get(b"x-request-id")
        request_id = logs.request_id(id_sent.decode("latin-1") if id_sent is not None else None)
        span = self._tracer.start(route, scope["headers"], scope["path"]) if self._tracer else None
        answer: Answer | None = None
        outcome: Outcome
        retry_after_s = 0
        queued_s = 0.0
        more: list[tuple[bytes, bytes]] = []
        try:
            result, queued_s = await self._answer(scope, receive, headers, route, start, request_id)
            if isinstance(result, Answer):
                answer = result
                outcome, status = _outcome(answer.status), answer.status
            else:
                outcome, status, retry_after_s = result.outcome, result.status, result.retry_after_s
        except _RefusedError as exc:
            result = Ended(exc.outcome, exc.status, exc.detail, exc.retry_after_s)
            outcome, status, retry_after_s = exc.outcome, exc.status, exc.retry_after_s
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                more.append((b"allow", b"POST"))
            if status == HTTPStatus.UNAUTHORIZED:
                more.append((b"www-authenticate", b"Bearer"))
        if answer is not None and status < 400:
            body, content_type = answer.body, answer.content_type.encode()
            more += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        else:
            detail = answer.body.decode() if answer is not None else getattr(result, "detail", "")
            body, content_type = _error(route, status, detail)
        if retry_after_s:
            more.append((b"retry-after", b"%d" % retry_after_s))
        seconds = time.monotonic() - start
        try:
            if status != CLIENT_GONE:
                headers_sent = [
                    (b"content-type", content_type),
                    (b"content-length", b"%d" % len(body)),
                    (b"x-request-id", request_id.encode()),
                    *more,
                ]
                await send({"type": "http.response.start", "status": status, "headers": headers_sent})
                await send({"type": "http.response.body", "body": body})
        finally:  # the client has its answer by now
            self.metrics.answered(route, outcome, seconds)
            if answer is not None:
                self.metrics.ran(answer, queued_s)
            if span is not None and self._tracer is not None:
                self._tracer.end(span, outcome, answer, status)
            logs.current_request.set(request_id)
            logs.log_access(route, outcome, status, seconds, SLOW_SHARE * self.settings.deadline_s)
        if retry_after_s:
            _pause(receive)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        headers: dict[bytes, bytes],
        route: str,
        start: float,
        request_id: str,
    ) -> tuple[Answer | Ended, float]:
        """What the replica says, or why it was not asked in the end; and the seconds before it was.

        Raises:
            _RefusedError: it is not asked at all.
        """
        if scope["method"] != "POST":
            raise _RefusedError("client_error", 405, f"{scope['path']} answers POST only")
        if self.keys is not None and not self.keys.allows(scope["headers"]):
            raise _RefusedError("client_error", 401, "send a key as Authorization: Bearer KEY or X-API-Key: KEY")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise _RefusedError("client_error", 415, "send the body without a content encoding")
        deadline = start + _deadline_s(headers.get(b"x-deadline"), self.settings.deadline_s)
        caps = self.supervisor.facts.caps if self.supervisor.facts else None
        declared = headers.get(b"content-length", b"")
        num_bytes = int(declared) if declared.isdigit() else 0
        if caps is not None and num_bytes > caps.max_body_bytes:
            raise _too_large(num_bytes, caps)
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        format: Format = "v2" if route is INFER else FORMATS.get(content_type, "json")
        if caps is not None and format in ("npy", "safetensors") and num_bytes > caps.max_item_bytes:
            raise _too_large(num_bytes, caps)
        held_bytes = num_bytes if declared or caps is None else caps.max_body_bytes  # of a chunked body it isn't known
        refusal = self.dispatcher.reserve(num_bytes, deadline - start, held_bytes)
        if refusal is not None:
            return refusal, 0.0
        assert caps is not None  # nothing is accepted before there are any
        reserved = True
        try:
            body = await _read(receive, caps, deadline)
            is_list = format == "json" and body[:64].lstrip().startswith(b"[")
            if len(body) > caps.max_item_bytes and not is_list and format != "v2":
                raise _too_large(len(body), caps)
            job = Job(
                id=next(self._ids),
                format=format,
                body=body,
                deadline=deadline,
                header_length=_header_length(headers) if format == "v2" else 0,
                request_id=request_id,
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
                num_bytes=held_bytes,
            )
            reserved = False
            self.dispatcher.submit(entry)
        finally:
            if reserved:
                self.dispatcher.release(held_bytes)
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


def _outcome(status: int) -> Outcome:
    if status < 400:
        return "ok"
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "too_large"
    return "client_error" if status < 500 else "error"


def _error(route: str, status: int, detail: str) -> tuple[bytes, bytes]:
    if route is INFER:
        return msgspec.json.encode({"error": detail}), b"application/json"
    return problem(status, detail), MEDIA_TYPE.encode()


def _pause(receive: Receive) -> None:
    """Stops reading from the connection for a while, where it is uvicorn's."""
    flow = getattr(getattr(receive, "__self__", None), "flow", None)
    if flow is not None:
        flow.pause_reading()
        asyncio.get_running_loop().call_later(REFUSED_PAUSE_S, flow.resume_reading)
