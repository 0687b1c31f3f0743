"""The slope's interval holds what it states for any noise, checked against counts of all orders and against scipy."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import theilslopes

from torchproof.stats import theil_sen

values = st.floats(-1e6, 1e6)


def share_of_orders(n: int, rank: int) -> float:
    """How often the slope of that rank, counted from 1, is above 0 though y has no trend: over all orders of y."""
    orders = list(itertools.permutations(range(n)))
    falling = [sum(a > b for a, b in itertools.combinations(order, 2)) for order in orders]
    return sum(number < rank for number in falling) / len(orders)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("n", range(3, 8))
def test_a_bound_is_wrong_as_seldom_as_stated_and_no_tighter_one_is(n: int, confidence: float) -> None:
    tail = (1 - confidence) / 2
    slopes = sorted((j**3 - i**3) / (j - i) for i, j in itertools.combinations(range(n), 2))
    _, low, high = theil_sen(range(n), [i**3 for i in range(n)], confidence)
    assert (low is None) == (high is None)
    rank = slopes.index(low) + 1 if low is not None else 0
    assert share_of_orders(n, rank) <= tail
    assert share_of_orders(n, rank + 1) > tail


@pytest.mark.parametrize("n", [16, 32, 64, 256])
def test_agrees_with_scipy_but_for_a_rank(n: int) -> None:
    """scipy takes a normal distribution for all sizes and rounds to the nearest rank; ours never rounds inwards."""
    rng = random.Random(n)
    x = range(n)
    y = [0.1 * i + rng.gauss(0, 1) for i in x]
    slope, low, high = theil_sen(x, y, 0.99)
    theirs = theilslopes(y, x, 0.99)
    assert slope == pytest.approx(theirs.slope)
    assert low == pytest.approx(theirs.low_slope, abs=0.02)
    assert high == pytest.approx(theirs.high_slope, abs=0.02)


def test_equal_x_count_for_nothing() -> None:
    x = [i // 8 for i in range(40)]
    y = [3.0 * i for i in x]
    assert theil_sen(x, y) == (3.0, 3.0, 3.0)
    rng = random.Random(1)
    noisy = [value + rng.gauss(0, 1) for value in y]
    slope, low, high = theil_sen(x, noisy)
    theirs = theilslopes(noisy, x)
    assert slope == pytest.approx(theirs.slope)
    assert low == pytest.approx(theirs.low_slope, abs=0.01)
    assert high == pytest.approx(theirs.high_slope, abs=0.01)


def test_coverage_in_a_simulation() -> None:
    """The true slope is inside as often as stated, under noise with a tail that has no variance (Cauchy)."""
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        y = [2 * i + rng.gauss(0, 1) / rng.gauss(0, 1) for i in range(12)]
        _, low, high = theil_sen(range(12), y, 0.9)
        assert low is not None
        assert high is not None
        hits += low <= 2 <= high
    assert hits / 1000 > 0.9 - 3 * (0.9 * 0.1 / 1000) ** 0.5


def test_a_few_outliers_move_the_slope_little() -> None:
    y = [5.0 * i for i in range(30)]
    y[3], y[17], y[29] = 1e9, -1e9, 1e9
    slope, low, high = theil_sen(range(30), y)
    assert (slope, low, high) == (5.0, 5.0, 5.0)


def test_a_step_in_the_middle_is_no_slope_where_its_parts_are_looked_at() -> None:
    """Why a caller looks at each half by itself: over the whole, a step is a trend."""
    y = [0.0] * 12 + [100.0] * 12
    assert theil_sen(range(24), y, 0.99)[0] > 0
    assert theil_sen(range(12), y[:12], 0.99) == (0.0, 0.0, 0.0)
    assert theil_sen(range(12), y[6:18], 0.9992)[1] == 0.0


def test_too_few_points_have_no_bounds() -> None:
    assert theil_sen([0, 1, 2, 3], [0, 1, 2, 3], 0.99) == (1.0, None, None)
    assert theil_sen([0, 0, 1, 1], [0, 0, 1, 1], 0.99) == (1.0, None, None)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([1.0, 2.0], [1.0], "got 2 x and 1 y"),
        ([1.0, 1.0], [1.0, 2.0], "two points with different x, got 2"),
        ([], [], "two points with different x, got 0"),
    ],
)
def test_what_has_no_slope_is_refused(x: list[float], y: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        theil_sen(x, y)


@given(st.lists(values, min_size=6, max_size=40), st.floats(0.5, 0.999))
def test_the_bounds_hold_the_slope_and_turn_with_the_data(y: list[float], confidence: float) -> None:
    slope, low, high = theil_sen(range(len(y)), y, confidence)
    down, down_low, down_high = theil_sen(range(len(y)), [-value for value in y], confidence)
    assert down == -slope
    if low is not None:
        assert high is not None
        assert low <= slope <= high
        assert (down_low, down_high) == (-high, -low)


@given(st.lists(values, min_size=8, max_size=30))
def test_more_confidence_is_never_narrower(y: list[float]) -> None:
    _, low, high = theil_sen(range(len(y)), y, 0.9)
    _, lower, higher = theil_sen(range(len(y)), y, 0.99)
    assert low is not None
    assert high is not None
    if lower is not None:
        assert higher is not None
        assert lower <= low
        assert high <= higher
