"""What is promised of ``equivalent`` and ``different`` holds for the whole sequence of looks, by simulation."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from torchproof.stats.equivalence import (
    SEED_CONFIDENCE,
    SEED_LOOKS,
    Judged,
    is_settled,
    judge_differences,
    largest_sd,
    num_more_seeds,
    power,
)
from torchproof.stats.student import t_cdf, t_quantile

NUM_SIMULATED = 2000
# Three standard errors of a share of 5% among 2,000.
SLACK = 3 * math.sqrt(0.05 * 0.95 / NUM_SIMULATED)
Draw = Callable[[], float]


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 11, 23, 47, 200])
@pytest.mark.parametrize("t", [-40.0, -3.0, -0.1, 0.0, 0.5, 1.0, 2.5, 12.0])
def test_t_agrees_with_scipy(t: float, df: int) -> None:
    assert t_cdf(t, df) == pytest.approx(scipy.stats.t.cdf(t, df), abs=1e-13)


@pytest.mark.parametrize("df", [1, 2, 5, 11, 23, 47])
@pytest.mark.parametrize("p", [0.00625, 0.3, 0.5, 0.95, 0.99375])
def test_the_quantile_agrees_with_scipy(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, math.nan])
def test_what_is_no_probability(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(p, 5)


def test_the_looks_share_five_percent() -> None:
    assert pytest.approx(0.05) == len(SEED_LOOKS) * (1 - SEED_CONFIDENCE)


# One look


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (0.0, "equivalent"),
        (0.3, "equivalent"),  # excludes 0, and is within the margin: no difference that matters
        (0.9, "different"),  # excludes 0, and may be more than the margin
        (-2.0, "different"),
    ],
)
def test_verdicts_of_one_look(mean: float, verdict: str) -> None:
    differences = [mean - 0.05, mean + 0.05] * 12
    assert judge_differences(differences, 1.0).verdict == verdict


def test_a_wide_interval_is_undecided_and_so_is_no_margin() -> None:
    assert judge_differences([-3.0, 3.0] * 6, 1.0).verdict == "undecided"
    assert judge_differences([5.0, 5.1] * 6, None).verdict == "undecided"


def test_one_seed_says_nothing() -> None:
    assert judge_differences([0.0], 1.0) == Judged(0.0, -math.inf, math.inf, "undecided")


def test_the_interval_is_students_where_the_spread_is_not_tiny() -> None:
    differences = [0.1, -0.4, 0.7, 0.2, -0.9, 0.5]
    judged = judge_differences(differences, 1.0)
    theirs = scipy.stats.ttest_1samp(differences, 0.0).confidence_interval(SEED_CONFIDENCE)
    assert (judged.low, judged.high) == pytest.approx((theirs.low, theirs.high))


def test_equal_differences_have_an_interval_still() -> None:
    """Accuracies over a few hundred samples are often the same: no spread at all isn't shown by six seeds."""
    judged = judge_differences([0.0] * 6, 1.0)
    assert judged.verdict == "equivalent"
    assert 0.5 < judged.high < 0.7
    assert judge_differences([0.7] * 6, 1.0).verdict == "different"


@pytest.mark.parametrize(
    ("low", "high", "better", "settled"),
    [
        (-0.5, 0.5, "higher", True),
        (0.2, 1.5, "higher", True),  # better
        (0.2, 1.5, "lower", False),  # worse, by more than the margin or not
        (0.2, 1.5, "unknown", False),
        (1.1, 1.5, "lower", True),  # worse by more
        (-1.5, -1.1, "unknown", True),
        (-0.5, 1.5, "higher", False),
    ],
)
def test_when_more_seeds_can_change_nothing(low: float, high: float, better: str, settled: bool) -> None:
    verdict = "equivalent" if low > -1 and high < 1 else "different" if low > 0 or high < 0 else "undecided"
    assert is_settled(Judged((low + high) / 2, low, high, verdict), 1.0, better) is settled  # type: ignore[arg-type]


# All looks


def sequential(draw: Draw, better: str) -> Judged:
    """What the search does with one metric: seeds until it is settled or the last look, whose verdict stands."""
    differences: list[float] = []
    judged = Judged(0.0, 0.0, 0.0, "undecided")
    for look in SEED_LOOKS:
        differences += [draw() for _ in range(look - len(differences))]
        judged = judge_differences(differences, 1.0)
        if is_settled(judged, 1.0, better):  # type: ignore[arg-type]
            break
    return judged


def share(verdict: str, draw: Draw, better: str = "higher") -> float:
    return sum(sequential(draw, better).verdict == verdict for _ in range(NUM_SIMULATED)) / NUM_SIMULATED


def coarse(rng: random.Random, mean: float) -> float:
    """Steps of a third of the margin, most of them none: an accuracy over a few hundred samples."""
    return mean + rng.choice([-1, 0, 0, 0, 1]) / 3


SHAPES: dict[str, Callable[[random.Random, float], float]] = {
    "narrow": lambda rng, mean: rng.gauss(mean, 0.3),
    "medium": lambda rng, mean: rng.gauss(mean, 1.0),
    "wide": lambda rng, mean: rng.gauss(mean, 3.0),
    "uniform": lambda rng, mean: rng.uniform(mean - 1.5, mean + 1.5),
    "coarse": coarse,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("better", ["higher", "unknown"])
def test_a_difference_of_the_margin_is_seldom_called_equivalent(shape: str, sign: float, better: str) -> None:
    draw = partial(SHAPES[shape], random.Random(7), sign)
    assert share("equivalent", draw, better) <= 0.025 + SLACK


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("better", ["higher", "unknown"])
def test_no_difference_is_seldom_called_one(shape: str, better: str) -> None:
    assert share("different", partial(SHAPES[shape], random.Random(11), 0.0), better) <= 0.05 + SLACK


def test_the_simulation_can_fail() -> None:
    """Looks that each spend the whole 5%, from five seeds on, as it was done when float16 passed by mistake."""
    rng = random.Random(7)
    wrong = 0
    for _ in range(NUM_SIMULATED):
        differences = [rng.gauss(1.0, 1.0) for _ in range(48)]
        wrong += any(judge_differences(differences[:n], 1.0, 0.9).verdict == "equivalent" for n in (5, 10, 15, 24, 48))
    assert wrong / NUM_SIMULATED > 0.05 + SLACK


# The plan


@pytest.mark.parametrize(("num_seeds", "sd"), [(6, 0.3), (6, 0.5), (12, 0.8), (48, 1.0), (48, 1.8), (48, 2.5)])
def test_power_is_what_a_simulation_of_one_look_finds(num_seeds: int, sd: float) -> None:
    rng = random.Random(13)
    found = [
        judge_differences([rng.gauss(0.0, sd) for _ in range(num_seeds)], 1.0).verdict == "equivalent"
        for _ in range(NUM_SIMULATED)
    ]
    assert power(num_seeds, sd) == pytest.approx(sum(found) / NUM_SIMULATED, abs=3 * 0.5 / math.sqrt(NUM_SIMULATED))


def test_the_whole_sequence_has_the_power_that_is_announced() -> None:
    """It is announced for the last look; those before it add to it."""
    sd = largest_sd(SEED_LOOKS[-1], 0.8)
    assert power(SEED_LOOKS[-1], sd) == pytest.approx(0.8, abs=1e-6)
    found = share("equivalent", partial(random.Random(17).gauss, 0.0, sd))
    assert 0.8 - 3 * 0.4 / math.sqrt(NUM_SIMULATED) <= found <= 0.9


def test_power_needs_a_spread() -> None:
    with pytest.raises(ValueError, match="above 0"):
        power(6, 0.0)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=48))
def test_more_seeds_decide_where_mean_and_spread_stay(differences: list[float]) -> None:
    more = num_more_seeds(differences, 1.0)
    mean = abs(sum(differences) / len(differences))
    if more is None:
        assert mean == pytest.approx(1.0, abs=0.02)  # at the margin, no number of seeds tells
        return
    decided = judge_differences(differences, 1.0).verdict != "undecided"
    assert (more == 0) is decided


def test_how_many_more_seeds_is_right_on_repeated_data() -> None:
    differences = [-2.0, 2.0] * 3
    more = num_more_seeds(differences, 1.0)
    assert more is not None
    as_many = [math.copysign(2.0 * math.sqrt((len(differences) + more - 1) / (len(differences) + more)), (-1) ** i)
               for i in range((len(differences) + more) // 2 * 2)]  # fmt: skip
    assert judge_differences(as_many, 1.0).verdict in ("equivalent", "undecided")
    assert judge_differences(as_many * 2, 1.0).verdict == "equivalent"
    assert 12 < len(differences) + more < 100


def test_one_seed_tells_nothing_of_how_many_are_needed() -> None:
    assert num_more_seeds([0.1], 1.0) is None
