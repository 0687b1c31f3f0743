"""Which rows share a forward: what the costs measured at warm-up say, never a count alone.

Padding 32 mixed texts into one batch is slower than one by one; the same texts in 4 groups of like length take half
the time. So rows are sorted by size and cut into groups where the sum of the predicted seconds is smallest.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add

from torchproof.types.serving import Costs

Sizes = tuple[int, ...]  # a row's variable sizes, in a fixed order of the dims; () where there are none

# Rows that are planned together. The search takes time in proportion to them (well under a millisecond at 64), and
# 256 rows of like size fill several forwards of any batch size that pays on a CPU.
WINDOW = 256

# Volumes whose costs are kept: a row of costs for 64 batch sizes is 2 KiB, and lengths of texts are a few hundred.
_MAX_CACHED = 1024


class CostModel:
    """Predicts the seconds of a forward from those that were measured.

    Linear between the measured batch sizes and between the measured volumes; never less for a larger batch or a larger
    volume. Beyond the last volume the last two go on in a line, and beyond the last batch size in proportion.
    """

    def __init__(self, costs: Costs) -> None:
        self._volumes = costs.volumes
        self._batch_sizes = costs.batch_sizes
        self._seconds = _repaired(costs.seconds)
        self._rows: dict[int, list[float]] = {}
        self._alike: dict[tuple[int, int, float], _Alike] = {}

    def cost_s(self, batch_size: int, volume: int) -> float:
        """Seconds of one forward of ``batch_size`` rows that are padded to ``volume``."""
        return self.by_batch_size(volume, batch_size)[batch_size]

    def by_batch_size(self, volume: int, up_to: int) -> list[float]:
        """Seconds at this volume by the number of rows, from 0 to ``up_to`` at least; the list is shared: read only."""
        row = self._rows.get(volume)
        if row is None or len(row) <= up_to:
            if len(self._rows) >= _MAX_CACHED:
                self._rows.clear()
            row = self._rows[volume] = self._interpolated(volume, max(up_to, self._batch_sizes[-1]))
        return row

    def alike(self, volume: int, limit: int, budget_s: float) -> "_Alike":
        """How rows of one size are best cut into forwards."""
        key = (volume, limit, budget_s)
        found = self._alike.get(key)
        if found is None:
            if len(self._alike) >= _MAX_CACHED:
                self._alike.clear()
            costs = self.by_batch_size(volume, limit)[: _allowed(self, volume, limit, budget_s) + 1]
            found = self._alike[key] = _Alike(costs)
        return found

    def _interpolated(self, volume: int, up_to: int) -> list[float]:
        known = [0.0, *self._at(volume)]
        sizes = (0, *self._batch_sizes)
        row = [0.0]
        for (n, cost), (next_n, next_cost) in pairwise(zip(sizes, known, strict=True)):
            slope = (next_cost - cost) / (next_n - n)
            row += (cost + slope * i for i in range(1, next_n - n))
            row.append(next_cost)
        per_row = known[-1] / sizes[-1]
        row += (per_row * n for n in range(len(row), up_to + 1))
        return row

    def _at(self, volume: int) -> list[float]:
        """Seconds at each measured batch size."""
        volumes, seconds = self._volumes, self._seconds
        if volume <= volumes[0]:
            return seconds[0]
        if len(volumes) == 1:
            return [cost * volume / max(volumes[0], 1) for cost in seconds[0]]
        i = min(bisect_right(volumes, volume), len(volumes) - 1)
        share = (volume - volumes[i - 1]) / (volumes[i] - volumes[i - 1])
        at = [low + (high - low) * share for low, high in zip(seconds[i - 1], seconds[i], strict=True)]
        for j in range(1, len(at)):  # beyond the last volume a smaller batch may rise faster than a larger one
            at[j] = max(at[j], at[j - 1])
        return at


class _Alike:
    """Rows of one size: the cheapest cut of any number of them, found once for each number."""

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs
        self._best = [0.0]
        self._last = [0]

    def chunks(self, num_rows: int) -> list[int]:
        """Rows in each forward, the largest first: it answers most rows in its time."""
        for n in range(len(self._best), num_rows + 1):
            size, cost = _cheapest(self._best, self._costs, n)
            self._best.append(cost)
            self._last.append(size)
        chunks = []
        while num_rows:
            chunks.append(self._last[num_rows])
            num_rows -= chunks[-1]
        return sorted(chunks, reverse=True)


def groups(
    sizes: Sequence[Sizes],
    model: CostModel,
    *,
    max_batch_size: int,
    padding: bool,
    budget_s: float = math.inf,
) -> list[list[int]]:
    """Cuts the rows that wait into forwards so that the predicted seconds add up to the least.

    With one variable dim it is the least of all ways to cut them; with more, of those that keep the order by volume.
    Of more than ``WINDOW`` rows the oldest are planned first, and the next on their own.

    Args:
        sizes: of each row, the oldest first.
        padding: whether rows of different sizes may share a forward; each is then padded to the largest.
        budget_s: what a forward may take; a row on its own is always allowed.

    Returns:
        indices of the rows in each forward, in the order to run: the one with the oldest row first, so that no row
        waits for ever behind cheaper ones.
    """
    found: list[list[int]] = []
    for start in range(0, len(sizes), WINDOW):
        window = range(start, min(start + WINDOW, len(sizes)))
        classes: dict[Sizes, list[int]] = {}
        for i in window:
            classes.setdefault(sizes[i], []).append(i)
        if padding and len(classes) > 1:
            planned = _padded(sizes, classes, model, max_batch_size, budget_s)
        else:
            planned = []
            for size, rows in classes.items():
                at = 0
                for chunk in model.alike(math.prod(size), max_batch_size, budget_s).chunks(len(rows)):
                    planned.append(rows[at : at + chunk])
                    at += chunk
        found += sorted(planned)
    return found


def padding_share(sizes: Sequence[Sizes]) -> float:
    """Share of a forward's elements that are padding, for rows of these sizes."""
    padded = len(sizes) * math.prod(_largest(sizes))
    return 1 - sum(map(math.prod, sizes)) / padded if padded else 0.0


def _padded(
    sizes: Sequence[Sizes], classes: dict[Sizes, list[int]], model: CostModel, limit: int, budget_s: float
) -> list[list[int]]:
    """The cheapest cut of the rows in the order of their volume."""
    ascending = sorted(classes, key=lambda size: (math.prod(size), size))
    order = [i for size in ascending for i in classes[size]]
    nested = all(all(map(int.__le__, a, b)) for a, b in pairwise(ascending))
    best, last = [0.0], [0]
    for n in range(1, len(order) + 1):
        most = min(n, limit)
        if nested:  # as with one dim: the last row is the largest, so all forwards that end here have its volume
            volume = math.prod(sizes[order[n - 1]])
            most = _allowed(model, volume, most, budget_s)
            costs = model.by_batch_size(volume, limit)[: most + 1]
        else:
            costs = _growing([sizes[i] for i in reversed(order[n - most : n])], model, budget_s)
        size, cost = _cheapest(best, costs, n)
        best.append(cost)
        last.append(size)
    cut = []
    end = len(order)
    while end:
        cut.append(sorted(order[end - last[end] : end]))
        end -= last[end]
    return cut


def _growing(sizes: list[Sizes], model: CostModel, budget_s: float) -> list[float]:
    """Costs of the first row, of the first two, and so on, each padded to its largest; up to the budget."""
    costs = [0.0]
    largest = sizes[0]
    volume = math.prod(largest)
    for n, size in enumerate(sizes, 1):
        if size != largest:
            largest = tuple(map(max, largest, size))
            volume = math.prod(largest)
        cost = model.by_batch_size(volume, len(sizes))[n]
        if n > 1 and cost > budget_s:
            break
        costs.append(cost)
    return costs


def _cheapest(best: list[float], costs: list[float], n: int) -> tuple[int, float]:
    """Size of the last forward over n rows, and the seconds of all of them.

    Args:
        best: seconds of fewer rows, by their number.
        costs: of a last forward, by its size.
    """
    most = min(n, len(costs) - 1)
    totals = list(map(add, reversed(best[n - most : n]), costs[1:]))
    cost = min(totals)
    return totals.index(cost) + 1, cost  # of equals the smallest forward, which answers soonest


def _allowed(model: CostModel, volume: int, limit: int, budget_s: float) -> int:
    """Rows of this volume that a forward within the budget takes; 1 at least."""
    return max(1, bisect_right(model.by_batch_size(volume, limit), budget_s, 0, limit + 1) - 1)


def _largest(sizes: Iterable[Sizes]) -> Sizes:
    return tuple(map(max, zip(*sizes, strict=True)))


def _repaired(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """The table with no cell above one of a larger batch or volume.

    Other work on the machine only ever adds to a measurement, so the lower one of two that contradict each other is
    the better one.
    """
    table = [list(row) for row in seconds]
    for i in reversed(range(len(table))):
        for j in reversed(range(len(table[i]))):
            above = [table[i + 1][j]] if i + 1 < len(table) else []
            above += [table[i][j + 1]] if j + 1 < len(table[i]) else []
            table[i][j] = min([table[i][j], *above])
    return table
