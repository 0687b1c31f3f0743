"""What a body is read by, what it becomes, and tensors as raw bytes: shared by all formats."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchproof.target.request import RequestError
from torchproof.target.respond import misfit
from torchproof.target.rows import Row, dtype_name
from torchproof.target.service import Service
from torchproof.types import InputSpec, Signature

MAX_SIZE = 2**63 - 1  # of a dim: torch counts in int64


class Dtype(NamedTuple):
    """One dtype and its names: in safetensors, and in the Open Inference Protocol."""

    torch: torch.dtype
    safetensors: str
    v2: str


# By torch's name; every dtype that both binary formats have.
DTYPES = {
    "bool": Dtype(torch.bool, "BOOL", "BOOL"),
    "uint8": Dtype(torch.uint8, "U8", "UINT8"),
    "uint16": Dtype(torch.uint16, "U16", "UINT16"),
    "uint32": Dtype(torch.uint32, "U32", "UINT32"),
    "uint64": Dtype(torch.uint64, "U64", "UINT64"),
    "int8": Dtype(torch.int8, "I8", "INT8"),
    "int16": Dtype(torch.int16, "I16", "INT16"),
    "int32": Dtype(torch.int32, "I32", "INT32"),
    "int64": Dtype(torch.int64, "I64", "INT64"),
    "float16": Dtype(torch.float16, "F16", "FP16"),
    "bfloat16": Dtype(torch.bfloat16, "BF16", "BF16"),
    "float32": Dtype(torch.float32, "F32", "FP32"),
    "float64": Dtype(torch.float64, "F64", "FP64"),
}


class TooLargeError(RequestError):
    """More than is taken at once; the message names the limit and what came."""


@dataclass(frozen=True)
class Schema:
    """What bodies are read by; made once for a model.

    Attributes:
        request_type: what ``encode`` is annotated with.
        takes_lists: whether a JSON array is a list of requests; see ``takes_lists``.
        max_items: requests in one list, or rows in one tensor request.
        max_item_bytes: of one request; None where only the whole body is limited.
        model_name: what an answer of the Open Inference Protocol says.
    """

    signature: Signature
    service: Service
    request_type: Any
    takes_lists: bool
    max_items: int
    max_item_bytes: int | None = None
    model_name: str = "model"


class Written(NamedTuple):
    """An answer's body; ``headers`` besides the content type."""

    body: bytes
    content_type: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Parsed:
    """What a body asks for; one of the two is empty.

    Attributes:
        requests: typed, for ``encode``.
        rows: tensors for the model itself, which fit the signature.
        write: the answer's body, from the responses of ``decode`` for the requests, or the output rows for the rows,
            in order. Raises ValueError or TypeError where the format has no form for them.
    """

    requests: list[Any]
    rows: list[Row]
    write: Callable[[list[Any]], Written]


def input_dtype(spec: InputSpec) -> Dtype:
    """The dtype of an input, which the body must have: none is converted to another.

    Raises:
        RequestError: no binary format has it.
    """
    if spec.dtype not in DTYPES:
        raise RequestError(
            f"input {spec.name!r} is {spec.dtype}, which can't be sent as a tensor", help="send what encode() takes"
        )
    return DTYPES[spec.dtype]


def check_shape(name: str, shape: Sequence[int], num_dims: int) -> None:
    """Refuses a declared shape before anything is multiplied or allocated by it.

    Raises:
        RequestError: another number of dims, or a size that no tensor has.
    """
    if len(shape) != num_dims:
        raise RequestError(f"input {name!r} has {len(shape)} dims; the model takes {num_dims}", help="reshape it")
    if not all(0 <= size <= MAX_SIZE for size in shape):
        raise RequestError(f"input {name!r} has a size below 0 or above {MAX_SIZE}", help="send the tensor's shape")


def from_bytes(name: str, data: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A writable copy of row-major little-endian numbers; ``shape`` is checked already.

    Raises:
        RequestError: the bytes are more or fewer than the shape has, or are no booleans.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise RequestError(
            f"input {name!r} has {len(data)} bytes; {dtype_name(dtype)} of shape {list(shape)} has {expected}",
            help="send exactly what the shape says",
        )
    if not expected:
        return torch.empty(0, dtype=dtype).reshape(tuple(shape))  # frombuffer refuses an empty buffer
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool and int(numbers.max()) > 1:  # what torch computes with such a bool is undefined
        raise RequestError(f"input {name!r} has a byte other than 0 and 1; it is bool", help="send 0 or 1")
    return numbers.view(dtype).reshape(tuple(shape))


def to_bytes(tensor: Tensor) -> bytes:
    """Row-major little-endian numbers."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_row(row: Row, signature: Signature) -> None:
    """Refuses tensors that don't fit the model.

    Raises:
        RequestError: names the input, and the dim.
    """
    if reason := misfit(row, signature.inputs):
        raise RequestError(reason, help="the shapes are in /openapi.json")
