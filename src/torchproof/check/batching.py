"""May requests share a forward? May they be padded? Compares each row with itself alone and unpadded."""

from collections.abc import Sequence

from torch import Tensor, nn

from torchproof.check.modes import precision_of, relative_diff, same
from torchproof.target.rows import Row, Run, eager, in_float64, pad_row, run_rows, sizes_of, stack, unstack, volume
from torchproof.target.signature import UNKNOWN_DIM
from torchproof.target.usercode import first_line
from torchproof.types import BatchSeen, PaddingSeen, Signature

BATCH_SIZE = 8
# What rounding may explain, relative to the largest output. In float64 it explains 1e-13; the rest of the room is for
# models that compute a part in float32 whatever they are given. In the others, batched kernels add up in another order.
THRESHOLDS = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
# Added to a dim that has one size in all samples, to have something to pad to.
PAD_BY = 8


class Probe:
    """The model in eval mode, in float64 where it runs in it, so that rounding can't be taken for an effect."""

    def __init__(self, module: nn.Module, row: Row, signature: Signature) -> None:
        self.signature = signature
        double = in_float64(module, signature, row)
        self.precision = "float64" if double else precision_of(module)
        self.run: Run = double or eager(module, signature)
        self.threshold = THRESHOLDS[self.precision]


def see_batch(probe: Probe, rows: Sequence[Row], target: str) -> BatchSeen:
    """Rows alone and among rows of their own size; no padding is involved."""
    batch = _equal_sizes(rows, probe.signature)
    output, diff, error = "", 0.0, ""
    try:
        together = run_rows(probe.run, batch, probe.signature)
        for row, among in zip(batch, together, strict=True):
            (alone,) = run_rows(probe.run, [row], probe.signature)
            output, diff = max((output, diff), relative_diff(alone, among), key=lambda pair: pair[1])
    except Exception as exc:  # noqa: BLE001  a model that takes one row only may raise anything
        error = first_line(exc)
    return BatchSeen(
        target=target,
        row_diff=diff,
        output=output,
        batch_size=len(batch),
        threshold=probe.threshold,
        precision=probe.precision,
        error=error,
    )


def holds(seen: BatchSeen | PaddingSeen) -> bool:
    """Whether the rows gave the same answers either way."""
    diff = seen.row_diff if isinstance(seen, BatchSeen) else seen.pad_diff
    return not seen.error and diff <= seen.threshold


def _equal_sizes(rows: Sequence[Row], signature: Signature) -> list[Row]:
    """The largest group of samples of one size; if all are equal, which would hide effects, one and a changed copy."""
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(sizes_of(row, signature.inputs).values()), []).append(row)
    group = max(groups.values(), key=len)[:BATCH_SIZE]
    if all(same(row[name], tensor) for row in group for name, tensor in group[0].items()):
        return [group[0], {name: _altered(tensor) for name, tensor in group[0].items()}]
    return group


def _altered(tensor: Tensor) -> Tensor:
    """Other valid content of the same size: in reverse, numbers scaled and moved."""
    reverse = tensor.flip(tuple(range(tensor.dim()))) if tensor.dim() else tensor
    return reverse * 1.5 + 0.5 if reverse.is_floating_point() else reverse


def see_padding(probe: Probe, rows: Sequence[Row], target: str) -> list[PaddingSeen]:
    """For each variable dim, small rows unpadded and padded to the largest size in the samples."""
    signature = probe.signature
    ascending = sorted(rows, key=lambda row: volume(sizes_of(row, signature.inputs)))
    tried = [ascending[0], ascending[len(ascending) // 2]]
    seen = []
    for dim in sizes_of(rows[0], signature.inputs):
        largest = max(sizes_of(row, signature.inputs)[dim] for row in rows)
        if any(UNKNOWN_DIM in spec.shape for spec in signature.outputs):
            seen.append(_padding(probe, target, dim, 0, 0, ("", 0.0), "an output's size follows no input's size"))
            continue
        results = []
        for row in tried:
            sizes = sizes_of(row, signature.inputs)
            padded = sizes | {dim: largest if largest > sizes[dim] else largest + PAD_BY}
            worst, error = _pad_one(probe, row, padded)
            results.append(_padding(probe, target, dim, sizes[dim], padded[dim], worst, error))
        seen.append(max(results, key=lambda s: (bool(s.error), s.pad_diff)))
    return seen


def _pad_one(probe: Probe, row: Row, padded: dict[str, int]) -> tuple[tuple[str, float], str]:
    signature = probe.signature
    try:
        (alone,) = run_rows(probe.run, [row], signature)
        stretched = stack([pad_row(row, signature.inputs, padded)], signature)
        (cut,) = unstack(probe.run(stretched), [row], signature)
    except Exception as exc:  # noqa: BLE001  a model may raise anything on a padded row
        return ("", 0.0), first_line(exc)
    return relative_diff(alone, cut), ""


def _padding(
    probe: Probe, target: str, dim: str, size: int, padded: int, worst: tuple[str, float], error: str
) -> PaddingSeen:
    return PaddingSeen(
        target=target,
        pad_diff=worst[1],
        output=worst[0],
        dim=dim,
        size=size,
        padded_size=padded,
        threshold=probe.threshold,
        precision=probe.precision,
        error=error,
    )
