"""A leak is found in a noisy series of memory; what only looks like one isn't."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.serve.memwatch import MAX_SAMPLES, MemoryWatch
from torchproof.types import Finding
from torchproof.types.serving import MemorySample

MIB = 2**20
BASE = 100 * MIB
NUM_SEEDS = 10

Series = Callable[[int, random.Random], float]  # bytes after so many requests


def sample(
    num_requests: int, num_bytes: float = BASE, *, at_s: float = 0.0, private: float | None = None
) -> MemorySample:
    size = int(num_bytes)
    own = size if private is None else int(private)
    return MemorySample(
        at_s=at_s, num_requests=num_requests, rss_bytes=size, private_bytes=own, in_use_bytes=size, free_bytes=MIB
    )


def watched(series: Series, seed: int = 0, *, num_looks: int = 800, step: int = 100) -> list[tuple[int, Finding]]:
    """What a watch reports, each with the number of requests before it."""
    rng, watch, found = random.Random(seed), MemoryWatch(), []
    for look in range(num_looks):
        watch.add(sample(look * step, series(look * step, rng), at_s=look * 10.0))
        found += [(look * step, finding) for finding in watch.judge("app.py:Net", 1)]
    return found


def leak(num_bytes: float, noise: float) -> Series:
    return lambda n, rng: BASE + num_bytes * n + rng.gauss(0, noise)


def fills(total: float, constant: float) -> Series:
    """A cache of ``total`` bytes of which each request finds a part that grows."""
    return lambda n, rng: BASE + total * (1 - math.exp(-n / constant)) + rng.gauss(0, 0.1 * MIB)


def until(num_requests: int, num_bytes: float) -> Series:
    """A cache with a limit."""
    return lambda n, rng: BASE + num_bytes * min(n, num_requests) + rng.gauss(0, 0.1 * MIB)


def step(at: int) -> Series:
    return lambda n, rng: BASE + 200 * MIB * (n > at) + rng.gauss(0, 0.1 * MIB)


def sawtooth(period: int) -> Series:
    """Cycles that Python collects now and then."""
    return lambda n, rng: BASE + 5000 * (n % period) + rng.gauss(0, 0.1 * MIB)


def peaks(n: int, rng: random.Random) -> float:
    """Flat, and in each twentieth look a request is under way."""
    return BASE + rng.gauss(0, MIB) + (rng.random() < 0.05) * 300 * MIB


def wandering(stays: float) -> Series:
    """Each value is near the one before it."""
    state = [0.0]

    def series(n: int, rng: random.Random) -> float:
        state[0] = (stays * state[0] if n else 0.0) + rng.gauss(0, MIB)
        return BASE + state[0]

    return series


@pytest.mark.parametrize(
    ("series", "before"),
    [
        (leak(2048, 0.1 * MIB), 16_000),
        (leak(2048, 2 * MIB), 40_000),
        (leak(1_000_000, 20 * MIB), 16_000),
    ],
)
def test_a_leak_is_found_under_noise(series: Series, before: int) -> None:
    for seed in range(NUM_SEEDS):
        ((num_requests, finding),) = watched(series, seed)  # once, though it goes on
        assert finding.code == "TP201"
        assert finding.where == "app.py:Net (replica 1)"
        assert finding.evidence["kind"] == "kept"
        assert num_requests <= before


def test_a_leak_is_found_below_peaks() -> None:
    """In a fifth of the looks much more is in use: the lowest of each block tell."""
    for seed in range(NUM_SEEDS):
        assert len(watched(lambda n, rng: BASE + 2048 * n + (rng.random() < 0.2) * 300 * MIB, seed)) == 1


def test_the_growth_it_names_is_the_leak() -> None:
    for seed in range(NUM_SEEDS):
        ((_, finding),) = watched(leak(2048, 0.2 * MIB), seed)
        low, high = finding.evidence["low"], finding.evidence["high"]
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert low <= 2048 <= high


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(leak(0, 5 * MIB), id="noise"),
        pytest.param(leak(50, 0.01 * MIB), id="too slow to matter"),
        pytest.param(fills(300 * MIB, 2_000), id="fills soon"),
        pytest.param(fills(300 * MIB, 10_000), id="fills while it is judged"),
        pytest.param(until(8_000, 10_000), id="a limit"),
        pytest.param(step(6_000), id="an early step"),
        pytest.param(step(11_000), id="a step"),
        pytest.param(sawtooth(1_000), id="collected often"),
        pytest.param(sawtooth(7_000), id="collected seldom"),
        pytest.param(peaks, id="peaks"),
        pytest.param(wandering(0.9), id="wanders"),
        pytest.param(wandering(1.0), id="wanders off"),
    ],
)
def test_what_only_looks_like_a_leak_is_not_reported(series: Series) -> None:
    assert [watched(series, seed) for seed in range(NUM_SEEDS)] == [[]] * NUM_SEEDS


def test_one_judgment_is_not_enough() -> None:
    """What is found at one length of the trace and not at the next, a quarter longer, isn't reported."""
    watch = MemoryWatch()
    for n in range(0, 12_400, 100):
        watch.add(sample(n, BASE + 2048 * n, at_s=n / 10))
        assert watch.judge("app.py:Net", 1) == ()
    for n in range(12_400, 30_000, 100):
        watch.add(sample(n, BASE + 2048 * 12_400, at_s=n / 10))
        assert watch.judge("app.py:Net", 1) == ()


def test_judging_depends_on_the_looks_only() -> None:
    """A watch that is asked again and again says the same as one that is asked once for each look."""
    often, once = MemoryWatch(), MemoryWatch()
    reports: tuple[list[Finding], list[Finding]] = ([], [])
    for n in range(0, 40_000, 100):
        for watch in (often, once):
            watch.add(sample(n, BASE + 2048 * n, at_s=n / 10))
        reports[0].extend(finding for _ in range(3) for finding in often.judge("app.py:Net", 1))
        reports[1].extend(once.judge("app.py:Net", 1))
    assert reports[0] == reports[1]
    assert len(reports[0]) == 1


def test_a_replica_that_takes_its_place_is_reported_anew() -> None:
    assert len(watched(leak(2048, 0.1 * MIB))) == len(watched(leak(2048, 0.1 * MIB))) == 1


def test_an_idle_replica_keeps_its_trace() -> None:
    """A night of looks without a request doesn't push out those that say something."""
    watch = MemoryWatch()
    for n in range(0, 12_000, 100):
        watch.add(sample(n, BASE + 2048 * n, at_s=n / 10))
    seen = watch.observe("app.py:Net", 1)
    for look in range(5000):
        watch.add(sample(11_900, at_s=2000.0 + look))
    assert watch.observe("app.py:Net", 1) == seen


def test_too_few_looks_are_no_observation() -> None:
    watch = MemoryWatch()
    assert watch.observe("app.py:Net", 1) is None
    assert watch.judge("app.py:Net", 1) == ()
    for n in range(20):
        watch.add(sample(n * 1000))
    assert watch.observe("app.py:Net", 1) is None


def test_what_malloc_does_not_say_is_none() -> None:
    watch = MemoryWatch()
    for n in range(100):
        watch.add(MemorySample(at_s=float(n), num_requests=n, rss_bytes=BASE, private_bytes=BASE))
    seen = watch.observe("app.py:Net", 1)
    assert seen is not None
    assert (seen.in_use, seen.free, seen.device_allocated, seen.device_reserved) == (None,) * 4
    assert seen.num_device_ooms == 0


@given(st.lists(st.integers(0, 1000), max_size=1500))
def test_looks_are_few_in_order_and_from_the_whole_life(steps: list[int]) -> None:
    watch, num_requests = MemoryWatch(), 0
    watch.add(sample(0))
    for more in steps:
        num_requests += more
        watch.add(sample(num_requests))
        kept = [look.num_requests for look in watch._samples]
        assert len(kept) <= MAX_SAMPLES
        assert kept[0] == 0
        assert kept == sorted(set(kept))


def test_kept_looks_are_evenly_spaced() -> None:
    watch = MemoryWatch()
    for n in range(10_000):
        watch.add(sample(n * 7))
    kept = [look.num_requests for look in watch._samples]
    gaps = [after - before for before, after in pairwise(kept)]
    assert len(kept) > MAX_SAMPLES // 3
    assert max(gaps) <= 2 * min(gaps)


# The budget


def over_budget(*private: float) -> Iterator[bool]:
    """Whether it is over 200 MiB after each look; what is shared comes on top."""
    watch = MemoryWatch()
    for n, mib in enumerate(private):
        watch.add(sample(n, (mib + 900) * MIB, private=mib * MIB))
        yield watch.over_budget(200 * MIB)


def test_over_budget_takes_two_looks_in_a_row() -> None:
    assert list(over_budget(100, 201, 199, 201, 202, 150)) == [False, False, False, False, True, False]


def test_what_is_shared_does_not_count() -> None:
    assert not any(over_budget(100, 200, 200, 200))


def test_one_that_began_over_the_budget_is_not_replaced_for_it() -> None:
    """The next one would be over it as well."""
    assert not any(over_budget(300, 300, 300))


def test_nothing_is_over_budget_before_the_first_look() -> None:
    assert not MemoryWatch().over_budget(0)
