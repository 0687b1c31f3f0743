"""Takes baseline and candidate in turns, until the answer is clear or the time is up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchproof.stats import LOOKS, compare_paired
from torchproof.types import Comparison

Block = Callable[[int], list[float]]  # the pair's number -> seconds of each call in the block


@dataclass
class Pairs:
    """What was timed.

    Attributes:
        baseline, candidate: seconds of each block, in the order taken.
        calls: seconds of each single call of the candidate.
    """

    baseline: list[float] = field(default_factory=list)
    candidate: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def interleave(
    baseline: Block,
    candidate: Block,
    *,
    names: tuple[str, str],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Comparison, Pairs]:
    """Times blocks of the same requests on both, next to each other, each first in every second pair.

    The interval is looked at after 8, 16, 32 and 64 pairs; the first verdict ends it, and so does the budget, but
    never before 8 pairs.
    """
    pairs = Pairs()
    end = clock() + budget_s
    comparison = None
    for look in LOOKS:
        while len(pairs.baseline) < look:
            if comparison is not None and clock() >= end:
                return comparison, pairs
            _take(pairs, baseline, candidate)
        comparison = compare_paired(pairs.baseline, pairs.candidate, names=names)
        if comparison.verdict != "undecided":
            break
    assert comparison is not None  # LOOKS is not empty
    return comparison, pairs


def _take(pairs: Pairs, baseline: Block, candidate: Block) -> None:
    number = len(pairs.baseline)
    if number % 2:
        calls = candidate(number)
        base = baseline(number)
    else:
        base = baseline(number)
        calls = candidate(number)
    pairs.baseline.append(sum(base))
    pairs.candidate.append(sum(calls))
    pairs.calls += calls
