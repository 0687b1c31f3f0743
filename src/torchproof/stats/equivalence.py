"""Is the candidate as good? Judged from paired differences against a margin that was fixed before.

Each look's interval of the mean difference is Student's t. Where it lies within the margin on both sides the two are
equivalent (two one-sided tests); else, where it excludes 0, they are different; else it is undecided.

What is promised over all looks together, for differences that are not far from normal:

- ``equivalent`` where the true difference is the margin or more: in at most 2.5% of all comparisons, as only one side
  of the interval can be wrong. A candidate has to be equivalent on all metrics that are judged, so more metrics make
  it no more likely; two candidates make it 5%.
- ``different`` where the true difference is 0: in at most 5% for each metric of each candidate.

What happens in one run of ten can't be seen in a few seeds, by this or any other test.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchproof.stats.student import t_quantile

# Seeds after which the intervals are looked at. Looking four times and stopping where it is clear would be wrong more
# often than one look; each look therefore gets a quarter of the 5% (Bonferroni). Five seeds once passed what fifteen
# did not confirm; six are the fewest whose whole range covers a median, the step time's, with 95%.
SEED_LOOKS = (6, 12, 24, 48)
SEED_CONFIDENCE = 1 - 0.05 / len(SEED_LOOKS)

_STEPS = 400  # of the integral: more change the power by less than 1e-6


class Judged(NamedTuple):
    """The mean difference, candidate - baseline, with its interval.

    Attributes:
        low, high: infinite with fewer than two differences.
    """

    estimate: float
    low: float
    high: float
    verdict: Literal["equivalent", "different", "undecided"]


def judge_differences(
    differences: Sequence[float], margin: float | None, confidence: float = SEED_CONFIDENCE
) -> Judged:
    """One look at the paired differences, of which there is at least one.

    The standard deviation is taken to be at least ``margin / sqrt(n + 1)``, which is what one more seed that is off by
    the margin would make of no spread at all: equal differences of a coarse metric, such as an accuracy over a few
    hundred samples, don't prove that there is none.

    Args:
        margin: None: there is nothing to judge against, and the verdict is undecided.
    """
    estimate = statistics.fmean(differences)
    if len(differences) < 2:
        return Judged(estimate, -math.inf, math.inf, "undecided")
    half = half_width(statistics.stdev(differences), len(differences), margin or 0.0, confidence)
    low, high = estimate - half, estimate + half
    if margin is None:
        return Judged(estimate, low, high, "undecided")
    if -margin < low and high < margin:
        return Judged(estimate, low, high, "equivalent")
    return Judged(estimate, low, high, "different" if low > 0 or high < 0 else "undecided")


def is_settled(judged: Judged, margin: float, better: Literal["higher", "lower", "unknown"]) -> bool:
    """Whether more seeds can't change what is done: equivalent, better, or different by more than the margin.

    A difference of which it isn't known whether it is within the margin gets more seeds, as long as there are any.
    """
    if judged.verdict != "different":
        return judged.verdict == "equivalent"
    if (judged.low > 0 and better == "higher") or (judged.high < 0 and better == "lower"):
        return True
    return judged.low >= margin or judged.high <= -margin


def half_width(sd: float, num_seeds: int, margin: float, confidence: float) -> float:
    """Half of the interval's width, for this standard deviation of the differences."""
    sd = max(sd, margin / math.sqrt(num_seeds + 1))
    return t_quantile((1 + confidence) / 2, num_seeds - 1) * sd / math.sqrt(num_seeds)


def power(num_seeds: int, sd_in_margins: float, confidence: float = SEED_CONFIDENCE) -> float:
    """The chance that one look at so many seeds finds equivalent what doesn't differ at all.

    Args:
        sd_in_margins: true standard deviation of the paired differences, in margins.
    """
    if sd_in_margins <= 0:
        raise ValueError(f"sd_in_margins is above 0, got {sd_in_margins}")
    df = num_seeds - 1
    log_scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    end = 1 + 8 / math.sqrt(2 * df)  # 8 standard deviations of the sample's own standard deviation
    total = 0.0
    for number in range(_STEPS):
        u = end * (number + 0.5) / _STEPS  # the sample's standard deviation by the true one
        density = math.exp(log_scale + (df - 1) * math.log(u) - df * u * u / 2)
        room = 1 - half_width(u * sd_in_margins, num_seeds, 1.0, confidence)
        if room > 0:
            total += density * math.erf(room * math.sqrt(num_seeds / 2) / sd_in_margins)
    return total * end / _STEPS


def largest_sd(num_seeds: int, wanted: float, confidence: float = SEED_CONFIDENCE) -> float:
    """The largest standard deviation of the differences, in margins, for which ``power`` is at least ``wanted``."""
    low, high = 0.0, math.sqrt(num_seeds)  # where a single standard error is as wide as the margin
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(num_seeds, middle, confidence) >= wanted else (low, middle)
    return low


def num_more_seeds(differences: Sequence[float], margin: float, confidence: float = SEED_CONFIDENCE) -> int | None:
    """How many more seeds would decide, if mean and spread stayed as they are; None where none would.

    It is an estimate, not a promise: mean and spread move.
    """
    if len(differences) < 2:
        return None
    mean, sd = abs(statistics.fmean(differences)), statistics.stdev(differences)

    def decided(num_seeds: int) -> bool:
        half = half_width(sd, num_seeds, margin, confidence)
        return mean + half < margin or mean > half

    low = high = len(differences)
    while not decided(high):
        if high > 10**6:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high - len(differences)
