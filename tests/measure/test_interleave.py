"""Baseline and candidate take turns, and the sampling ends when it may."""

from collections.abc import Callable

import pytest

from torchproof.measure.interleave import Pairs, interleave
from torchproof.types import Comparison

NAMES = ("eager", "torchscript")


class Clock:
    """Time that only the blocks move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Blocks that note who was called with which number, and take ``ratio(number)`` and 1 second."""

    def __init__(self, ratio: Callable[[int], float]) -> None:
        self.ratio = ratio
        self.order: list[tuple[str, int]] = []
        self.clock = Clock()

    def baseline(self, number: int) -> list[float]:
        self.order.append(("baseline", number))
        self.clock.now += self.ratio(number)
        return [self.ratio(number) / 2] * 2

    def candidate(self, number: int) -> list[float]:
        self.order.append(("candidate", number))
        self.clock.now += 1.0
        return [0.25] * 4

    def run(self, budget_s: float) -> tuple[Comparison, Pairs]:
        return interleave(self.baseline, self.candidate, names=NAMES, budget_s=budget_s, clock=self.clock)


def undecided(number: int) -> float:
    """A coin's two sides: no interval of their median leaves out 1."""
    return 0.5 if number % 2 else 2.0


def test_each_is_first_in_every_second_pair_and_both_get_the_same_number() -> None:
    bench = Bench(lambda number: 2.0)
    bench.run(budget_s=1000)
    assert bench.order[:8] == [
        ("baseline", 0), ("candidate", 0), ("candidate", 1), ("baseline", 1),
        ("baseline", 2), ("candidate", 2), ("candidate", 3), ("baseline", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("ratio", "verdict"), [(2.0, "better"), (0.5, "worse"), (1.0, "equivalent")])
def test_the_first_verdict_ends_it(ratio: float, verdict: str) -> None:
    comparison, pairs = Bench(lambda number: ratio).run(budget_s=1000)
    assert (comparison.verdict, comparison.num_pairs) == (verdict, 8)
    assert len(pairs.baseline) == len(pairs.candidate) == 8


def test_a_verdict_at_a_later_look() -> None:
    """One pair in eight speaks against it: eight pairs decide nothing, sixteen do."""
    comparison, _ = Bench(lambda number: 0.9 if number == 3 else 1.5).run(budget_s=1000)
    assert (comparison.verdict, comparison.num_pairs) == ("better", 16)


def test_without_a_verdict_it_ends_at_the_last_look() -> None:
    comparison, pairs = Bench(undecided).run(budget_s=10_000)
    assert (comparison.verdict, comparison.num_pairs) == ("undecided", 64)
    assert len(pairs.baseline) == 64


@pytest.mark.parametrize("budget_s", [0.0, -5.0, 3.0])
def test_never_fewer_than_eight_pairs(budget_s: float) -> None:
    """However small the budget, there is an interval to say something with."""
    comparison, pairs = Bench(undecided).run(budget_s)
    assert (comparison.verdict, comparison.num_pairs) == ("undecided", 8)
    assert len(pairs.baseline) == 8


def test_the_budget_ends_it_between_two_looks() -> None:
    """The verdict is the last look's: a look at whatever number the budget happened to allow would not be corrected."""
    comparison, pairs = Bench(undecided).run(budget_s=27.0)  # a pair takes 2.25 s on average
    assert comparison.num_pairs == 8
    assert len(pairs.baseline) == len(pairs.candidate) == 12


def test_sums_of_blocks_and_single_calls() -> None:
    _, pairs = Bench(lambda number: 2.0).run(budget_s=1000)
    assert pairs.baseline == [2.0] * 8
    assert pairs.candidate == [1.0] * 8
    assert pairs.calls == [0.25] * 32


def test_what_a_block_raises_is_the_callers() -> None:
    def broken(number: int) -> list[float]:
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        interleave(broken, Bench(undecided).candidate, names=NAMES, budget_s=1.0)
