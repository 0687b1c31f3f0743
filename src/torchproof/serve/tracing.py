"""One OpenTelemetry span for each request, where the environment asks for traces; nothing is imported elsewhere."""

import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchproof import __version__
from torchproof.errors import UsageError
from torchproof.serve.wire import Answer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.trace import TracerProvider as AnyProvider

log = logging.getLogger("torchproof.serve")

# Each of these asks for traces; the endpoint of metrics or logs alone doesn't.
ASKED_BY = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracer:
    """Spans of the requests to the model, which are all POST."""

    def __init__(self, provider: "AnyProvider") -> None:
        from opentelemetry import propagate, trace

        self._tracer = provider.get_tracer("torchproof", __version__)
        self._extract = propagate.extract
        self._trace = trace

    def start(self, route: str, headers: Iterable[tuple[bytes, bytes]], path: str = "") -> "Span":
        """The span ``POST /predict``, below the client's own where ``traceparent`` names it.

        Args:
            route: as declared, such as ``/v2/models/{name}/infer``.
            headers: as ASGI has them, names in lower case.
            path: what the client asked for, where it differs from the route.
        """
        return self._tracer.start_span(
            f"POST {route}",
            self._extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers}),
            self._trace.SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": route, "url.path": path or route, "url.scheme": "http"},
        )

    def end(self, span: "Span", outcome: str, answer: Answer | None = None, status: int = 0) -> None:
        """Ends it.

        Args:
            outcome: as in ``torchproof_requests_total``.
            answer: the replica's; None where none was given.
            status: HTTP, of an answer that the server gave by itself; 0 for the replica's, or where none was sent.
        """
        span.set_attribute("torchproof.outcome", outcome)
        if answer is not None:
            status = status or answer.status
            span.set_attribute("torchproof.queue_s", answer.wait_s)
            span.set_attribute("torchproof.model_s", answer.model_s)
            span.set_attribute("torchproof.batch_size", answer.batch_size)
        if status:  # a client that went away got none
            span.set_attribute("http.response.status_code", status)
        if status >= 500:  # a server's span is no error where the client's request is
            span.set_attribute("error.type", str(status))
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def open_tracer() -> Tracer | None:
    """A tracer where this process has a provider, or the ``OTEL_`` variables ask for one; None elsewhere.

    A provider that is made here sends in batches from a thread of its own, the last one at the interpreter's exit.

    Raises:
        UsageError: traces are asked for, and opentelemetry's API is installed, but not what sends them.
    """
    exporters = _exporters()
    if not exporters and "opentelemetry.trace" not in sys.modules:  # nobody can have set a provider
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        log.warning("the environment asks for traces, and none are sent: pip install opentelemetry-sdk")
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # none is set
        if not exporters:
            return None
        provider = _make_provider(exporters)
        trace.set_tracer_provider(provider)
    return Tracer(provider)


def _exporters() -> list[str]:
    """Names of the exporters' entry points, as the variables have them; empty where no traces are asked for."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(os.environ.get, ASKED_BY)):
        return []
    names = [name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")]
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), "http/protobuf")  # the specification's default
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _make_provider(exporters: list[str]) -> "TracerProvider":
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message, help = "traces are asked for, and opentelemetry-sdk is not installed", "pip install opentelemetry-sdk"
        raise UsageError(message, help=help) from None
    resource = Resource.create()  # from the variables; it names the service in any case
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "torchproof"}))
    provider = TracerProvider(resource=resource)
    for exporter in exporters:
        found = importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=exporter)
        if not found:
            package = f"opentelemetry-exporter-{exporter.replace('_', '-')}"
            raise UsageError(
                f"traces are to go to {exporter}, and its exporter is not installed",
                help=f"pip install {package}, or OTEL_TRACES_EXPORTER=none",
            )
        provider.add_span_processor(BatchSpanProcessor(next(iter(found)).load()()))
    return provider
