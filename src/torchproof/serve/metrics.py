"""What ``/metrics`` says: counted while requests are answered, looked up when it is scraped."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from torchproof import __version__
from torchproof.serve.wire import Answer
from torchproof.types.serving import MemorySample

Outcome = Literal[
    "ok",
    "client_error",
    "too_large",
    "refused_queue_full",
    "refused_deadline",
    "not_ready",
    "deadline_exceeded",
    "error",
    "disconnected",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# 0.5 ms: a tiny model's whole answer; 60 s: longer than any deadline that is likely. 2 to 3 times from one to the next.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)

# The kinds of ``torchproof_replica_memory_bytes``, and the field of a ``MemorySample`` that each is.
MEMORY = {
    "rss": "rss_bytes",
    "private": "private_bytes",
    "in_use": "in_use_bytes",
    "free": "free_bytes",
    "device_allocated": "device_allocated_bytes",
    "device_reserved": "device_reserved_bytes",
}


class Metrics:
    """Counters and histograms of one server, in a registry of their own.

    Every series of requests is there from the start, at 0: a rate over a series that appears with its first error
    misses that error.

    Args:
        routes: as declared, never a client's path: each one is a set of series for good.
        queue_depth: requests accepted and not yet answered.
        replicas: how many are in each state.
        memory: the last sample of each replica, by its number.
    """

    def __init__(
        self,
        routes: Iterable[str],
        queue_depth: Callable[[], int],
        replicas: Callable[[], Mapping[str, int]],
        memory: Callable[[], Mapping[int, MemorySample]],
    ) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"torchproof_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"torchproof_{name}", help, labels, buckets=buckets, registry=registry)

        requests = counter("requests_total", "HTTP requests by how they ended.", "route", "outcome")
        seconds = histogram("request_seconds", "From a request's arrival to its answer.", SECONDS, "route")
        self._requests = {
            (route, outcome): (requests.labels(route, outcome), seconds.labels(route))
            for route in routes
            for outcome in OUTCOMES
        }
        self._queue_seconds = histogram("queue_seconds", "From a request's arrival to its first forward.", SECONDS)
        self._model_seconds = histogram("model_seconds", "Of a request in forwards; shared ones are divided.", SECONDS)
        self._batch_size = histogram("batch_size", "Rows of the largest forward that a request was in.", ROWS)
        self._padding = histogram("padding_ratio", "Share of that forward's elements that were padding.", SHARES)
        self._restarts = counter("replica_restarts_total", "Replicas replaced by a new one.", "reason")
        self._retries = counter("retries_total", "Requests sent again, after their replica ended.")
        self._fallbacks = counter("recompile_fallbacks_total", "Inputs that a compiled model ran eagerly.")
        self._checks = counter("golden_checks_total", "Replays of golden rows while serving.", "result")
        self._reloads = counter("reloads_total", "Reloads of the model or the keys.", "result")
        for result in ("passed", "failed"):
            self._checks.labels(result)
            self._reloads.labels(result)
        self._findings = counter("findings_total", "Findings reported since the start.", "code")
        self._info = Info("torchproof", "What is served.", registry=registry)
        self._info.info({"version": __version__, "target": "", "candidate": ""})
        registry.register(_Now(queue_depth, replicas, memory))

    def answered(self, route: str, outcome: Outcome, seconds: float) -> None:
        """One request has ended.

        Raises:
            KeyError: the route is none of those given at the start, or there is no such outcome.
        """
        requests, request_seconds = self._requests[route, outcome]
        requests.inc()
        request_seconds.observe(seconds)

    def ran(self, answer: Answer, queued_s: float = 0.0) -> None:
        """A replica has answered; counts nothing for an answer that no forward went into.

        Args:
            queued_s: in the server's own queue, before the replica got it.
        """
        if not answer.batch_size:
            return
        self._queue_seconds.observe(queued_s + answer.wait_s)
        self._model_seconds.observe(answer.model_s)
        self._batch_size.observe(answer.batch_size)
        self._padding.observe(answer.padding)

    def restarted(self, reason: str) -> None:
        """A replica was replaced. ``reason`` is one of a few words, never a message: each is a series for good."""
        self._restarts.labels(reason).inc()

    def retried(self, num_requests: int) -> None:
        """Requests were sent to another replica."""
        self._retries.inc(num_requests)

    def fell_back(self, num_inputs: int) -> None:
        """So many more inputs ran eagerly: what a replica's ``Health.num_fallbacks`` has grown by."""
        self._fallbacks.inc(num_inputs)

    def checked(self, passed: bool) -> None:
        """A replica replayed a few golden rows."""
        self._checks.labels("passed" if passed else "failed").inc()

    def reloaded(self, passed: bool) -> None:
        """A reload has ended; where it failed, what was served before goes on."""
        self._reloads.labels("passed" if passed else "failed").inc()

    def found(self, code: str) -> None:
        """A finding was reported."""
        self._findings.labels(code).inc()

    def loaded(self, target: str, candidate: str) -> None:
        """What is served from now on, for ``torchproof_info``."""
        self._info.info({"version": __version__, "target": target, "candidate": candidate})

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics where ``accept`` asks for it, else Prometheus' text format."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Now(Collector):
    """Gauges that are looked up when they are asked for, so that nobody has to keep them right."""

    def __init__(
        self,
        queue_depth: Callable[[], int],
        replicas: Callable[[], Mapping[str, int]],
        memory: Callable[[], Mapping[int, MemorySample]],
    ) -> None:
        self._queue_depth = queue_depth
        self._replicas = replicas
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("torchproof_queue_depth", "Requests accepted, not yet answered.", self._queue_depth())
        states = GaugeMetricFamily("torchproof_replicas", "Replicas by their state.", labels=("state",))
        for state, num_replicas in self._replicas().items():
            states.add_metric((state,), num_replicas)
        yield states
        sizes = GaugeMetricFamily("torchproof_replica_memory_bytes", "Of each replica.", labels=("replica", "kind"))
        for replica, sample in self._memory().items():
            for kind, field in MEMORY.items():
                if (size := getattr(sample, field)) is not None:
                    sizes.add_metric((str(replica), kind), size)
        yield sizes
