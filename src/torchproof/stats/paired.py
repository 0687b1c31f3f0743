"""Is the candidate faster? Judged from pairs that were taken next to each other."""

from collections.abc import Sequence

from torchproof.stats.intervals import median_interval
from torchproof.types import Comparison, Verdict

# Pairs after which the interval is looked at. Looking four times and stopping at the first verdict would be wrong more
# often than one look; each look therefore gets a quarter of the 5% (Bonferroni). Eight pairs are the fewest whose
# whole range covers the median with 98.75%.
LOOKS = (8, 16, 32, 64)
CONFIDENCE = 1 - 0.05 / len(LOOKS)

# Within 3% nobody should change a runtime.
MARGIN = 0.03


def compare_paired(baseline: Sequence[float], candidate: Sequence[float], *, names: tuple[str, str]) -> Comparison:
    """Baseline time / candidate time over the pairs.

    Args:
        baseline: seconds, in the order taken; pair i was taken next to ``candidate[i]``.
        candidate: seconds, as many.
        names: labels of the two.

    Raises:
        ValueError: the lengths differ, or there are too few pairs for an interval.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"need pairs, got {len(baseline)} and {len(candidate)} samples")
    ratios = [b / c for b, c in zip(baseline, candidate, strict=True)]
    ratio, low, high = median_interval(ratios, CONFIDENCE)
    if low is None or high is None:
        raise ValueError(f"need at least {LOOKS[0]} pairs, got {len(ratios)}")
    return Comparison(
        baseline=names[0],
        candidate=names[1],
        ratio=ratio,
        low=low,
        high=high,
        num_pairs=len(ratios),
        verdict=_verdict(low, high),
    )


def _verdict(low: float, high: float) -> Verdict:
    if low > 1 - MARGIN and high < 1 + MARGIN:
        return "equivalent"
    if low > 1:
        return "better"
    return "worse" if high < 1 else "undecided"
