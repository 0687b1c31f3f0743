"""From runs to verdicts: each metric of a candidate against the baseline's, and what a precision costs."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchproof.stats import median_interval
from torchproof.stats.equivalence import SEED_LOOKS, Judged, is_settled, judge_differences, num_more_seeds
from torchproof.types.precision import Better, Equivalence, MetricComparison, MetricSpread, Ratio, SeedRun


@dataclass(frozen=True)
class Compared:
    """A comparison, and whether it ends the candidate's training.

    Attributes:
        settled: whether more seeds could change nothing; whether it rules the candidate out.
    """

    comparison: MetricComparison
    settled: tuple[bool, bool]


def spread(metric: str, runs: Sequence[SeedRun]) -> MetricSpread:
    """The baseline's metric over its seeds, and which way training moved it: better is what it was trained for."""
    values = tuple(run.metrics.get(metric) for run in runs)
    finite = [value for value in values if value is not None]
    moves = {
        _sign(last - first)
        for run in runs
        if (last := run.metrics.get(metric)) is not None and (first := run.first_metrics.get(metric)) is not None
    }
    better: Better = "higher" if moves == {1} else "lower" if moves == {-1} else "unknown"
    return MetricSpread(
        metric=metric,
        mean=statistics.fmean(finite) if finite else None,
        sd=statistics.stdev(finite) if len(finite) > 1 else None,
        better=better,
        values=values,
    )


def compare(
    metric: str, baseline: Sequence[SeedRun], candidate: Sequence[SeedRun], margin: float | None, better: Better
) -> Compared:
    """A metric over the seeds that both were trained with, judged on those of the last look.

    Seeds after it count for the next one. Before the first look nothing is judged, whatever the numbers are.
    """
    pairs = [
        (run, base.metrics.get(metric), run.metrics.get(metric))
        for base, run in zip(baseline, candidate, strict=False)  # the candidate may have ended before
    ]
    differences = tuple(None if a is None or b is None else b - a for _, a, b in pairs)
    lost = tuple(run.seed for run, a, b in pairs if a is not None and b is None)
    looked = max((look for look in SEED_LOOKS if look <= len(pairs)), default=0)
    used = [value for value in differences[: looked or None] if value is not None]
    judged = judge_differences(used, margin) if used else Judged(math.nan, -math.inf, math.inf, "undecided")
    verdict: Equivalence = judged.verdict if looked else "undecided"
    if lost:
        verdict = "different"
    is_worse = _is_worse(judged.estimate, better, bool(lost)) if verdict == "different" else None
    settled = bool(lost) or (verdict != "undecided" and margin is not None and is_settled(judged, margin, better))
    needed = _more(used, margin, len(pairs)) if verdict == "undecided" and margin is not None else None
    comparison = MetricComparison(
        metric=metric,
        margin=margin,
        verdict=verdict,
        is_worse=is_worse,
        differences=differences,
        num_seeds=len(used),
        estimate=judged.estimate if used else None,
        low=judged.low if len(used) > 1 else None,
        high=judged.high if len(used) > 1 else None,
        non_finite_seeds=lost,
        num_more_seeds=needed,
        reason=_reason(judged, margin, verdict, is_worse, lost, looked, len(used)),
    )
    return Compared(comparison, (settled, settled and verdict == "different" and is_worse is not False))


def ratio(baseline: Sequence[SeedRun], candidate: Sequence[SeedRun], cost: Callable[[SeedRun], float]) -> Ratio | None:
    """What the candidate costs by the baseline's cost, over equal seeds; None without any."""
    ratios = [cost(run) / cost(base) for base, run in zip(baseline, candidate, strict=False) if cost(base) > 0]
    if not ratios:
        return None
    estimate, low, high = median_interval(ratios)
    return Ratio(estimate=estimate, low=low, high=high)


def _is_worse(estimate: float, better: Better, lost: bool) -> bool | None:
    if lost:
        return True
    if better == "unknown":
        return None
    return estimate < 0 if better == "higher" else estimate > 0


def _more(used: Sequence[float], margin: float, num_seeds: int) -> int | None:
    """To the look at which it would be decided: before that nobody looks. Beyond the last look there is none."""
    needed = num_more_seeds(used, margin)
    if needed is None:
        return None
    wanted = max(len(used) + needed, num_seeds + 1)
    return next((look for look in SEED_LOOKS if look >= wanted), wanted) - num_seeds


def _reason(
    judged: Judged,
    margin: float | None,
    verdict: Equivalence,
    is_worse: bool | None,
    lost: tuple[int, ...],
    looked: int,
    num_used: int,
) -> str:
    if lost:
        return f"not finite with seed {', '.join(map(str, lost))}, where 32-true is"
    if margin is None:
        return "no margin was given"
    if not looked:
        return f"the first look is after {SEED_LOOKS[0]} seeds"
    if num_used < 2:
        return "32-true's own is not finite"
    if verdict == "equivalent":
        return f"within {margin:g}"
    if verdict == "undecided":
        return f"the interval reaches beyond {margin:g}"
    which = {True: "worse", False: "better", None: "training moves it both ways, so better is unknown"}[is_worse]
    if is_worse is False:
        return which
    beyond = judged.low >= margin or judged.high <= -margin
    return f"{which}, by more than {margin:g}" if beyond else f"{which}; by more than {margin:g} or less isn't known"


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
