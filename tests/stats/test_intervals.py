"""The intervals hold what they state, for any distribution: checked by exact binomial sums, not by luck."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from torchproof.stats import median_interval, quantile, quantile_interval

SIZES = [*range(8, 80), 100, 150, 200, 250, 300, 350, 367, 368, 369, 399, 400]
# 20 calls of a small CNN in ms, recorded on two cores beside three busy processes: every second one was preempted.
RECORDED = [
    2.19, 6.18, 1.89, 6.07, 2.00, 5.65, 2.14, 5.97, 1.80, 5.98, 2.26, 6.48, 2.10, 5.97, 1.81, 6.00,
    1.78, 6.05, 4.74, 1.83,
]  # fmt: skip

samples = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=120)
quantiles = st.floats(0.01, 0.99)


def coverage(n: int, q: float, confidence: float) -> tuple[float, float]:
    """Probability that each bound is on its right side of the true quantile, from the ranks that were picked."""
    low, high = quantile_interval(range(n), q, confidence)
    below = stats.binom(n, q)  # how many of n samples lie at or below the true quantile
    low_holds = 1.0 if low is None else float(below.sf(int(low)))  # at least low + 1 samples lie below
    high_holds = 1.0 if high is None else float(below.cdf(int(high)))  # at most high samples lie below
    return low_holds, high_holds


@pytest.mark.parametrize("confidence", [0.95, 0.9875])
@pytest.mark.parametrize("q", [0.5, 0.99])
def test_covers_at_least_as_often_as_stated(q: float, confidence: float) -> None:
    tail = (1 - confidence) / 2
    for n in SIZES:
        low_holds, high_holds = coverage(n, q, confidence)
        assert low_holds >= 1 - tail - 1e-12, n
        assert high_holds >= 1 - tail - 1e-12, n


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_is_not_wider_than_it_has_to_be(q: float) -> None:
    """One sample further in on either side would cover too seldom."""
    for n in SIZES:
        low, high = quantile_interval(range(n), q)
        below = stats.binom(n, q)
        if low is not None:
            assert below.sf(int(low) + 1) < 0.975, n
        if high is not None and high > 0:
            assert below.cdf(int(high) - 1) < 0.975, n


def test_coverage_in_a_simulation() -> None:
    """The same promise without the formula: 2,000 skewed samples of 40, the true median known."""
    rng = random.Random(1)
    true = math.log(2)
    hits = 0
    for _ in range(2000):
        low, high = quantile_interval([rng.expovariate(1) for _ in range(40)], 0.5)
        assert low is not None
        assert high is not None
        hits += low <= true <= high
    assert hits / 2000 > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize(
    ("n", "q", "confidence", "bounded"),
    [
        (5, 0.5, 0.95, (False, False)),  # 2 * 0.5**5 is 6%: not even the whole range is enough
        (6, 0.5, 0.95, (True, True)),
        (7, 0.5, 0.9875, (False, False)),
        (8, 0.5, 0.9875, (True, True)),  # why a first look takes eight pairs
        (1, 0.99, 0.95, (True, False)),  # with 99% the only sample is not above the p99
        (367, 0.99, 0.95, (True, False)),
        (368, 0.99, 0.95, (True, True)),  # why a p99 takes 368 calls
        (0, 0.5, 0.95, (False, False)),
    ],
)
def test_too_few_samples_give_no_bound(n: int, q: float, confidence: float, bounded: tuple[bool, bool]) -> None:
    low, high = quantile_interval([float(i) for i in range(n)], q, confidence)
    assert (low is not None, high is not None) == bounded


def test_recorded_samples() -> None:
    """Ranks 6 and 15 of 20, as in the tables (Conover, A3): the median of two heaps is known only as between them."""
    assert median_interval(RECORDED) == (pytest.approx(3.5), 2.0, 5.98)
    assert quantile(RECORDED, 0.99) == 6.48
    assert quantile(RECORDED, 0.5) == 2.26
    assert quantile_interval(RECORDED, 0.99)[1] is None


def test_median_of_an_odd_number() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, None, None)


@given(samples, quantiles)
def test_the_interval_contains_the_estimate(values: list[float], q: float) -> None:
    low, high = quantile_interval(values, q)
    estimate = quantile(values, q)
    assert low is None or low <= estimate
    assert high is None or estimate <= high
    median, low, high = median_interval(values)
    assert low is None or low <= median
    assert high is None or median <= high


@given(samples, quantiles, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(values: list[float], q: float, rng: random.Random) -> None:
    shuffled = list(values)
    rng.shuffle(shuffled)
    assert quantile_interval(shuffled, q) == quantile_interval(values, q)
    assert median_interval(shuffled) == median_interval(values)
    assert quantile(shuffled, q) == quantile(values, q)


@given(samples, quantiles)
def test_more_confidence_is_never_narrower(values: list[float], q: float) -> None:
    low, high = quantile_interval(values, q, 0.9)
    wide_low, wide_high = quantile_interval(values, q, 0.99)
    assert wide_low is None or (low is not None and wide_low <= low)
    assert wide_high is None or (high is not None and wide_high >= high)
