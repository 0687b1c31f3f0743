"""Finds out what flows through a model, from the samples and one or two forwards."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from torchproof.errors import TargetError, UserCodeError
from torchproof.target.rows import Row, Sizes, dtype_name, flatten_outputs, pad_row, sizes_of, volume
from torchproof.target.service import Service
from torchproof.target.usercode import user_code
from torchproof.types import InputSpec, OutputSpec, Signature

UNKNOWN_DIM = "*"  # an output dim that varies in a way that no input dim explains
# Added to the variable dims, a different one to each, to see which output dims follow which; odd, so that strides of 2
# show.
PROBE_STEPS = range(3, 99, 2)


def parameter_names(module: nn.Module) -> list[str]:
    """The names of ``forward``'s positional parameters; empty where they can't be read."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def takes_keywords(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether ``forward`` can be called with these names."""
    known = parameter_names(module)
    if any(re.fullmatch(r"input\d+", name) and name not in known for name in names):
        return False  # encode() gave the tensor no name, see ``named_tensors``
    try:
        inspect.signature(module.forward).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


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
        TargetError: see ``input_specs`` and ``flatten_outputs``; or outputs that no server can split into rows.
        UserCodeError: the model raised.
    """
    inputs = input_specs(rows, service)
    call: Literal["keyword", "positional"] = (
        "keyword" if takes_keywords(module, [spec.name for spec in inputs]) else "positional"
    )
    by_volume = sorted(rows, key=lambda row: volume(sizes_of(row, inputs)))
    probes = [by_volume[0], by_volume[-1]]
    seen = [_outputs_of(module, row, call, batched=batched) for row in probes]
    sizes = [sizes_of(row, inputs) for row in probes]
    for sign in (1, -1) if _confusable(sizes) else ():
        other = {dim: size + sign * step for (dim, size), step in zip(sizes[0].items(), PROBE_STEPS, strict=False)}
        if min(other.values()) < 1:
            continue
        try:
            seen.append(_outputs_of(module, pad_row(probes[0], inputs, other), call, batched=batched))
        except UserCodeError:
            continue  # a size that no sample has may be more than the model takes
        sizes.append(other)
        break
    kind, first = seen[0]
    for _, outputs in seen[1:]:
        if list(outputs) != list(first):
            raise TargetError(
                f"the model returned {', '.join(first)} for one input size and {', '.join(outputs)} for another",
                help="return the same outputs for every request",
            )
    return Signature(
        inputs=inputs,
        outputs=tuple(
            OutputSpec(
                name=name, dtype=dtype_name(tensor.dtype), shape=_output_shape(name, [o[name] for _, o in seen], sizes)
            )
            for name, tensor in first.items()
        ),
        call=call,
        output_kind=kind,
        batched=batched,
    )


def _outputs_of(
    module: nn.Module, row: Row, call: Literal["keyword", "positional"], *, batched: bool
) -> tuple[Literal["tensor", "tuple", "dict"], Row]:
    """One row's outputs, without the batch dim, and their kind."""
    # A copy, since a forward may change its input in place.
    batch = {name: tensor.unsqueeze(0).clone() if batched else tensor.clone() for name, tensor in row.items()}
    with user_code("running the model on a sample"), torch.inference_mode():
        value = module(**batch) if call == "keyword" else module(*batch.values())
    kind, outputs = flatten_outputs(value)
    for name, tensor in outputs.items():
        if tensor.is_complex():
            raise TargetError(f"output {name!r} is complex", help="return torch.view_as_real of it")
        if batched and (tensor.dim() == 0 or tensor.shape[0] != 1):
            raise TargetError(
                f"output {name!r} has shape {tuple(tensor.shape)} for a batch of 1: no batch dim in front",
                help="return outputs with the batch dim first, one row for each request",
            )
    return kind, {name: tensor[0] for name, tensor in outputs.items()} if batched else outputs


def _confusable(sizes: Sequence[Sizes]) -> bool:
    """Whether a variable dim has one size in all probes, or two have the same sizes."""
    columns = [tuple(s[dim] for s in sizes) for dim in sizes[0]]
    return len(set(columns)) < len(columns) or any(len(set(column)) == 1 for column in columns)


def _output_shape(name: str, outputs: Sequence[Tensor], sizes: Sequence[Sizes]) -> tuple[int | str, ...]:
    """Sizes that stay, and for those that vary the variable dim that they follow."""
    if len({tensor.dim() for tensor in outputs}) > 1:
        raise TargetError(
            f"output {name!r} has another number of dims for another input size", help="return a fixed number"
        )
    result: list[int | str] = []
    for position, size in enumerate(outputs[0].shape):
        seen = [tensor.shape[position] for tensor in outputs]
        if len(set(seen)) == 1:
            result.append(size)
            continue
        follows = [dim for dim in sizes[0] if [s[dim] for s in sizes] == seen]
        result.append(follows[0] if follows else UNKNOWN_DIM)
    return tuple(result)
