"""Rows (one request's tensors) and batches of them: stacking, padding, splitting.

Shape legend: B requests in a batch; a row has no batch dim.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchproof.errors import TargetError
from torchproof.types import InputSpec, OutputSpec, Signature

Row = dict[str, Tensor]  # by the names in the signature; no batch dim
Batch = dict[str, Tensor]  # the same, with the batch dim first
Sizes = dict[str, int]  # by the name of the variable dim
Run = Callable[[Batch], Batch]  # a model, however it is executed


def dtype_name(dtype: torch.dtype) -> str:
    """``int64``: as torch prints it, without the prefix."""
    return str(dtype).removeprefix("torch.")


def named_tensors(value: Any, names: Sequence[str], *, what: str) -> Row:
    """What ``encode`` returned, by name.

    Args:
        names: the parameters of ``forward``, for tensors that come without a name.
        what: says in an error where the value came from.

    Raises:
        TargetError: not a tensor, a tuple or a dict of tensors.
    """
    if isinstance(value, Tensor):
        value = (value,)
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
    elif isinstance(value, (tuple, list)):
        known = [*names, *(f"input{i}" for i in range(len(names), len(value)))]
        named = dict(zip(known, value, strict=False))
    else:
        raise TargetError(
            f"{what} returned a {type(value).__name__}", help="return a tensor, a tuple or a dict of tensors"
        )
    if not named:
        raise TargetError(f"{what} returned no tensor", help="return a tensor, a tuple or a dict of tensors")
    for name, item in named.items():
        if not isinstance(item, Tensor):
            raise TargetError(
                f"{what} returned a {type(item).__name__} for {name!r}",
                help="every input is a torch.Tensor without a batch dim; write torch.tensor(number) for a number",
            )
    return named


def sizes_of(row: Row, inputs: Sequence[InputSpec]) -> Sizes:
    """The size of each variable dim in this row."""
    return {
        dim: row[spec.name].shape[position]
        for spec in inputs
        for position, dim in enumerate(spec.shape)
        if isinstance(dim, str)
    }


def volume(sizes: Sizes) -> int:
    """One number to sort requests by: the product of the variable sizes."""
    return math.prod(sizes.values())


def pad_row(row: Row, inputs: Sequence[InputSpec], to: Sizes) -> Row:
    """Fills every variable dim up to the size in ``to``, at its end, with the input's pad value.

    The copy is made in the caller's grad mode: a tensor padded under inference_mode carries other dispatch keys and
    makes a compiled model recompile.
    """
    padded = {}
    for spec in inputs:
        tensor = row[spec.name]
        target = [to[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        if list(tensor.shape) != target:
            widths = [n for have, want in zip(tensor.shape, target, strict=True) for n in (want - have, 0)]
            tensor = nn.functional.pad(tensor, widths[::-1], value=spec.pad_value)
        padded[spec.name] = tensor
    return padded


def stack(rows: Sequence[Row], signature: Signature) -> Batch:
    """Rows to a batch; rows of different sizes are padded to the largest.

    Returns:
        copies in the signature's order, each input with the batch dim first, (B, ...); for a signature that isn't
        batched the one row.
    """
    if not signature.batched:
        (row,) = rows
        return {spec.name: row[spec.name].clone() for spec in signature.inputs}
    if len(rows) > 1:
        sizes = [sizes_of(row, signature.inputs) for row in rows]
        largest = {dim: max(s[dim] for s in sizes) for dim in sizes[0]}
        if any(s != largest for s in sizes):
            rows = [pad_row(row, signature.inputs, largest) for row in rows]
    return {spec.name: torch.stack([row[spec.name] for row in rows]) for spec in signature.inputs}


def unstack(outputs: Batch, rows: Sequence[Row], signature: Signature) -> list[Row]:
    """A batch's outputs, one row for each request, cut back to the request's own size."""
    if not signature.batched:
        return [dict(outputs)]
    result = []
    for i, row in enumerate(rows):
        sizes = sizes_of(row, signature.inputs)
        result.append({spec.name: _cut(outputs[spec.name][i], spec, sizes) for spec in signature.outputs})
    return result


def _cut(output: Tensor, spec: OutputSpec, sizes: Sizes) -> Tensor:
    for position, dim in enumerate(spec.shape):
        if isinstance(dim, str) and dim in sizes and output.shape[position] > sizes[dim]:
            output = output.narrow(position, 0, sizes[dim])
    return output


def restore(row: Row, kind: Literal["tensor", "tuple", "dict"]) -> Any:
    """One row of the outputs in the form that the model returns: what ``decode`` gets."""
    if kind == "tensor":
        return next(iter(row.values()))
    return tuple(row.values()) if kind == "tuple" else row


def flatten_outputs(value: Any) -> tuple[Literal["tensor", "tuple", "dict"], dict[str, Tensor]]:
    """What a model returned, by name, and its kind. Fields that are None are left out.

    Raises:
        TargetError: nested, or not tensors; names the output.
    """
    if isinstance(value, Tensor):
        return "tensor", {"output": value}
    kind: Literal["tuple", "dict"] = "dict"
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, (tuple, list)):
        kind, items = "tuple", ((f"output{i}", item) for i, item in enumerate(value))
    else:
        raise _unsupported("the model", value)
    outputs = {}
    for name, item in items:
        if item is None:
            continue
        if not isinstance(item, Tensor):
            raise _unsupported(f"output {name!r}", item)
        outputs[str(name)] = item
    if not outputs:
        raise TargetError("the model returned no tensor", help="return at least one")
    return kind, outputs


def _unsupported(where: str, value: Any) -> TargetError:
    nested = isinstance(value, (tuple, list, Mapping)) or dataclasses.is_dataclass(value)
    what = f"a nested {type(value).__name__}" if nested else f"a {type(value).__name__}"
    return TargetError(
        f"{where} is {what}" if where != "the model" else f"the model returned {what}",
        help="supported are a tensor, or a tuple, dict or dataclass of tensors: wrap the model in a module that "
        "returns one of these",
    )


class FlatModule(nn.Module):
    """The user's module with tensors in (in the signature's order) and a tuple of tensors out: what exporters take."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.module = module
        self.input_names = tuple(spec.name for spec in signature.inputs)
        self.output_names = tuple(spec.name for spec in signature.outputs)
        self.keyword = signature.call == "keyword"

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of the signature's inputs -> tensors in the order of its outputs."""
        if self.keyword:
            value = self.module(**dict(zip(self.input_names, tensors, strict=True)))
        else:
            value = self.module(*tensors)
        _, outputs = flatten_outputs(value)
        return tuple(outputs[name] for name in self.output_names)


def eager(module: nn.Module, signature: Signature, dtype: torch.dtype | None = None) -> Run:
    """A batch through the module itself, under inference mode.

    Args:
        dtype: what floating-point inputs are cast to; None leaves them.
    """
    flat = FlatModule(module, signature).eval()

    def run(batch: Batch) -> Batch:
        tensors = [t.to(dtype) if dtype and t.is_floating_point() else t for t in batch.values()]
        with torch.inference_mode():
            return dict(zip(flat.output_names, flat(*tensors), strict=True))

    return run


def in_float64(module: nn.Module, signature: Signature, row: Row) -> Run | None:
    """A copy of the module in float64; None where it does not run in it.

    Some run without an error and compute in float32 all the same (an ONNX file over token ids, TorchScript with frozen
    weights): their outputs tell.

    Args:
        row: to try it on.
    """
    try:
        run = eager(copy.deepcopy(module).double(), signature, torch.float64)
        (outputs,) = run_rows(run, [row], signature)
    except Exception:  # noqa: BLE001  it may raise anything
        return None
    exact = all(tensor.dtype == torch.float64 for tensor in outputs.values() if tensor.is_floating_point())
    return run if exact else None


def run_rows(run: Run, rows: Sequence[Row], signature: Signature) -> list[Row]:
    """Rows through a runtime as one batch, split again."""
    return unstack(run(stack(rows, signature)), rows, signature)


def batches(rows: Sequence[Row], signature: Signature, max_batch_size: int, *, padding: bool) -> list[list[int]]:
    """Indices of rows that may share a forward: neighbours by size, of one size unless padding is proven safe."""
    sizes = [sizes_of(row, signature.inputs) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (volume(sizes[i]), *sizes[i].values()))
    groups: list[list[int]] = []
    for i in order:
        fits = groups and len(groups[-1]) < max_batch_size and (padding or sizes[groups[-1][0]] == sizes[i])
        if fits:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
