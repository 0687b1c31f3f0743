"""Confidence intervals of quantiles that assume nothing about the distribution.

The interval runs between two of the samples. How many samples lie below the true quantile is binomial, so the ranks
that give the wanted coverage follow exactly (Conover, Practical Nonparametric Statistics, section 3.2). No resampling,
no randomness: the same samples give the same interval.
"""

import math
from collections.abc import Sequence


def quantile(samples: Sequence[float], q: float) -> float:
    """The sample quantile: the smallest sample that at least the share ``q`` does not exceed."""
    ordered = sorted(samples)
    return ordered[min(max(math.ceil(q * len(ordered)) - 1, 0), len(ordered) - 1)]


def quantile_interval(
    samples: Sequence[float], q: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """Interval of the true quantile.

    Returns:
        ``(low, high)``; a bound is None where the samples are too few for it: the upper bound of a p99 at 95% takes
        368 samples when both bounds are wanted.
    """
    ordered = sorted(samples)
    n = len(ordered)
    tail = (1 - confidence) / 2
    low = high = None
    cumulative = 0.0  # P(fewer than k + 1 samples lie at or below the true quantile)
    for k in range(n + 1):
        cumulative += _binomial(n, k, q)
        if cumulative <= tail and k + 1 <= n:
            low = ordered[k]
        if cumulative >= 1 - tail and k + 1 <= n:
            high = ordered[k]
            break
    return low, high


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None, float | None]:
    """The median and its interval."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    low, high = quantile_interval(ordered, 0.5, confidence)
    return median, low, high


def _binomial(n: int, k: int, p: float) -> float:
    if p in (0.0, 1.0):
        return float(k == n * p)
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))
