"""Where traces are asked for, each request is one span below the client's; elsewhere nothing is even imported."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from torchproof.errors import UsageError
from torchproof.serve.tracing import Tracer, open_tracer
from torchproof.serve.wire import Answer

ANSWER = Answer(1, 200, b"{}", model_s=0.004, wait_s=0.02, batch_size=8)


class Global:
    """What ``opentelemetry.trace`` keeps for the whole process, where it can be set only once."""

    def __init__(self) -> None:
        self.provider: Any = trace.ProxyTracerProvider()  # none is set

    def get(self) -> Any:
        return self.provider

    def set(self, provider: Any) -> None:
        self.provider = provider


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Global]:
    """A process without a provider, and without a variable that asks for one."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    one = Global()
    monkeypatch.setattr(trace, "get_tracer_provider", one.get)
    monkeypatch.setattr(trace, "set_tracer_provider", one.set)
    yield one
    if isinstance(one.provider, TracerProvider):
        one.provider.shutdown()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Stands for both OTLP exporters; ``asked`` are the names under which they were looked for."""
    one = InMemorySpanExporter()
    one.asked = []  # type: ignore[attr-defined]

    def entry_points(*, group: str, name: str) -> list[Any]:
        assert group == "opentelemetry_traces_exporter"
        one.asked.append(name)  # type: ignore[attr-defined]
        return [SimpleNamespace(load=lambda: lambda: one)] if name.startswith("otlp_") else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    return one


def in_memory() -> tuple[Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider), exporter


def ended(outcome: str, answer: Answer | None = None, status: int = 0, **start: Any) -> ReadableSpan:
    tracer, exporter = in_memory()
    span = tracer.start(**({"route": "/predict", "headers": []} | start))
    assert not exporter.get_finished_spans()
    tracer.end(span, outcome, answer, status)
    (finished,) = exporter.get_finished_spans()
    return finished


def test_a_request_is_a_span() -> None:
    """Named and described as the semantic conventions have it, so that any backend shows it as an HTTP request."""
    span = ended("ok", ANSWER)
    assert span.name == "POST /predict"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "url.path": "/predict",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "torchproof.outcome": "ok",
        "torchproof.queue_s": 0.02,
        "torchproof.model_s": 0.004,
        "torchproof.batch_size": 8,
    }


def test_a_span_is_named_by_its_route() -> None:
    """Names are few whatever clients ask for; what was asked for is an attribute."""
    span = ended("ok", ANSWER, route="/v2/models/{name}/infer", path="/v2/models/minilm/infer")
    assert span.name == "POST /v2/models/{name}/infer"
    assert (span.attributes or {})["url.path"] == "/v2/models/minilm/infer"


def test_a_span_goes_on_the_clients_trace() -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = [(b"host", b"caf\xe9"), (b"traceparent", f"00-{trace_id}-{span_id}-01".encode())]
    span = ended("ok", ANSWER, headers=headers)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == span_id
    assert f"{span.context.trace_id:032x}" == trace_id


def test_a_client_that_samples_nothing_gets_no_span() -> None:
    """The near miss: the same header with the last flag at 0."""
    tracer, exporter = in_memory()
    headers = [(b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")]
    tracer.end(tracer.start("/predict", headers), "ok", ANSWER)
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("sent", [b"", b"nonsense", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff"])
def test_a_header_that_is_none_starts_a_trace(sent: bytes) -> None:
    assert ended("ok", ANSWER, headers=[(b"traceparent", sent)]).parent is None


@pytest.mark.parametrize(
    ("outcome", "answer", "status", "is_error"),
    [
        ("error", Answer(1, 500, b"it broke"), 500, True),
        ("deadline_exceeded", None, 504, True),
        ("client_error", Answer(1, 422, b"no text"), 422, False),
        ("too_large", None, 413, False),
    ],
)
def test_only_the_servers_errors_are_errors(outcome: str, answer: Answer | None, status: int, is_error: bool) -> None:
    """As the semantic conventions have it for a server's span: 4xx is the client's error."""
    span = ended(outcome, answer, 0 if answer else status)
    attributes = dict(span.attributes or {})
    assert attributes["http.response.status_code"] == status
    assert attributes["torchproof.outcome"] == outcome
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert attributes.get("error.type") == (str(status) if is_error else None)
    assert ("torchproof.model_s" in attributes) == (answer is not None)


def test_a_client_that_went_away_got_no_status() -> None:
    attributes = ended("disconnected").attributes or {}
    assert "http.response.status_code" not in attributes
    assert attributes["torchproof.outcome"] == "disconnected"


def test_without_being_asked_nothing_is_imported() -> None:
    """opentelemetry is installed here, and still costs a server without traces nothing."""
    code = (
        "import sys; from torchproof.serve.tracing import open_tracer; print(open_tracer(), "
        "[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "None []\n"


def test_a_provider_that_is_there_is_used(made: Global) -> None:
    """``opentelemetry-instrument`` has set one before torchproof starts; no second one is made."""
    exporter = InMemorySpanExporter()
    provider = made.provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = open_tracer()
    assert tracer is not None
    assert made.provider is provider
    tracer.end(tracer.start("/predict", []), "ok", ANSWER)
    assert [span.name for span in exporter.get_finished_spans()] == ["POST /predict"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost:4318"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"},
        {"OTEL_TRACES_EXPORTER": ""},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"},
    ],
    ids=str,
)
def test_who_asks_for_no_traces_gets_none(
    made: Global, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Other variables of OpenTelemetry's ask for other things, and one of them for none of this."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert open_tracer() is None
    assert isinstance(made.provider, trace.ProxyTracerProvider)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "otlp_proto_http",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp_proto_grpc"}, "otlp_proto_grpc"),
    ],
    ids=str,
)
def test_the_environment_asks_for_traces(
    made: Global, exporter: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    """The provider is made here, sends in batches, and is the process's, so that a service's own spans go there too."""
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    tracer = open_tracer()
    assert tracer is not None
    assert exporter.asked == [name]
    tracer.end(tracer.start("/predict", []), "ok", ANSWER)
    assert made.provider.force_flush()
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /predict"
    assert span.resource.attributes["service.name"] == "torchproof"


@pytest.mark.parametrize(
    "variables", [{"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}], ids=str
)
def test_the_user_names_the_service(
    made: Global, exporter: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    assert open_tracer() is not None
    assert made.provider.resource.attributes["service.name"] == "mine"


def test_no_request_waits_for_the_exporter(made: Global, exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent by a thread of their own: a collector that hangs would otherwise stop the server's event loop."""
    senders = []
    export = exporter.export

    def seen(spans: Any) -> Any:
        senders.append(threading.get_ident())
        return export(spans)

    monkeypatch.setattr(exporter, "export", seen)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    tracer = open_tracer()
    assert tracer is not None
    tracer.end(tracer.start("/predict", []), "ok", ANSWER)
    made.provider.shutdown()  # waits until all is sent
    assert senders
    assert threading.get_ident() not in senders


def test_two_exporters_get_the_same(made: Global, exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp, otlp_proto_grpc")
    tracer = open_tracer()
    assert tracer is not None
    tracer.end(tracer.start("/predict", []), "ok", ANSWER)
    assert made.provider.force_flush()
    assert exporter.asked == ["otlp_proto_http", "otlp_proto_grpc"]
    assert len(exporter.get_finished_spans()) == 2


@pytest.mark.parametrize(
    ("protocol", "package"),
    [("http/protobuf", "opentelemetry-exporter-otlp-proto-http"), ("grpc", "opentelemetry-exporter-otlp-proto-grpc")],
)
def test_a_missing_exporter_is_said_at_the_start(
    made: Global, monkeypatch: pytest.MonkeyPatch, protocol: str, package: str
) -> None:
    """With what to install; traces that are asked for are not dropped in silence."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(UsageError, match="its exporter is not installed") as caught:
        open_tracer()
    assert caught.value.help.startswith(f"pip install {package},")
    assert isinstance(made.provider, trace.ProxyTracerProvider)


def test_a_missing_sdk_is_said_at_the_start(made: Global, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with pytest.raises(UsageError, match="opentelemetry-sdk is not installed") as caught:
        open_tracer()
    assert caught.value.help == "pip install opentelemetry-sdk"


@pytest.mark.parametrize("is_asked", [True, False])
def test_without_opentelemetry_there_are_no_traces(
    made: Global, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_asked: bool
) -> None:
    """A cluster may set the variables for every pod, so that is no reason not to serve; it is said where it is so."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    if is_asked:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    with caplog.at_level(logging.WARNING, "torchproof"):
        assert open_tracer() is None
    assert ("none are sent" in caplog.text) == is_asked
