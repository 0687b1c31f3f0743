"""Student's t distribution, for whole degrees of freedom: finite sums, exact to rounding."""

import math
from functools import cache


def t_cdf(t: float, df: int) -> float:
    """The chance of a value up to ``t``. Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Args:
        df: degrees of freedom, at least 1.
    """
    if df < 1:
        raise ValueError(f"need at least 1 degree of freedom, got {df}")
    angle = math.atan2(t, math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = total = cosine if df % 2 else 1.0
    for k in range(df % 2 + 1, df - 1, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    if df == 1:
        return 0.5 + angle / math.pi
    return 0.5 + ((angle + sine * total) / math.pi if df % 2 else sine * total / 2)


@cache
def t_quantile(p: float, df: int) -> float:
    """Inverse of ``t_cdf``, by bisection; ``p`` strictly between 0 and 1."""
    if not 0 < p < 1:
        raise ValueError(f"p is between 0 and 1, got {p}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return high
