"""The shapes that go in and come out of the model, without the batch dim."""

from typing import Literal

from torchproof.types.record import Record


class InputSpec(Record):
    """One input of one request.

    Attributes:
        name: the keyword that ``forward`` takes.
        dtype: as torch prints it without the prefix: ``int64``.
        shape: sizes without the batch dim; a string names a variable dim, and equal names have equal sizes.
        pad_value: what a variable dim is filled up with where padding is proven safe.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    pad_value: float = 0.0


class OutputSpec(Record):
    """One output of one request; ``shape`` as in ``InputSpec``."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Signature(Record):
    """Everything that flows through the model for one request.

    Attributes:
        call: how ``forward`` takes its inputs.
        output_kind: what the model returns; a dataclass counts as ``dict``.
        batched: whether requests are stacked along a new first dim. False for a saved model of fixed batch size.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    call: Literal["keyword", "positional"]
    output_kind: Literal["tensor", "tuple", "dict"]
    batched: bool = True
