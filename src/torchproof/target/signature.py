"""Finds out what flows through a model, from the samples and one or two forwards."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torchproof.errors import TargetError
from torchproof.target.rows import Row, dtype_name, flatten_outputs, pad_row, sizes_of, volume
from torchproof.target.service import Service
from torchproof.target.usercode import user_code
from torchproof.types import InputSpec, OutputSpec, Signature

UNKNOWN_DIM = "*"  # an output dim that varies in a way that no input dim explains
PROBE_STEP = 3  # added to a variable dim to see which output dims follow it; odd, so that strides of 2 show


def parameter_names(module: nn.Module) -> list[str]:
    """The names of ``forward``'s positional parameters; empty where they can't be read."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def input_specs(rows: Sequence[Row], service: Service) -> tuple[InputSpec, ...]:
    """The inputs that all samples share.

    Raises:
        TargetError: samples that differ in names, dtype, rank, or in a dim that is not declared variable.
    """
    first = rows[0]
    declared = service.variable_dims
    _known(declared, first, "variable_dims")
    _known(service.pad_values, first, "pad_values")
    for name, dims in declared.items():
        for dim in dims:
            if not 0 <= dim < first[name].dim():
                raise TargetError(
                    f"variable_dims names dim {dim} of {name!r}, which has {first[name].dim()} without the batch dim",
                    help="count dims from 0, without the batch dim",
                )
    specs = tuple(
        InputSpec(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(declared.get(name, {}).get(i, size) for i, size in enumerate(tensor.shape)),
            pad_value=float(service.pad_values.get(name, 0)),
        )
        for name, tensor in first.items()
    )
    for number, row in enumerate(rows):
        _fits(row, specs, number)
    return specs


def _known(declared: Mapping[str, object], row: Row, attribute: str) -> None:
    for name in declared:
        if name not in row:
            raise TargetError(f"{attribute} names the input {name!r}", help=f"encode() returns: {', '.join(row)}")


def _fits(row: Row, specs: Sequence[InputSpec], number: int) -> None:
    names = [spec.name for spec in specs]
    if list(row) != names:
        raise TargetError(
            f"sample {number}: encode() returned {', '.join(row)}, for sample 0 {', '.join(names)}",
            help="return the same inputs, in the same order, for every request",
        )
    sizes: dict[str, int] = {}
    for spec in specs:
        tensor = row[spec.name]
        if dtype_name(tensor.dtype) != spec.dtype:
            raise TargetError(
                f"sample {number}: input {spec.name!r} is {dtype_name(tensor.dtype)}, in sample 0 {spec.dtype}",
                help="return one dtype for each input",
            )
        if tensor.dim() != len(spec.shape):
            raise TargetError(
                f"sample {number}: input {spec.name!r} has {tensor.dim()} dims, in sample 0 {len(spec.shape)}",
                help="return one number of dims for each input",
            )
        for position, (size, dim) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
            if isinstance(dim, str):
                if sizes.setdefault(dim, size) != size:
                    raise TargetError(
                        f"sample {number}: dim {position} of {spec.name!r} is {size}, but {dim!r} is {sizes[dim]} "
                        "in another input",
                        help="give dims that vary on their own their own names in variable_dims",
                    )
            elif size != dim:
                raise TargetError(
                    f"sample {number}: dim {position} of input {spec.name!r} is {size}, in sample 0 it is {dim}, "
                    "and it is not declared variable",
                    help=f'declare it: variable_dims = {{"{spec.name}": {{{position}: "length"}}}}',
                )


def read_signature(module: nn.Module, rows: Sequence[Row], service: Service, *, batched: bool = True) -> Signature:
    """Inputs from the samples, outputs from running the smallest and the largest of them, one at a time.

    Raises:
        TargetError: see ``input_specs`` and ``flatten_outputs``; or an output without the batch dim.
        UserCodeError: the model raised.
    """
    inputs = input_specs(rows, service)
    names = parameter_names(module)
    keyword = all(spec.name in names for spec in inputs)
    by_volume = sorted(rows, key=lambda row: volume(sizes_of(row, inputs)))
    probes = [by_volume[0], by_volume[-1]]
    if any(sizes_of(probes[0], inputs)[d] == s for d, s in sizes_of(probes[1], inputs).items()):
        grown = {d: s + PROBE_STEP for d, s in sizes_of(probes[0], inputs).items()}
        probes.append(pad_row(probes[0], inputs, grown))  # samples of one size: a padded one shows what varies
    shapes: list[dict[str, tuple[int, ...]]] = []
    for i, row in enumerate(probes):
        with user_code("running the model on a sample"), torch.inference_mode():
            batch = {n: t.unsqueeze(0) for n, t in row.items()} if batched else row
            value = module(**batch) if keyword else module(*batch.values())
        kind, outputs = flatten_outputs(value)
        if i == 0:
            dtypes = {name: dtype_name(tensor.dtype) for name, tensor in outputs.items()}
        if batched:
            for name, tensor in outputs.items():
                if tensor.dim() == 0 or tensor.shape[0] != 1:
                    raise TargetError(
                        f"output {name!r} has shape {tuple(tensor.shape)} for a batch of 1: no batch dim in front",
                        help="return outputs with the batch dim first, one row for each request",
                    )
        shapes.append({n: tuple(t.shape[1:]) if batched else tuple(t.shape) for n, t in outputs.items()})
    sizes = [sizes_of(row, inputs) for row in probes]
    return Signature(
        inputs=inputs,
        outputs=tuple(
            OutputSpec(name=n, dtype=dtypes[n], shape=_output_shape([s.get(n, ()) for s in shapes], sizes))
            for n in shapes[0]
        ),
        call="keyword" if keyword else "positional",
        output_kind=kind,
        batched=batched,
    )


def _output_shape(shapes: Sequence[tuple[int, ...]], sizes: Sequence[dict[str, int]]) -> tuple[int | str, ...]:
    """Sizes that stay, and for those that vary the variable dim that they follow."""
    if len({len(s) for s in shapes}) > 1:
        raise TargetError("an output has another number of dims for another input size", help="return a fixed number")
    result: list[int | str] = []
    for position, size in enumerate(shapes[0]):
        seen = [shape[position] for shape in shapes]
        if len(set(seen)) == 1:
            result.append(size)
            continue
        follows = [dim for dim in sizes[0] if [s[dim] for s in sizes] == seen]
        result.append(follows[0] if follows else UNKNOWN_DIM)
    return tuple(result)
