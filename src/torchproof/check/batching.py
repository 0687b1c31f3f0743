"""May requests share a forward? May they be padded? Compares each row with itself alone and unpadded."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from torchproof.check.modes import relative_diff
from torchproof.target.rows import Batch, Row, Run, eager, pad_row, run_rows, sizes_of, volume
from torchproof.target.signature import UNKNOWN_DIM
from torchproof.target.usercode import first_line
from torchproof.types import BatchSeen, PaddingSeen, Signature

BATCH_SIZE = 8
# What rounding may explain, relative to the largest output. In float64 it explains 1e-13; the rest of the room is for
# models that compute a part in float32 whatever they are given. In float32, batched kernels add up in another order.
THRESHOLDS = {"float64": 1e-6, "float32": 1e-3}
# Added to a dim that has one size in all samples, to have something to pad to.
PAD_BY = 8


class Probe:
    """The model in eval mode, in float64 where it runs in it, so that rounding can't be taken for an effect."""

    def __init__(self, module: nn.Module, row: Row, signature: Signature) -> None:
        self.signature = signature
        self.precision = "float64"
        try:
            self.run: Run = eager(copy.deepcopy(module).double(), signature, torch.float64)
            run_rows(self.run, [row], signature)
        except Exception:  # noqa: BLE001  whatever it raises in float64, it is probed as it is
            self.precision = "float32"
            self.run = eager(module, signature)
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


def _equal_sizes(rows: Sequence[Row], signature: Signature) -> list[Row]:
    """The largest group of samples of one size, filled up with altered copies so that the neighbours differ."""
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(sizes_of(row, signature.inputs).values()), []).append(row)
    group = max(groups.values(), key=len)[:BATCH_SIZE]
    if len(group) < 2:
        group = [*group, _altered(group[0])]
    return group


def _altered(row: Row) -> Batch:
    """Another valid row of the same size: contents in reverse, numbers scaled."""
    return {
        name: (t.flip(tuple(range(t.dim()))) if t.dim() else t) * (1.5 if t.is_floating_point() else 1)
        for name, t in row.items()
    }


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
        # The padded row leads, so that the row behind it is stretched by the same code that serves.
        stretched = pad_row(row, signature.inputs, padded)
        (long,) = run_rows(probe.run, [stretched], signature)
    except Exception as exc:  # noqa: BLE001  a model may raise anything on a padded row
        return ("", 0.0), first_line(exc)
    sizes = sizes_of(row, signature.inputs)
    cut = {}
    for spec in signature.outputs:
        tensor = long[spec.name]
        for position, name in enumerate(spec.shape):
            if isinstance(name, str):
                tensor = tensor.narrow(position, 0, sizes[name])
        cut[spec.name] = tensor
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
