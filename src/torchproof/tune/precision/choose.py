"""Chooses: the fastest precision that was shown to be as good on all metrics with a margin."""

from collections.abc import Sequence

import msgspec

from torchproof.render import units
from torchproof.types.precision import MetricComparison, PrecisionCandidate


def choose(
    candidates: Sequence[PrecisionCandidate],
) -> tuple[PrecisionCandidate | None, list[PrecisionCandidate]]:
    """The chosen one, None for the baseline; and all of them with their verdicts."""
    obstacles = [obstacle(candidate) for candidate in candidates]
    fitting = [c for c, against in zip(candidates, obstacles, strict=True) if not against]
    best = min(fitting, key=lambda c: c.step_time.estimate if c.step_time else 0.0, default=None)
    judged = [
        msgspec.structs.replace(
            candidate,
            verdict=against or ("chosen" if candidate is best else f"{best.precision if best else ''} is faster"),
        )
        for candidate, against in zip(candidates, obstacles, strict=True)
    ]
    return next((c for c in judged if c.verdict == "chosen"), None), judged


def obstacle(candidate: PrecisionCandidate) -> str:
    """Why it can't be chosen; empty where it can."""
    if not candidate.runs:
        return candidate.ended or "it was not trained"
    judged = [c for c in candidate.comparisons if c.margin is not None]
    if not judged:
        return "no margin was given"
    for comparison in sorted(candidate.comparisons, key=lambda c: c.verdict != "different"):
        if (comparison.margin is not None or comparison.non_finite_seeds) and not _as_good(comparison):
            return _said(comparison)
    if candidate.ended:
        return candidate.ended
    time = candidate.step_time
    if time is None or time.high is None:
        return "its step time was not measured often enough"
    if time.high >= 1:
        return f"it isn't faster: a step takes {units.ratio(time.estimate, time.low, time.high)} the time"
    return ""


def _as_good(comparison: MetricComparison) -> bool:
    return comparison.verdict == "equivalent" or (comparison.verdict == "different" and comparison.is_worse is False)


def _said(comparison: MetricComparison) -> str:
    text = f"{comparison.metric} is {comparison.verdict}: {comparison.reason}"
    if comparison.num_more_seeds is not None:
        text += f"; {comparison.num_more_seeds} more seeds would decide it, at this difference and spread"
    return text
