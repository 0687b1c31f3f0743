"""Bare modules: tensors in, tensors out, made to look like a Service."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchproof.errors import TargetError
from torchproof.target.rows import Row, named_tensors
from torchproof.target.service import Service
from torchproof.target.signature import parameter_names

Tensors = dict[str, Any]  # a request: each input as nested lists, without the batch dim


class ModuleService(Service):
    """Serves a module as it is: a request holds each input as nested lists, the response each output.

    Attributes:
        batched: False for a saved model with a fixed first dim, whose example is one request as a whole.
    """

    def __init__(self, module: nn.Module, examples: Iterable[Any], *, batched: bool = True) -> None:
        self.module = module
        self.batched = batched
        self.names = parameter_names(module)
        self.rows = [row for number, example in enumerate(examples) for row in self._rows(example, number)]
        self.dtypes = {name: tensor.dtype for row in self.rows[:1] for name, tensor in row.items()}

    def measured_on(self, rows: Sequence[Row]) -> None:
        """Declares the dims that vary between these rows as variable: a bare module has no class to declare them in."""
        self.variable_dims = _varying(rows)  # type: ignore[misc]

    def typed_by(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Fixes the inputs' dtypes where no example gives them: ``[1, 0]`` in JSON may be meant as floats."""
        self.dtypes = self.dtypes or dict(dtypes)

    def load(self) -> nn.Module:
        return self.module

    def encode(self, request: Tensors) -> Row:
        names = list(self.dtypes) or self.names or list(request)
        missing = [name for name in names if name not in request]
        if missing:
            raise TargetError(f"the request lacks {', '.join(missing)}", help=f"send {', '.join(names)}")
        return {name: _tensor(request[name], self.dtypes.get(name)) for name in names}

    def decode(self, outputs: Any, request: Tensors) -> Any:
        if isinstance(outputs, Mapping):
            return {name: tensor.tolist() for name, tensor in outputs.items()}
        return [t.tolist() for t in outputs] if isinstance(outputs, tuple) else outputs.tolist()

    def samples(self) -> Iterable[Tensors]:
        if not self.rows:
            raise TargetError(
                "there are no example inputs",
                help="pass --traffic to check or tune, or return (module, examples) from the factory; serve the bundle",
            )
        return list(self.rows)

    def _rows(self, example: Any, number: int) -> list[Row]:
        batch = named_tensors(example, self.names, what=f"example {number}")
        if not self.batched:
            return [batch]
        sizes = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in batch.items()}
        if None in sizes.values() or len(set(sizes.values())) != 1:
            raise TargetError(
                f"example {number} has first dims {', '.join(f'{n}: {s}' for n, s in sizes.items())}",
                help="an example is what the module is called with: every tensor has the same batch dim first",
            )
        num_rows = next(iter(sizes.values())) or 0
        return [{name: tensor[i] for name, tensor in batch.items()} for i in range(num_rows)]


def _tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value, dtype=dtype)
    except (ValueError, TypeError, RuntimeError) as exc:  # RuntimeError: null, an object, 300 for a uint8
        raise TargetError(f"no tensor can be made of it: {exc}", help="send nested lists of equal length") from None


def common_dtypes(rows: Sequence[Row]) -> dict[str, torch.dtype]:
    """For each input the dtype that holds every row's numbers."""
    return {
        name: functools.reduce(torch.promote_types, (row[name].dtype for row in rows if name in row))
        for name in (rows[0] if rows else ())
    }


def _varying(rows: Sequence[Row]) -> dict[str, dict[int, str]]:
    """A name for every dim whose size differs between the rows; dims that always agree share one."""
    declared: dict[str, dict[int, str]] = {}
    names: dict[tuple[int, ...], str] = {}
    for name, tensor in rows[0].items() if rows else ():
        if any(name not in row or row[name].dim() != tensor.dim() for row in rows):
            continue  # input_specs says what is wrong
        for dim in range(tensor.dim()):
            sizes = tuple(row[name].shape[dim] for row in rows)
            if len(set(sizes)) > 1:
                declared.setdefault(name, {})[dim] = names.setdefault(sizes, f"dim{len(names)}")
    return declared


def from_factory(value: Any, reference: str) -> Service:
    """What a factory returned: a Service, a module, or a module with examples.

    Raises:
        TargetError: something else.
    """
    if isinstance(value, Service):
        return value
    if isinstance(value, nn.Module):
        return ModuleService(value, ())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module):
        module, examples = value
        if isinstance(examples, (Tensor, Mapping)) or (
            isinstance(examples, tuple) and examples and all(isinstance(e, Tensor) for e in examples)
        ):
            examples = [examples]  # one example: a tensor, a dict, or forward's positional inputs
        if not isinstance(examples, (list, tuple)):
            raise TargetError(
                f"{reference} returned examples of type {type(examples).__name__}",
                help="return (module, examples): a list of what the module is called with",
            )
        return ModuleService(module, examples)
    raise TargetError(
        f"{reference} gives a {type(value).__name__}",
        help="a target is a tp.Service, or a function that returns (nn.Module, example inputs)",
    )
