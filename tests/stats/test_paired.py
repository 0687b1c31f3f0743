"""A verdict is wrong at most once in twenty, although the samples are looked at four times."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.measure.interleave import interleave
from torchproof.stats import LOOKS, MARGIN, compare_paired
from torchproof.types import Comparison, Verdict

NAMES = ("eager", "torchscript")
# Blocks of 200 calls of an MLP in seconds, recorded on two cores beside three busy processes: eager, and traced.
EAGER = [0.0322, 0.0322, 0.0323, 0.0318, 0.0335, 0.0320, 0.0295, 0.0298]
TRACED = [0.0152, 0.0182, 0.0154, 0.0154, 0.0155, 0.0155, 0.0157, 0.0157]


def verdict(ratios: list[float]) -> Verdict:
    return compare_paired(ratios, [1.0] * len(ratios), names=NAMES).verdict


def test_recorded_pairs() -> None:
    """Eight pairs: the interval is their whole range."""
    result = compare_paired(EAGER, TRACED, names=NAMES)
    assert (result.baseline, result.candidate, result.num_pairs, result.verdict) == (*NAMES, 8, "better")
    assert (result.low, result.high) == (0.0322 / 0.0182, 0.0335 / 0.0155)
    assert result.ratio == pytest.approx(2.065, abs=1e-3)
    assert compare_paired(TRACED, EAGER, names=NAMES).verdict == "worse"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 1.4, "undecided"),  # 1 itself is in the interval
        (1.001, 1.4, "better"),
        (0.7, 0.999, "worse"),
        (0.7, 1.0, "undecided"),
        (1 - MARGIN + 1e-6, 1 + MARGIN - 1e-6, "equivalent"),
        (1 - MARGIN - 1e-6, 1 + MARGIN - 1e-6, "undecided"),
        (1 - MARGIN + 1e-6, 1 + MARGIN + 1e-6, "undecided"),
        (1.005, 1.02, "equivalent"),  # proven faster, by less than anyone should change a runtime for
        (1.005, 1.04, "better"),
        (0.98, 0.995, "equivalent"),
    ],
)
def test_verdicts_and_the_equivalence_margin(low: float, high: float, expected: Verdict) -> None:
    """Eight pairs: the interval is their whole range."""
    assert verdict([low, *[(low + high) / 2] * 6, high]) == expected


@pytest.mark.parametrize(("baseline", "candidate"), [([1.0] * 8, [1.0] * 9), ([1.0] * 7, [1.0] * 7), ([], [])])
def test_what_is_no_set_of_pairs(baseline: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError, match="need"):
        compare_paired(baseline, candidate, names=NAMES)


times = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(times, times), min_size=8, max_size=64), st.randoms(use_true_random=False))
def test_the_ratio_is_inside_and_the_order_of_the_pairs_does_not_matter(
    pairs: list[tuple[float, float]], rng: random.Random
) -> None:
    result = compare_paired([b for b, _ in pairs], [c for _, c in pairs], names=NAMES)
    assert result.low <= result.ratio <= result.high
    rng.shuffle(pairs)
    assert compare_paired([b for b, _ in pairs], [c for _, c in pairs], names=NAMES) == result


def sequential(draw: Callable[[], tuple[float, float]]) -> Comparison:
    """What a trial does: pairs until the first verdict or the last look, on drawn times instead of a clock."""
    pair = [0.0, 0.0]

    def baseline(number: int) -> list[float]:
        if number % 2 == 0:
            pair[:] = draw()
        return pair[:1]

    def candidate(number: int) -> list[float]:
        if number % 2:
            pair[:] = draw()
        return pair[1:]

    return interleave(baseline, candidate, names=NAMES, budget_s=1.0, clock=lambda: 0.0)[0]


def rate(num: int, wrong: tuple[Verdict, ...], draw: Callable[[], tuple[float, float]]) -> float:
    return sum(sequential(draw).verdict in wrong for _ in range(num)) / num


def noisy(rng: random.Random, ratio: float, sigma: float) -> Callable[[], tuple[float, float]]:
    """A pair whose ratio has the median ``ratio``, with bursts that hit both."""

    def draw() -> tuple[float, float]:
        burst = rng.choice([1.0, 1.0, 1.0, 3.0])
        return burst * ratio * rng.lognormvariate(0, sigma), burst

    return draw


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.5])
def test_no_difference_is_called_one_at_most_once_in_twenty(sigma: float) -> None:
    """Four looks at null data, 2,000 seeded runs. The bound is the promise itself: exact intervals leave some room."""
    rng = random.Random(7)
    assert rate(2000, ("better", "worse"), noisy(rng, 1.0, sigma)) <= 0.05


@pytest.mark.parametrize("ratio", [1 + MARGIN, 1 - MARGIN])
def test_a_difference_at_the_margin_is_called_equivalent_at_most_once_in_twenty(ratio: float) -> None:
    rng = random.Random(11)
    assert rate(2000, ("equivalent",), noisy(rng, ratio, 0.02)) <= 0.05


def test_the_simulation_can_fail() -> None:
    """Looks that each spend the whole 5% are wrong more often: what the correction is there for."""
    rng = random.Random(7)
    draw = noisy(rng, 1.0, 0.5)
    wrong = 0
    for _ in range(2000):
        ratios = [b / c for b, c in (draw() for _ in range(LOOKS[-1]))]
        spans = [sorted(ratios[:n]) for n in LOOKS]
        # The ranks of a 95% interval of the median at 8, 16, 32 and 64 samples.
        inner = [(s[k], s[-1 - k]) for s, k in zip(spans, (0, 3, 9, 23), strict=True)]
        wrong += any(low > 1 or high < 1 for low, high in inner)
    assert wrong / 2000 > 0.055


def test_a_clear_difference_is_found_at_the_first_look() -> None:
    rng = random.Random(3)
    results = [sequential(noisy(rng, 1.5, 0.05)) for _ in range(200)]
    assert {r.verdict for r in results} == {"better"}
    assert {r.num_pairs for r in results} == {LOOKS[0]}
