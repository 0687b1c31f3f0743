"""From rows to a plan, on rows made by hand: the near misses decide."""

from collections.abc import Callable

import msgspec
import pytest

from torchproof.machine.environment import read_environment
from torchproof.tune.candidates import thread_counts, usable_threads
from torchproof.tune.choose import (
    best_batch_size,
    broken_limits,
    choose,
    eligible,
    exclusions,
    failed_tolerance,
    runners_up,
    runtime_decision,
    unproven_p99,
    why_not,
)
from torchproof.types import (
    Candidate,
    Comparison,
    GoldenError,
    Limits,
    Measurement,
    Outcome,
    Precision,
    Throughput,
    Tolerance,
    Trial,
)

RANKS = {"eager": 0, "torchscript": 2, "onnxruntime": 3, "inductor": 4, "aotinductor": 5}
EXACT = GoldenError(output="y", cos=1.0, max_abs=0.0, max_rel=0.0)
MIB = 1 << 20


def trial(
    runtime: str,
    ratio: tuple[float, float, float] | None = None,
    *,
    precision: Precision = "float32",
    threads: int = 1,
    outcome: Outcome = "measured",
    reason: str = "",
    golden: GoldenError | None = EXACT,
    p99_s: float = 0.01,
    cold_start_s: float | None = 2.0,
    peak_mib: int = 300,
    rates: tuple[float, ...] = (),
) -> Trial:
    candidate = Candidate(runtime=runtime, precision=precision, num_threads=threads)
    if outcome != "measured":
        return Trial(candidate=candidate, outcome=outcome, reason=reason)
    comparison = None
    if ratio is not None:
        value, low, high = ratio
        comparison = Comparison(
            baseline="eager, 1 thread", candidate=candidate.label, ratio=value, low=low, high=high, num_pairs=8,
            verdict="better",
        )  # fmt: skip
    throughput = tuple(
        Throughput(batch_size=size, rps=Measurement(quantity="q", unit="rps", samples=(rate,), estimate=rate))
        for size, rate in zip((1, 8, 32), rates, strict=False)
    )
    return Trial(
        candidate=candidate,
        outcome=outcome,
        reason=reason,
        golden=golden,
        p99=Measurement(quantity="p99", unit="s", samples=(), estimate=p99_s),
        comparison=comparison,
        throughput=throughput,
        cold_start_s=cold_start_s,
        peak_memory_bytes=peak_mib * MIB,
    )


def simplicity(candidate: Candidate) -> tuple[int, ...]:
    return RANKS[candidate.runtime], candidate.precision != "float32", candidate.num_threads


def never_asked(faster: Trial, simpler: Trial) -> bool:
    raise AssertionError(f"{faster.candidate.label} and {simpler.candidate.label} were measured head to head")


def answer(value: bool) -> Callable[[Trial, Trial], bool]:
    return lambda faster, simpler: value


def chosen(*trials: Trial, separated: Callable[[Trial, Trial], bool] = never_asked) -> str:
    ranked = eligible(trials, Tolerance(), Limits())
    return choose(ranked, simplicity, separated).candidate.label


EAGER = trial("eager")


def test_the_fastest_wins_where_the_intervals_are_apart() -> None:
    assert (
        chosen(EAGER, trial("torchscript", (1.5, 1.4, 1.6)), trial("inductor", (1.8, 1.7, 1.9))) == "inductor, 1 thread"
    )


def test_a_slower_one_never_wins_for_being_simple() -> None:
    assert chosen(EAGER, trial("aotinductor", (1.06, 1.04, 1.08))) == "aotinductor, 1 thread"


def test_intervals_that_overlap_are_measured_head_to_head() -> None:
    pair = (EAGER, trial("torchscript", (1.5, 1.4, 1.65)), trial("inductor", (1.7, 1.6, 1.9)))
    assert chosen(*pair, separated=answer(True)) == "inductor, 1 thread"
    assert chosen(*pair, separated=answer(False)) == "torchscript, 1 thread"


def test_not_told_apart_the_simplest_wins_and_is_not_asked_again() -> None:
    """Three that overlap: the two more complicated ones lose to the plainest at once."""
    asked: list[tuple[str, str]] = []

    def separated(faster: Trial, simpler: Trial) -> bool:
        asked.append((faster.candidate.runtime, simpler.candidate.runtime))
        return False

    trials = (EAGER, trial("inductor", (1.7, 1.4, 1.9)), trial("torchscript", (1.5, 1.3, 1.8)),
              trial("onnxruntime", (1.6, 1.3, 1.8)))  # fmt: skip
    assert chosen(*trials, separated=separated) == "torchscript, 1 thread"
    assert asked == [("inductor", "torchscript")]


def test_a_simpler_one_that_is_separated_makes_way_for_the_next() -> None:
    def separated(faster: Trial, simpler: Trial) -> bool:
        return simpler.candidate.runtime == "torchscript"

    trials = (EAGER, trial("inductor", (1.7, 1.4, 1.9)), trial("torchscript", (1.5, 1.3, 1.8)),
              trial("onnxruntime", (1.6, 1.3, 1.8)))  # fmt: skip
    assert chosen(*trials, separated=separated) == "onnxruntime, 1 thread"


def test_equally_fast_as_the_reference_the_reference_wins() -> None:
    """Its own ratio is exactly 1."""
    assert chosen(EAGER, trial("torchscript", (1.05, 0.98, 1.1)), separated=answer(False)) == "eager, 1 thread"


def test_the_fastest_that_is_also_the_simplest_is_never_doubted() -> None:
    assert chosen(EAGER, trial("eager", (1.6, 1.5, 1.7), threads=2), trial("inductor", (1.55, 1.4, 1.7))) == (
        "eager, 2 threads"
    )


def test_fewer_threads_are_simpler() -> None:
    trials = (EAGER, trial("torchscript", (1.5, 1.4, 1.6)), trial("torchscript", (1.55, 1.4, 1.7), threads=2))
    assert chosen(*trials, separated=answer(False)) == "torchscript, 1 thread"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (GoldenError(output="y", cos=0.9989, max_abs=0.1, max_rel=0.1), "cos 0.9989 < 0.999 on y"),
        (GoldenError(output="y", cos=0.99899996, max_abs=0.1, max_rel=0.1), "cos 0.99899996 < 0.999 on y"),
        (GoldenError(output="y", cos=None, max_abs=None, max_rel=None), "output y is not finite where it should be"),
        (GoldenError(output="y", cos=0.999, max_abs=9.0, max_rel=9.0), ""),
    ],
)
def test_a_faster_one_that_fails_the_golden_set_loses(error: GoldenError, why: str) -> None:
    """However much faster; and one that is just inside does not."""
    wrong = trial("onnxruntime", (9.0, 8.0, 10.0), precision="int8", golden=error)
    assert failed_tolerance(wrong, Tolerance()) == why
    assert chosen(EAGER, wrong) == ("eager, 1 thread" if why else "onnxruntime int8, 1 thread")
    assert why in why_not(wrong, Tolerance(), Limits())


@pytest.mark.parametrize(
    ("tolerance", "why"),
    [
        (Tolerance(metric="max_abs", bound=0.1), ""),
        (Tolerance(metric="max_abs", bound=0.09), "max_abs 0.1 > 0.09 on y"),
        (Tolerance(metric="max_rel", bound=0.01), "max_rel 0.2 > 0.01 on y"),
        (Tolerance(metric="cos", bound=1.0), "cos 0.9995 < 1 on y"),
    ],
)
def test_every_metric_has_its_direction(tolerance: Tolerance, why: str) -> None:
    row = trial("eager", golden=GoldenError(output="y", cos=0.9995, max_abs=0.1, max_rel=0.2))
    assert failed_tolerance(row, tolerance) == why


@pytest.mark.parametrize("outcome", ["skipped", "not built", "failed", "crashed", "timed out", "out of memory"])
def test_only_what_was_measured_may_be_served(outcome: Outcome) -> None:
    gone = trial("torchscript", (9.0, 8.0, 10.0), outcome=outcome, reason="killed by SIGSEGV")
    assert eligible([EAGER, gone], Tolerance(), Limits()) == [EAGER]
    assert why_not(gone, Tolerance(), Limits()) == f"{outcome}: killed by SIGSEGV"


@pytest.mark.parametrize(
    ("one_thread", "label"),
    [((1.75, 1.32, 2.02), "onnxruntime, 1 thread"), ((1.2, 1.02, 1.4), "eager, 1 thread")],
)
def test_a_leader_of_a_wide_interval_gives_way_to_nothing_that_another_is_proven_to_beat(
    one_thread: tuple[float, float, float], label: str
) -> None:
    """Measured for MiniLM: eager took the place of onnxruntime, whose two threads couldn't be told apart from it."""
    wide = trial("onnxruntime", (1.90, 0.86, 2.10), threads=2)
    assert chosen(EAGER, wide, trial("onnxruntime", one_thread), separated=answer(False)) == label


def test_the_baseline_is_no_candidate() -> None:
    """It was never held to the golden set: it is there to be compared with."""
    baseline = trial("eager", (9.0, 8.0, 10.0), threads=0, golden=None)
    assert eligible([baseline, EAGER], Tolerance(), Limits()) == [EAGER]


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        (Limits(), []),
        (Limits(p99_s=0.01, max_memory_bytes=300 * MIB, max_cold_start_s=2.0), []),  # reached, not exceeded
        (Limits(p99_s=0.0099), ["p99 10 ms > 9.9 ms"]),
        (Limits(p99_s=0.009999), ["p99 10 ms > 9.999 ms"]),
        (Limits(max_memory_bytes=299 * MIB), ["memory 300 MiB > 299 MiB"]),
        (Limits(max_cold_start_s=1.5), ["cold start 2 s > 1.5 s"]),
        (
            Limits(p99_s=0.001, max_memory_bytes=MIB, max_cold_start_s=0.5),
            ["p99 10 ms > 1 ms", "memory 300 MiB > 1 MiB", "cold start 2 s > 0.5 s"],
        ),
    ],
)
def test_limits_exclude_and_say_which(limits: Limits, broken: list[str]) -> None:
    assert broken_limits(EAGER, limits) == broken
    assert bool(eligible([EAGER], Tolerance(), limits)) == (not broken)


def test_a_limit_takes_the_fastest_out_and_the_next_one_wins() -> None:
    limits = Limits(max_cold_start_s=5.0)
    slow_start = trial("inductor", (1.8, 1.7, 1.9), cold_start_s=12.0)
    trials = [EAGER, slow_start, trial("torchscript", (1.5, 1.4, 1.6))]
    winner = choose(eligible(trials, Tolerance(), limits), simplicity, never_asked)
    assert winner.candidate.runtime == "torchscript"
    decision = runtime_decision(winner, trials, Tolerance(), limits, {})
    assert {r.value: r.reason for r in decision.rejected} == {
        "eager, 1 thread": "1x, the reference",
        "inductor, 1 thread": "1.80x [1.70, 1.90], but cold start 12 s > 5 s",
    }


def test_nothing_left_names_every_candidate_with_its_limit() -> None:
    rows = [
        EAGER,
        trial("torchscript", outcome="crashed", reason="killed by SIGSEGV"),
        trial("onnxruntime", (2.0, 1.9, 2.1), golden=GoldenError(output="y", cos=0.5, max_abs=1.0, max_rel=1.0)),
    ]
    assert exclusions(rows, Tolerance(), Limits(p99_s=0.001)) == [
        "eager, 1 thread: p99 10 ms > 1 ms",
        "torchscript, 1 thread: crashed: killed by SIGSEGV",
        "onnxruntime, 1 thread: cos 0.5 < 0.999 on y; p99 10 ms > 1 ms",
    ]


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ((), 1),
        ((100.0,), 1),
        ((100.0, 104.0), 1),  # 4% more throughput for eight times the batch
        ((100.0, 106.0), 8),
        ((100.0, 104.0, 120.0), 32),  # 8 was not worth it, 32 is
        ((100.0, 300.0, 310.0), 8),
        ((100.0, 300.0, 200.0), 8),
    ],
)
def test_the_batch_is_as_large_as_it_pays(rates: tuple[float, ...], size: int) -> None:
    assert best_batch_size(trial("eager", rates=rates)) == size


def test_runners_up_are_one_of_each_kind_with_plain_eager_at_the_end() -> None:
    ranked = [
        trial("inductor", (2.0, 1.9, 2.1)),
        trial("torchscript", (1.8, 1.7, 1.9), threads=2),
        trial("torchscript", (1.7, 1.6, 1.8)),
        trial("eager", (1.5, 1.4, 1.6), threads=2),
        trial("onnxruntime", (1.4, 1.3, 1.5)),
        trial("onnxruntime", (1.3, 1.2, 1.4), precision="int8"),
        EAGER,
    ]
    labels = [t.candidate.label for t in runners_up(ranked, ranked[0], 2)]
    assert labels == ["torchscript, 2 threads", "onnxruntime, 1 thread", "eager, 2 threads"]
    assert runners_up([EAGER], EAGER, 2) == []


def test_a_tie_is_the_reason_that_the_report_gives() -> None:
    faster = trial("inductor", (1.7, 1.4, 1.9))
    tie = {"inductor, 1 thread": "1.70x; 1.02x [0.97, 1.08] against eager, 1 thread, which is simpler"}
    decision = runtime_decision(EAGER, [EAGER, faster], Tolerance(), Limits(), tie)
    assert (decision.value, decision.reason) == ("eager, 1 thread", "1x, the reference")
    assert [r.reason for r in decision.rejected] == list(tie.values())


@pytest.mark.parametrize(
    ("num_cores", "quota", "counts"),
    [
        (1, None, (1,)),
        (2, None, (1, 2)),
        (6, None, (1, 2, 4, 6)),
        (8, None, (1, 2, 4, 8)),
        (8, 2.5, (1, 2)),
        (8, 0.3, (1,)),  # a container with less than a core still has one thread
        (2, 16.0, (1, 2)),
    ],
)
def test_thread_counts_stay_within_what_may_be_used(
    num_cores: int, quota: float | None, counts: tuple[int, ...]
) -> None:
    environment = msgspec.structs.replace(read_environment(), num_cores=num_cores, cpu_quota=quota)
    assert thread_counts(environment) == counts
    assert usable_threads(environment) == counts[-1]


def test_a_gain_within_the_margin_is_measured_again_head_to_head() -> None:
    """1.02x, surely above 1, is still no reason for another runtime; 1.10x is."""
    asked: list[str] = []

    def separated(faster: Trial, simpler: Trial) -> bool:
        asked.append(faster.candidate.runtime)
        return False

    eager = trial("eager")
    for ratio, chosen in (((1.02, 1.01, 1.025), "eager"), ((1.10, 1.05, 1.15), "torchscript")):
        ranked = [trial("torchscript", ratio), eager]
        picked = choose(ranked, lambda c: (RANKS[c.runtime],), separated)
        assert picked.candidate.runtime == chosen
    assert asked == ["torchscript"]


def test_a_p99_without_an_upper_bound_is_called_undecided() -> None:
    """It may be served, and the plan says that the limit is not proven."""
    met = trial("eager", p99_s=0.01)
    assert met.p99 is not None
    limits = Limits(p99_s=0.02)
    proven = msgspec.structs.replace(met, p99=msgspec.structs.replace(met.p99, low=0.009, high=0.015))
    open_ended = msgspec.structs.replace(met, p99=msgspec.structs.replace(met.p99, low=0.009, high=None))
    above = msgspec.structs.replace(met, p99=msgspec.structs.replace(met.p99, low=0.009, high=0.021))
    assert unproven_p99(proven, limits) == ""
    assert "without an upper bound: undecided against 20 ms" in unproven_p99(open_ended, limits)
    assert "up to 21 ms: undecided" in unproven_p99(above, limits)
    assert unproven_p99(open_ended, Limits()) == ""
