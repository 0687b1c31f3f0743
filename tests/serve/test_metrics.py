"""What is counted is what happened, a scrape sees the present, and both of Prometheus' formats can be read."""

from collections import Counter
from collections.abc import Callable, Mapping

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torchproof import __version__
from torchproof.serve.metrics import MEMORY, OUTCOMES, Metrics, Outcome
from torchproof.serve.wire import Answer
from torchproof.types.serving import MemorySample

OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.3"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make(
    routes: tuple[str, ...] = ("/predict",),
    queue_depth: Callable[[], int] = lambda: 0,
    replicas: Callable[[], Mapping[str, int]] = dict,
    memory: Callable[[], Mapping[int, MemorySample]] = dict,
) -> Metrics:
    return Metrics(routes, queue_depth, replicas, memory)


def read(metrics: Metrics, accept: str = "") -> Series:
    body, _ = metrics.expose(accept)
    parse = parse_openmetrics if "openmetrics" in accept else parse_text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return read(metrics).get((f"torchproof_{name}", frozenset(labels.items())))


def answer(**more: object) -> Answer:
    known = {"model_s": 0.004, "wait_s": 0.02, "batch_size": 8, "padding": 0.25}
    return Answer(1, 200, b"{}", **(known | more))  # type: ignore[arg-type]


def test_every_outcome_is_there_from_the_start() -> None:
    """A rate over a series that appears with its first error misses that error."""
    metrics = make(("/predict", "/v2/models/{name}/infer"))
    for route in ("/predict", "/v2/models/{name}/infer"):
        for outcome in OUTCOMES:
            assert value(metrics, "requests_total", route=route, outcome=outcome) == 0


@given(st.lists(st.tuples(st.sampled_from(["/a", "/b"]), st.sampled_from(OUTCOMES), st.floats(0, 100))))
def test_counts_are_what_happened(requests: list[tuple[str, Outcome, float]]) -> None:
    """Each request is in one counter, and in its route's histogram once, with its seconds."""
    metrics = make(("/a", "/b"))
    for route, outcome, seconds in requests:
        metrics.answered(route, outcome, seconds)
    series = read(metrics)

    expected = Counter((route, outcome) for route, outcome, _ in requests)
    for route in ("/a", "/b"):
        for outcome in OUTCOMES:
            key = ("torchproof_requests_total", frozenset({"route": route, "outcome": outcome}.items()))
            assert series[key] == expected[route, outcome]
        times = [seconds for other, _, seconds in requests if other == route]
        labels = frozenset({"route": route}.items())
        assert series["torchproof_request_seconds_count", labels] == len(times)
        assert series["torchproof_request_seconds_sum", labels] == pytest.approx(sum(times))


def test_an_unknown_route_is_no_new_series() -> None:
    """What a client asks for never becomes a label: a scan of URLs would fill the memory."""
    metrics = make()
    before = set(read(metrics))
    with pytest.raises(KeyError):
        metrics.answered("/etc/passwd", "ok", 0.1)
    assert set(read(metrics)) == before


@pytest.mark.parametrize(
    ("seconds", "upper", "below"), [(0.0005, "0.0005", None), (0.0006, "0.001", "0.0005"), (59.0, "60.0", "30.0")]
)
def test_half_a_millisecond_and_a_minute_are_told_apart(seconds: float, upper: str, below: str | None) -> None:
    metrics = make()
    metrics.answered("/predict", "ok", seconds)
    assert value(metrics, "request_seconds_bucket", route="/predict", le=upper) == 1
    if below:
        assert value(metrics, "request_seconds_bucket", route="/predict", le=below) == 0


def test_what_a_replica_reports_is_kept() -> None:
    """Seconds in the server's queue and in the replica's are one wait for the client."""
    metrics = make()
    metrics.ran(answer(), queued_s=0.5)
    assert value(metrics, "queue_seconds_sum") == pytest.approx(0.52)
    assert value(metrics, "model_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "batch_size_sum") == 8
    assert value(metrics, "batch_size_bucket", le="8.0") == 1
    assert value(metrics, "batch_size_bucket", le="4.0") == 0
    assert value(metrics, "padding_ratio_sum") == 0.25


def test_an_answer_without_a_forward_is_no_forward_of_no_seconds() -> None:
    """A body that doesn't fit the model would pull every quantile down; one row without padding counts."""
    metrics = make()
    metrics.ran(answer(batch_size=0, model_s=0.0, padding=0.0))
    for name in ("queue_seconds", "model_seconds", "batch_size", "padding_ratio"):
        assert value(metrics, f"{name}_count") == 0
    metrics.ran(answer(batch_size=1, padding=0.0))
    for name in ("queue_seconds", "model_seconds", "batch_size", "padding_ratio"):
        assert value(metrics, f"{name}_count") == 1


def test_the_hot_path_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """``labels`` takes longer than the counting: it is done once, at the start."""
    metrics = make()

    def labels(*_: object, **__: object) -> None:
        raise AssertionError("looked up for a request")

    monkeypatch.setattr(MetricWrapperBase, "labels", labels)
    metrics.answered("/predict", "ok", 0.1)
    metrics.ran(answer())
    metrics.retried(1)
    with pytest.raises(AssertionError):
        metrics.found("TP701")  # seldom: this one may


def test_gauges_are_looked_up_when_they_are_asked_for() -> None:
    """Nobody has to keep them right, and a replica that is gone leaves no series behind."""
    depth = 3
    states = {"ready": 2, "starting": 0}
    samples = {0: MemorySample(at_s=0.0, num_requests=0, rss_bytes=100, private_bytes=40, in_use_bytes=7)}
    metrics = make(queue_depth=lambda: depth, replicas=lambda: states, memory=lambda: samples)
    assert value(metrics, "queue_depth") == 3
    assert value(metrics, "replicas", state="ready") == 2
    assert value(metrics, "replicas", state="starting") == 0
    assert value(metrics, "replica_memory_bytes", replica="0", kind="private") == 40

    depth = 0
    states["ready"] = 1
    samples[1] = samples.pop(0)
    assert value(metrics, "queue_depth") == 0
    assert value(metrics, "replicas", state="ready") == 1
    assert value(metrics, "replica_memory_bytes", replica="0", kind="private") is None
    assert value(metrics, "replica_memory_bytes", replica="1", kind="private") == 40


def test_memory_that_is_not_known_is_not_zero() -> None:
    sample = MemorySample(at_s=0.0, num_requests=0, rss_bytes=100, private_bytes=40, free_bytes=0)
    metrics = make(memory=lambda: {0: sample})
    kinds = {dict(labels)["kind"] for name, labels in read(metrics) if name == "torchproof_replica_memory_bytes"}
    assert kinds == {"rss", "private", "free"}
    assert set(MEMORY.values()) == {name for name in MemorySample.__struct_fields__ if name.endswith("_bytes")}


def test_what_happens_to_replicas_is_counted() -> None:
    metrics = make()
    assert value(metrics, "golden_checks_total", result="failed") == 0
    metrics.restarted("hung")
    metrics.restarted("hung")
    metrics.restarted("memory")
    metrics.retried(5)
    metrics.fell_back(2)
    metrics.checked(True)
    metrics.checked(False)
    metrics.reloaded(False)
    metrics.found("TP203")
    assert value(metrics, "replica_restarts_total", reason="hung") == 2
    assert value(metrics, "replica_restarts_total", reason="memory") == 1
    assert value(metrics, "retries_total") == 5
    assert value(metrics, "recompile_fallbacks_total") == 2
    assert value(metrics, "golden_checks_total", result="passed") == 1
    assert value(metrics, "golden_checks_total", result="failed") == 1
    assert value(metrics, "reloads_total", result="passed") == 0
    assert value(metrics, "reloads_total", result="failed") == 1
    assert value(metrics, "findings_total", code="TP203") == 1


def test_one_thing_is_served_at_a_time() -> None:
    """A reload replaces what is served: two series of 1 would say that both are."""
    metrics = make()
    metrics.loaded("app:Net", "eager float32")
    metrics.loaded("app:Net", "inductor bfloat16")
    infos = [dict(labels) for name, labels in read(metrics) if name == "torchproof_info"]
    assert infos == [{"version": __version__, "target": "app:Net", "candidate": "inductor bfloat16"}]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_both_formats_say_the_same(accept: str, content_type: str) -> None:
    """The strict parsers of the client library read them, names that need quotes included."""
    metrics = make(('/v2/models/{a"b}\\c/infer',), replicas=lambda: {"ready": 1})
    metrics.answered('/v2/models/{a"b}\\c/infer', "ok", 0.1)
    metrics.ran(answer())
    metrics.loaded('a\n"b"', "x")
    assert metrics.expose(accept)[1].startswith(content_type)
    plain, asked = (
        {key: value for key, value in read(metrics, one).items() if "_created" not in key[0]} for one in ("", accept)
    )
    assert plain == asked


def test_every_name_has_the_prefix_and_a_base_unit() -> None:
    """And none has gone: dashboards and alerts go by them."""
    body, _ = make().expose(OPENMETRICS)
    assert {family.name for family in parse_openmetrics(body.decode())} == {
        "torchproof",  # its series is torchproof_info
        "torchproof_requests",
        "torchproof_request_seconds",
        "torchproof_queue_depth",
        "torchproof_queue_seconds",
        "torchproof_model_seconds",
        "torchproof_batch_size",
        "torchproof_padding_ratio",
        "torchproof_replicas",
        "torchproof_replica_memory_bytes",
        "torchproof_replica_restarts",
        "torchproof_retries",
        "torchproof_recompile_fallbacks",
        "torchproof_golden_checks",
        "torchproof_reloads",
        "torchproof_findings",
    }


def test_servers_of_one_process_share_nothing() -> None:
    """And nothing is left in the library's global registry, which a service may use for its own."""
    first, second = make(), make()
    first.answered("/predict", "ok", 0.1)
    assert value(second, "requests_total", route="/predict", outcome="ok") == 0
    ours = [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("torchproof")]
    assert ours == []
