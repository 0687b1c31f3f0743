"""The golden set: inputs with the outputs that every candidate is held to.

Shape legend: N rows of the golden set.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchproof.target.rows import Row, eager, in_float64, run_rows, sizes_of, volume
from torchproof.types import GoldenError, Signature, Tolerance

NUM_ROWS = 32  # spread over the sizes; enough to see an outlier layer, few enough to replay at every start
# Below this share of the output's typical length a row has no direction to speak of.
TINY = 1e-6


def spread(rows: Sequence[Row], signature: Signature, num_rows: int = NUM_ROWS) -> list[int]:
    """Indices of rows evenly spaced over the sizes, the smallest and the largest among them, ascending by size."""
    order = sorted(range(len(rows)), key=lambda i: volume(sizes_of(rows[i], signature.inputs)))
    if len(order) <= num_rows:
        return order
    return [order[round(i * (len(order) - 1) / (num_rows - 1))] for i in range(num_rows)]


def reference(
    module: nn.Module, rows: Sequence[Row], signature: Signature
) -> tuple[list[Row], Literal["float64", "float32"]]:
    """The eager model's outputs, row by row: in float64 where the model runs in it, else as it is.

    A model that computes a part in float32 whatever it is given only makes the reference a little less exact.
    """
    run = in_float64(module, signature, rows[0])
    if run is None:
        return [run_rows(eager(module, signature), [row], signature)[0] for row in rows], "float32"
    return [run_rows(run, [row], signature)[0] for row in rows], "float64"


def save(path: Path, inputs: Sequence[Row], outputs: Sequence[Row]) -> None:
    """Writes ``golden.safetensors``: ``in.<row>.<name>`` and ``out.<row>.<name>``."""
    tensors = {
        f"{side}.{i}.{name}": tensor.contiguous().clone()
        for side, rows in (("in", inputs), ("out", outputs))
        for i, row in enumerate(rows)
        for name, tensor in row.items()
    }
    save_file(tensors, path)


def load(path: Path) -> tuple[list[Row], list[Row]]:
    """Inputs and reference outputs, row by row."""
    rows: dict[str, list[Row]] = {"in": [], "out": []}
    stored = load_file(path)
    for key in sorted(stored, key=lambda k: int(k.split(".", 2)[1])):
        side, number, name = key.split(".", 2)
        while len(rows[side]) <= int(number):
            rows[side].append({})
        rows[side][int(number)][name] = stored[key]
    return rows["in"], rows["out"]


def compare(outputs: Sequence[Row], references: Sequence[Row], names: Sequence[str]) -> GoldenError:
    """How far outputs are from the references: the worst row and output.

    ``cos`` is the cosine between a row and its reference, both flattened. A cosine can't see a wrong length, so it is
    lowered to what an equal relative error in direction would give: a length off by the share d counts as at most
    1 - d*d/2. Rows of one number, and rows much shorter than is typical for the output, are judged by their
    difference alone in the same way. For integers and booleans it is the share of equal elements.
    """
    errors = []
    for name in names:
        if any(o[name].shape != r[name].shape for o, r in zip(outputs, references, strict=True)):
            return GoldenError(output=name, cos=None, max_abs=None, max_rel=None)
        pairs = [
            (o[name].detach().double().flatten(), r[name].double().flatten())
            for o, r in zip(outputs, references, strict=True)
        ]
        exact = not references[0][name].is_floating_point()
        lengths = torch.stack([b.norm() for _, b in pairs])
        typical = float(lengths[lengths.isfinite()].median()) if bool(lengths.isfinite().any()) else 0.0
        errors += [_row_error(name, a, b, typical, exact=exact) for a, b in pairs]
    return worst(errors)


def _row_error(name: str, out: Tensor, ref: Tensor, typical: float, *, exact: bool) -> GoldenError:
    if out.numel() == 0:
        return GoldenError(output=name, cos=1.0, max_abs=0.0, max_rel=0.0)
    same = (out == ref) | (out.isnan() & ref.isnan())  # equal infinities, and NaN where the reference has NaN
    out, ref = torch.where(same, 0.0, out), torch.where(same & ~ref.isfinite(), 0.0, ref)
    out = torch.where(same, ref, out)
    if not bool(out.isfinite().all()) or not bool(ref.isfinite().all()):
        return GoldenError(output=name, cos=None, max_abs=None, max_rel=None)
    diff = (out - ref).abs()
    max_abs = float(diff.max())
    scale = max(float(ref.abs().max()), TINY * typical)
    max_rel = max_abs / scale if scale > 0 else (0.0 if max_abs == 0 else math.inf)
    cos = float((out == ref).double().mean()) if exact else _cos(out, ref, typical)
    return GoldenError(output=name, cos=cos, max_abs=max_abs, max_rel=max_rel if math.isfinite(max_rel) else None)


def _cos(out: Tensor, ref: Tensor, typical: float) -> float:
    length_out, length_ref = float(out.norm()), float(ref.norm())
    if out.numel() == 1 or length_ref <= TINY * typical or length_out == 0 or length_ref == 0:
        scale = max(length_ref, typical)
        relative = float((out - ref).norm()) / scale if scale > 0 else (0.0 if length_out == 0 else math.inf)
        return max(-1.0, 1 - relative**2 / 2)
    direction = float(torch.dot(out, ref)) / (length_out * length_ref)
    return max(-1.0, min(direction, 1 - (length_out / length_ref - 1) ** 2 / 2, 1.0))


def worst(errors: Sequence[GoldenError]) -> GoldenError:
    """The largest error in each metric, under the name of the output with the lowest cosine."""
    lowest = min(errors, key=lambda e: -math.inf if e.cos is None else e.cos)
    largest = [
        None if any(v is None for v in values) else max(v for v in values if v is not None)
        for values in ([e.max_abs for e in errors], [e.max_rel for e in errors])
    ]
    return GoldenError(output=lowest.output, cos=lowest.cos, max_abs=largest[0], max_rel=largest[1])


def value_of(error: GoldenError, tolerance: Tolerance) -> float:
    """The error in the tolerance's metric; NaN when an output is not finite."""
    value = getattr(error, tolerance.metric)
    return math.nan if value is None else float(value)


def within(error: GoldenError, tolerance: Tolerance) -> bool:
    """Whether an error is inside the tolerance; never when an output is not finite."""
    value = value_of(error, tolerance)
    return value >= tolerance.bound if tolerance.metric == "cos" else value <= tolerance.bound
