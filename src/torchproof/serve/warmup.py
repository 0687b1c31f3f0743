"""Runs the model before anybody waits for it: what its forwards cost, and how large a request it takes.

Rows are stacked as the server stacks them, in the ordinary grad mode: a tensor that was padded under inference_mode
makes a compiled model recompile. Runs in a replica.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from torchproof.errors import UsageError, describe
from torchproof.machine.memory import available_memory
from torchproof.target.rows import Batch, Row, Run, Sizes, pad_row, sizes_of, stack, volume
from torchproof.types import Signature
from torchproof.types.serving import Costs

GROWTH = 2  # a cap that nobody named is so many times the largest sampled size, where the model takes it
REPEATS = 5  # of each forward where the budget lasts: the minimum of a few is steady beside a busy neighbor
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What the warm-up found.

    Attributes:
        costs: seconds of a forward, by volume and batch size. Batches that the budget didn't reach are put down at
            the cost per row of the largest one before them: no gain is believed that wasn't measured.
        max_sizes: for each variable dim, by its name, the largest size that may be served.
        num_rows_run: in all forwards.
        peak_bytes: what a forward of ``max_batch_size`` rows at the caps adds to the resident memory, by what one
            such row adds; None where the kernel doesn't tell.
    """

    costs: Costs
    max_sizes: Sizes
    num_rows_run: int
    peak_bytes: int | None


def warm_up(
    run: Run,
    signature: Signature,
    rows: Sequence[Row],
    *,
    max_batch_size: int,
    padding: bool,
    max_sizes: Mapping[str, int],
    budget_s: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> WarmUp:
    """Runs sampled rows, finds the caps of the variable dims, and measures the costs.

    The smallest and the largest sample and each step towards a cap run in any case. Other forwards run only where the
    time that is left is expected to suffice, the cheap ones first.

    Args:
        rows: sampled, one at least. What the model raises on them is not caught.
        padding: whether rows of different sizes may share a forward; then two such rows are run as well.
        max_sizes: caps that the user named. Any other dim's cap is twice the largest sampled size; or that size itself
            where twice as much raises, gives outputs that aren't finite, doesn't fit into the memory that is
            available at ``max_batch_size`` rows, or is expected to take longer than the budget.
        budget_s: for the costs. The caps are found before: a cap that the user named takes the time it takes, and
            leaves the same for the costs.

    Raises:
        UsageError: a cap that the user named is of no variable dim, lets no sample through, or is not answered.
    """
    samples = _served(rows, signature, max_sizes)
    batch_sizes = _batch_sizes(max_batch_size if signature.batched else 1)
    forwards = _Forwards(run, signature, clock)
    forwards.run([samples[0]])  # what only the first forward allocates is no growth with size
    probe = _Probe(forwards, samples[-1])
    caps, top = _find_caps(probe, samples, max_sizes, batch_sizes[-1], budget_s)
    table = _Table(forwards, _by_volume(samples, top, forwards), batch_sizes)
    table.measure(clock() + budget_s, probe.bytes_per_row)
    if padding and batch_sizes[-1] > 1:
        forwards.run([samples[0], samples[-1]])
    peak = None if probe.bytes_per_row is None else probe.bytes_per_row * batch_sizes[-1]
    return WarmUp(table.costs(), caps, forwards.num_rows, peak)


class _Forwards:
    """Runs rows as the server does, and keeps count.

    Attributes:
        alone_s: the fewest seconds that one row of a volume took, by volume.
    """

    def __init__(self, run: Run, signature: Signature, clock: Callable[[], float]) -> None:
        self._run = run
        self.signature = signature
        self.clock = clock
        self.num_rows = 0
        self.alone_s: dict[int, float] = {}

    def run(self, rows: Sequence[Row]) -> tuple[Batch, float]:
        """The outputs, and the seconds with the stacking."""
        self.num_rows += len(rows)
        start = self.clock()
        outputs = self._run(stack(rows, self.signature))
        seconds = self.clock() - start
        if len(rows) == 1:
            v = self.volume(rows[0])
            self.alone_s[v] = min(seconds, self.alone_s.get(v, seconds))
        return outputs, seconds

    def volume(self, row: Row) -> int:
        return volume(sizes_of(row, self.signature.inputs))


class _Probe:
    """Tries rows that are larger than the samples, one at a time, ascending by size.

    Attributes:
        bytes_per_row: what the largest row that worked added to the resident memory; None: unknown.
    """

    def __init__(self, forwards: _Forwards, largest: Row) -> None:
        self.forwards = forwards
        self._largest = largest
        self._volume = forwards.volume(largest)
        self._memory = _Memory()
        outputs, _ = forwards.run([largest])
        self.bytes_per_row = self._memory.growth()
        self._finite = {name for name, tensor in outputs.items() if _all_finite(tensor)}
        _, seconds = forwards.run([largest])  # the first one may have compiled
        self._s_per_volume = seconds / max(self._volume, 1)

    def expected_s(self, row: Row) -> float:
        """Seconds of a larger row, in proportion to those of the largest sample."""
        return self._s_per_volume * self.forwards.volume(row)

    def grown(self, to: Sizes) -> Row:
        """The largest sample with its content repeated up to these sizes.

        Padding would be cheaper than a real request: models skip what is masked (``nn.TransformerEncoder`` does).
        """
        inputs = self.forwards.signature.inputs
        if not self._volume:
            return pad_row(self._largest, inputs, to)
        row = {}
        for spec in inputs:
            tensor = self._largest[spec.name]
            for position, dim in enumerate(spec.shape):
                if isinstance(dim, str) and tensor.shape[position] != to[dim]:
                    index = torch.arange(to[dim], device=tensor.device) % tensor.shape[position]
                    tensor = tensor.index_select(position, index)
            row[spec.name] = tensor
        return row

    def refusal(self, row: Row, num_rows: int) -> str:
        """Why a row can't be served, with memory for so many of them; empty where it can."""
        v = self.forwards.volume(row)
        if self.bytes_per_row is not None:
            # Attention's memory grows with the square. Not tried where that wouldn't fit: the kernel would end the
            # process and not the forward.
            worst = int(self.bytes_per_row * (v / max(self._volume, 1)) ** 2)
            if reason := _too_much(worst, 1):
                return reason
        self._memory.reset()
        try:
            outputs, _ = self.forwards.run([row])
        except Exception as exc:  # noqa: BLE001  a model may raise anything
            return describe(exc)["message"]
        for name in sorted(self._finite):
            if not _all_finite(outputs[name]):
                return f"its output {name!r} is not finite"
        growth = self._memory.growth()
        if growth is not None and (reason := _too_much(growth, num_rows)):
            return reason
        self.bytes_per_row, self._volume = growth, v
        return ""


class _Memory:
    """How far the resident memory rises above what it is now."""

    def __init__(self) -> None:
        self.reset()
        self._base = _peak_bytes() if self._works else None

    def reset(self) -> None:
        """Forgets the peak so far."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets VmHWM to the present resident size
            self._works = True
        except OSError:
            self._works = False

    def growth(self) -> int | None:
        """Bytes from the start to the peak since the last reset; None where it can't be read."""
        peak = _peak_bytes() if self._works else None
        return None if peak is None or self._base is None else max(0, peak - self._base)


class _Table:
    """Seconds of forwards, by volume and batch size."""

    def __init__(self, forwards: _Forwards, rows: Mapping[int, Row], batch_sizes: Sequence[int]) -> None:
        self._forwards = forwards
        self._rows = rows
        self._batch_sizes = batch_sizes
        self._seconds: dict[int, dict[int, float]] = {
            v: {1: forwards.alone_s[v]} if v in forwards.alone_s else {} for v in rows
        }

    def measure(self, deadline: float, bytes_per_row: int | None) -> None:
        """Runs every cell that is expected to end before the deadline, twice if it can be; then all of them again."""
        cells = sorted(((v, n) for v in self._rows for n in self._batch_sizes), key=lambda cell: cell[0] * cell[1])
        for v, n in cells:
            expected = self._expected(v, n)
            fits = bytes_per_row is None or n == 1 or not _too_much(bytes_per_row * v // max(cells[-1][0], 1), n)
            if expected is not None and fits and self._run(v, n, expected, deadline):
                self._run(v, n, self._seconds[v][n], deadline)
        for _ in range(REPEATS - 2):
            for v, n in cells:
                if n in self._seconds[v]:
                    self._run(v, n, self._seconds[v][n], deadline)

    def costs(self) -> Costs:
        """The table, with what was not run at the cost per row of the largest batch that was."""
        volumes = [v for v in self._rows if self._seconds[v]]
        return Costs(
            volumes=tuple(volumes),
            batch_sizes=tuple(self._batch_sizes),
            seconds=tuple(
                tuple(self._seconds[v].get(n, _in_proportion(self._seconds[v], n)) for n in self._batch_sizes)
                for v in volumes
            ),
        )

    def _expected(self, v: int, n: int) -> float | None:
        """Seconds that a cell may take by what is known; None: unknown, as a smaller batch was not run."""
        if n == 1:
            return min(seconds[1] for other, seconds in self._seconds.items() if other >= v and seconds)
        smaller = self._batch_sizes[self._batch_sizes.index(n) - 1]
        return _in_proportion(self._seconds[v], n) if smaller in self._seconds[v] else None

    def _run(self, v: int, n: int, expected: float, deadline: float) -> bool:
        """Whether there was time to run it."""
        if self._forwards.clock() + expected > deadline:
            return False
        _, seconds = self._forwards.run([self._rows[v]] * n)
        self._seconds[v][n] = min(seconds, self._seconds[v].get(n, seconds))
        return True


def _find_caps(
    probe: _Probe, samples: Sequence[Row], asked: Mapping[str, int], max_batch_size: int, budget_s: float
) -> tuple[Sizes, Row]:
    """The caps, and the largest row that worked. Dims grow by twice at most from one try to the next."""
    sizes = [sizes_of(row, probe.forwards.signature.inputs) for row in samples]
    largest = {dim: max(each[dim] for each in sizes) for dim in sizes[0]}
    caps, top = dict(largest), samples[-1]
    for dim in sorted(caps, key=lambda dim: dim not in asked):
        target = asked.get(dim, GROWTH * largest[dim])
        for size in _steps(largest[dim], target):
            row = probe.grown(caps | {dim: size})
            if dim not in asked and probe.expected_s(row) > budget_s:
                break
            # Who names a cap means a single request: so large ones share no forward where that takes long.
            reason = probe.refusal(row, 1 if dim in asked else max_batch_size)
            if not reason:
                caps[dim], top = size, row
            elif dim in asked:
                at = "" if size == target else f"at {dim}={size} "
                worked = "" if caps[dim] == largest[dim] else f", and {caps[dim]} worked"
                raise UsageError(
                    f"the model takes no {dim}={target}: {at}{reason}",
                    help=f"the largest sampled size is {largest[dim]}{worked}: pass --max-size {dim}={caps[dim]}",
                )
            else:
                break
    return caps, top


def _served(rows: Sequence[Row], signature: Signature, asked: Mapping[str, int]) -> list[Row]:
    """The rows that the user's caps let through, ascending by volume."""
    sizes = [sizes_of(row, signature.inputs) for row in rows]
    for dim, cap in asked.items():
        if dim not in sizes[0]:
            known = ", ".join(sizes[0])
            raise UsageError(
                f"--max-size {dim}={cap}: the model has no variable dim {dim!r}",
                help=f"it has {known}" if known else "every request has the same shape: leave --max-size out",
            )
        smallest, largest = min(each[dim] for each in sizes), max(each[dim] for each in sizes)
        if cap < smallest:
            raise UsageError(
                f"--max-size {dim}={cap} lets no sample through: the smallest has {dim}={smallest}",
                help=f"the largest has {largest}: pass --max-size {dim}={largest}",
            )
    served = [i for i, each in enumerate(sizes) if all(each[dim] <= cap for dim, cap in asked.items())]
    if not served:
        raise UsageError(
            "no sample is within all of " + " ".join(f"--max-size {dim}={cap}" for dim, cap in asked.items()),
            help="raise one of them",
        )
    return [rows[i] for i in sorted(served, key=lambda i: volume(sizes[i]))]


def _by_volume(samples: Sequence[Row], top: Row, forwards: _Forwards) -> dict[int, Row]:
    """The rows to measure, by their volume, ascending: five at most, more of them where requests are large."""
    last = len(samples) - 1
    chosen = [samples[0], samples[last // 2], samples[last * 3 // 4], samples[last], top]
    return dict(sorted({forwards.volume(row): row for row in chosen}.items()))


def _batch_sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, and the largest."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def _steps(start: int, end: int) -> Iterator[int]:
    size = start
    while size < end:
        size = min(max(2 * size, 1), end)
        yield size


def _in_proportion(seconds: Mapping[int, float], n: int) -> float:
    """Seconds of n rows, by the largest batch of the known ones."""
    largest = max(seconds)
    return seconds[largest] * n / largest


def _all_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _too_much(row_bytes: int, num_rows: int) -> str:
    """Says that so many rows don't fit into memory; empty where they do."""
    need, available = row_bytes * num_rows, available_memory()
    if need <= available:
        return ""
    rows = "a forward needs" if num_rows == 1 else f"{num_rows} rows need"
    return f"{rows} about {need / GIB:.1f} GiB, {available / GIB:.1f} GiB are available"


def _peak_bytes() -> int | None:
    """The process's largest resident size since the last reset."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
