"""Does a replica's memory grow with the requests that it answers? Keeps the looks at one replica, and has them judged.

A series of memory is no line with noise. It steps when a cache is filled or an arena is mapped, falls when Python
collects cycles, and each value resembles the one before it. Therefore:

- The first quarter of the requests is left out: it warmed the replica up, however long that takes.
- The rest is cut into blocks of which the lowest value counts, so that a peak or a collection that is shorter than a
  block doesn't matter, and neighbours depend less on each other.
- The growth has to show in each half of these blocks by itself, and in the second not much slower than in the first.
  A step shows in one of them only; a cache that fills up slows down.
- It is judged again when the requests are a quarter more; what is found twice running is reported. Each judgment has
  its share of the 5% (Bonferroni).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchproof.rules.registry import judge
from torchproof.stats import theil_sen
from torchproof.types.finding import Finding
from torchproof.types.observation import Growth, MemorySeen
from torchproof.types.serving import MemorySample

MAX_SAMPLES = 256
WARM_UP = 0.25  # of the requests
NUM_BLOCKS = 24  # 12 in each half: its bound is the 10th of 66 slopes, and one step leaves 30 or more that are flat
SAMPLES_PER_BLOCK = 2

# From the first look to one at a billion requests there are 62, each a quarter later than the one before it.
LOOK_GROWTH = 1.25
CONFIDENCE = 1 - 0.05 / 64


class MemoryWatch:
    """The looks at one replica's memory; a replica that takes its place has its own watch."""

    def __init__(self) -> None:
        self._samples: list[MemorySample] = []  # evenly spaced over the requests of the whole life
        self._stride = 1
        self._last: tuple[MemorySample, ...] = ()  # the last two
        self._next_look = 0
        self._suspected: set[str] = set()
        self._reported: set[str] = set()

    def add(self, sample: MemorySample) -> None:
        """Takes a look; kept where enough requests were answered since the one before it."""
        self._last = (*self._last[-1:], sample)
        if self._samples and sample.num_requests < self._samples[-1].num_requests + self._stride:
            return
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            self._stride = 2 * (sample.num_requests - self._samples[0].num_requests) // MAX_SAMPLES
            self._samples = list(_spaced(self._samples, self._stride))

    def observe(self, target: str, replica: int) -> MemorySeen | None:
        """What the kept looks say; None while they are too few.

        Args:
            target: as the user wrote it.
            replica: its number.
        """
        warm = WARM_UP * self._samples[-1].num_requests if self._samples else 0
        seen = [sample for sample in self._samples if sample.num_requests >= warm]
        if len(seen) < NUM_BLOCKS * SAMPLES_PER_BLOCK:
            return None
        resident, private = _growth(seen, "rss_bytes"), _growth(seen, "private_bytes")
        assert resident is not None  # every look has them
        assert private is not None
        return MemorySeen(
            target=target,
            replica=replica,
            num_samples=len(seen),
            num_requests=seen[-1].num_requests - seen[0].num_requests,
            seconds=seen[-1].at_s - seen[0].at_s,
            resident=resident,
            private=private,
            in_use=_growth(seen, "in_use_bytes"),
            free=_growth(seen, "free_bytes"),
            device_allocated=_growth(seen, "device_allocated_bytes"),
            device_reserved=_growth(seen, "device_reserved_bytes"),
            num_device_ooms=(seen[-1].num_device_ooms or 0) - (seen[0].num_device_ooms or 0),
        )

    def judge(self, target: str, replica: int) -> tuple[Finding, ...]:
        """What two judgments in a row have found and no one before them; to be called after each look.

        Depends on the looks only. Nearly always there is nothing to judge yet, and it returns at once; else it takes
        some 2 ms.
        """
        if not self._samples or self._samples[-1].num_requests < self._next_look:
            return ()
        seen = self.observe(target, replica)
        if seen is None:
            return ()
        self._next_look = int(self._samples[-1].num_requests * LOOK_GROWTH) + 1
        found = {str(finding.evidence["kind"]): finding for finding in judge(seen)}
        sure = (found.keys() & self._suspected) - self._reported
        self._suspected = set(found)
        self._reported |= sure
        return tuple(found[kind] for kind in sorted(sure))

    def over_budget(self, budget_bytes: int) -> bool:
        """Whether the replica adds more than ``budget_bytes`` to the memory of the machine, and a new one would not.

        What it adds are its private bytes. Pages that replicas share are there once for all of them: whoever sets the
        budget takes them off first. Two looks in a row have to be over it, as one may fall on a large request; and the
        first one within it, as a replica that begins above it would be replaced for ever.
        """
        return (
            len(self._last) == 2
            and all(sample.private_bytes > budget_bytes for sample in self._last)
            and self._samples[0].private_bytes <= budget_bytes
        )


def _growth(samples: Sequence[MemorySample], field: str) -> Growth | None:
    """The slopes of one field over the lowest sample of each block; None where it can't be asked."""
    points = [(sample.num_requests, getattr(sample, field)) for sample in samples]
    if any(value is None for _, value in points):
        return None
    edges = [block * len(points) // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    lows = [min(points[start:end], key=lambda point: point[1]) for start, end in pairwise(edges)]
    slope, low, high = _slope(lows)
    first, first_low, _ = _slope(lows[: NUM_BLOCKS // 2])
    second, second_low, _ = _slope(lows[NUM_BLOCKS // 2 :])
    return Growth(
        slope=slope,
        low=low,
        high=high,
        first=first,
        first_low=first_low,
        second=second,
        second_low=second_low,
    )


def _slope(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    x, y = zip(*points, strict=True)
    slope, low, high = theil_sen(x, y, CONFIDENCE)
    assert low is not None  # there are as many blocks as the confidence takes
    assert high is not None
    return slope, low, high


def _spaced(samples: Sequence[MemorySample], stride: int) -> Iterator[MemorySample]:
    """The first sample, and those that are at least ``stride`` requests after the one taken before them."""
    nearest = samples[0].num_requests
    for sample in samples:
        if sample.num_requests >= nearest:
            yield sample
            nearest = sample.num_requests + stride
