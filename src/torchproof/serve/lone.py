"""A request that has the machine to itself may use all of its cores: where that is faster, by what was measured lately.

A replica of a bare target has one thread on its own core, which answers most requests a second. One request alone
leaves the other cores idle. More threads then help or not: small models gain nothing, and beside a busy neighbour
threads that wait for each other lose. So both are measured, on the requests themselves.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

# Lone forwards in a row that each other number of threads is tried with, of which the first counts for nothing: it
# starts the threads.
NUM_TRIED = 5
# So many lone requests after the choice has changed the others are tried again, then after twice as many, and so on up
# to the last: the machine may be idle by then, or busy.
FIRST_RETRY, LAST_RETRY = 16, 1024
# A trial ends where a forward takes so many times as long as it should: beside a busy neighbour each further one would.
GIVE_UP = 2.0
# Forwards that are remembered of each, and how many of those, the slowest for their size, count for nothing.
NUM_KEPT = 6
NUM_OUTLIERS = 1
# More threads are used where they take at most this share of the time: they may be in the way of the next request.
WORTH = 0.95
# Elements of a tensor that torch gives to one thread at least.
GRAIN = 32768

T = TypeVar("T")


class Threads:
    """Sets the threads of each forward.

    Args:
        num_threads: of a forward while other requests are at work.
        cores: of the whole server; a lone request is tried with 2 threads, 4 and so on, and one on each of them.
    """

    def __init__(self, num_threads: int, cores: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        more = {min(num_threads << i, len(cores)) for i in range(1, len(cores).bit_length() + 1)}
        self._few = _Way(num_threads)
        self._ways = [self._few, *map(_Way, sorted(more - {num_threads}))]
        self._cores = cores
        self._clock = clock
        self._current = num_threads
        self._chosen = self._few
        self._retry_after = FIRST_RETRY
        self._num_since = 0  # lone requests since the others were tried
        self._to_try = [way for way in self._ways for _ in range(NUM_TRIED)]

    def run(self, forward: Callable[[], T], *, lone: bool, cost_s: float) -> T:
        """The forward's result.

        Args:
            cost_s: what it takes with the few threads by the costs measured at warm-up.
        """
        way = self._choose() if lone else self._few
        started = self._set(way.num_threads)
        start = self._clock()
        result = forward()
        if lone and not started:
            seconds = self._clock() - start
            way.seen.append((seconds, cost_s))
            if seconds > GIVE_UP * cost_s:
                self._to_try = [other for other in self._to_try if other is not way]
        return result

    def _choose(self) -> "_Way":
        if not self._to_try:
            best = min(self._ways, key=_Way.pace)
            if best.pace() > WORTH * self._few.pace():
                best = self._few
            if best is not self._chosen:
                self._chosen, self._retry_after, self._num_since = best, FIRST_RETRY, 0
            self._num_since += 1
            if self._num_since <= self._retry_after:
                return best
            self._retry_after, self._num_since = min(2 * self._retry_after, LAST_RETRY), 0
            for way in self._ways:
                if way is not best:
                    way.seen.clear()
                    self._to_try += [way] * NUM_TRIED
        return self._to_try.pop()

    def _set(self, num_threads: int) -> bool:
        """Whether it is another number than that of the forward before."""
        if num_threads == self._current:
            return False
        torch.set_num_threads(num_threads)
        if num_threads > self._current:
            _start_threads(num_threads, self._cores)
        self._current = num_threads
        return True


class _Way:
    """Forwards with so many threads; ``seen`` are the seconds they took and should take."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.seen: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)

    def pace(self) -> float:
        """Seconds to each expected one."""
        kept = sorted(self.seen, key=lambda seen: seen[0] / seen[1])[:-NUM_OUTLIERS]
        if not kept:
            return math.inf
        return sum(seconds for seconds, _ in kept) / sum(cost_s for _, cost_s in kept)


def _start_threads(num_threads: int, cores: Sequence[int]) -> None:
    """OpenMP's threads stay on the cores that they were started on: all but this thread's, which goes back to its own.

    With that one too, the kernel puts a thread that wakes up beside the one that woke it, and both take turns.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    own = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # they have been taken from the server since it started
            os.sched_setaffinity(0, set(cores) - {min(own)})
        torch.ones(GRAIN * num_threads)
    finally:
        os.sched_setaffinity(0, own)
