"""The Open Inference Protocol v2 over HTTP, with Triton's binary tensors: what its clients send and get.

A request's tensors have the batch dim first; each row goes its own way through the model.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from torchproof import __version__
from torchproof.serve.body import (
    DTYPES,
    Parsed,
    Schema,
    TooLargeError,
    Written,
    check_row,
    check_shape,
    from_bytes,
    input_dtype,
    to_bytes,
)
from torchproof.target.request import NotJsonError, RequestError, to_json
from torchproof.target.rows import Row, dtype_name
from torchproof.types import InputSpec, OutputSpec, Signature

MODEL_VERSION = "1"
OCTETS = "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
NESTED = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # read when its type is known
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] = []
    parameters: dict[str, Any] = {}


def server_metadata() -> dict[str, Any]:
    """The answer to ``GET /v2``."""
    return {"name": "torchproof", "version": __version__, "extensions": ["binary_tensor_data"]}


def model_metadata(name: str, signature: Signature) -> dict[str, Any]:
    """The answer to ``GET /v2/models/NAME``; -1 is a size that varies, the batch dim's too."""
    return {
        "name": name,
        "versions": [MODEL_VERSION],
        "platform": "torchproof",
        "inputs": [_described(spec, signature) for spec in signature.inputs],
        "outputs": [_described(spec, signature) for spec in signature.outputs],
    }


def _described(spec: InputSpec | OutputSpec, signature: Signature) -> dict[str, Any]:
    shape = [-1 if isinstance(dim, str) else dim for dim in spec.shape]
    # The protocol has no name for complex64: torch's own says it better than none.
    datatype = DTYPES[spec.dtype].v2 if spec.dtype in DTYPES else spec.dtype.upper()
    return {"name": spec.name, "datatype": datatype, "shape": [-1, *shape] if signature.batched else shape}


def parse_infer(body: bytes, header_length: int, schema: Schema) -> Parsed:
    """An inference request, cut into rows.

    Args:
        header_length: bytes of JSON in front of the binary tensors; 0 where all is JSON.

    Raises:
        NotJsonError: the header is not JSON.
        TooLargeError: more rows than are taken at once.
        RequestError: not what the model takes; names the input or output.
    """
    if not 0 <= header_length <= len(body):
        raise RequestError(
            f"{HEADER_LENGTH} is {header_length}; the body has {len(body)} bytes", help="send its length"
        )
    request = _decode(body[:header_length] if header_length else body)
    chosen = _chosen_outputs(request, schema.signature)
    rows = _rows(request, memoryview(body)[header_length:] if header_length else memoryview(b""), schema)
    return Parsed([], rows, lambda outputs: _write(outputs, chosen, request.id, schema))


def _decode(header: bytes) -> _Request:
    try:
        return msgspec.json.decode(header, type=_Request)
    except msgspec.ValidationError as exc:
        raise RequestError(f"not an inference request: {exc}", help="see the Open Inference Protocol") from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise NotJsonError(f"not JSON: {exc}", help="send one JSON value") from None


def _check_names(given: Iterable[str], known: Sequence[str], what: str) -> None:
    seen = set()
    for name in given:
        if name not in known:
            raise RequestError(
                f"{what} {reprlib.repr(name)} is unknown; the model has {', '.join(known)}", help="rename"
            )
        if name in seen:
            raise RequestError(f"{what} {name!r} comes twice", help="send it once")
        seen.add(name)


def _chosen_outputs(request: _Request, signature: Signature) -> list[tuple[str, bool]]:
    """Names in the order asked for, and whether each goes as binary."""
    known = {spec.name: spec.dtype for spec in signature.outputs}
    _check_names((output.name for output in request.outputs), list(known), "output")
    default = request.parameters.get("binary_data_output", False) is True
    chosen = []
    for output in request.outputs or [_Output(name) for name in known]:
        if known[output.name] not in DTYPES:
            raise RequestError(
                f"output {output.name!r} is {known[output.name]}, for which the protocol has no type",
                help="ask for other outputs",
            )
        if other := sorted(output.parameters.keys() & {"classification", "shared_memory_region"}):
            raise RequestError(f"output {output.name!r}: {other[0]} is not supported", help="leave it out")
        chosen.append((output.name, output.parameters.get("binary_data", default) is True))
    return chosen


def _rows(request: _Request, binary: memoryview, schema: Schema) -> list[Row]:
    signature = schema.signature
    known = [spec.name for spec in signature.inputs]
    _check_names((given.name for given in request.inputs), known, "input")
    inputs = {given.name: given for given in request.inputs}
    if missing := [name for name in known if name not in inputs]:
        raise RequestError(f"input {missing[0]!r} is missing; the model has {', '.join(known)}", help="send it")
    batch_size = None
    dtypes = {}
    for spec in signature.inputs:
        given = inputs[spec.name]
        dtypes[spec.name] = _checked_dtype(given, spec)
        check_shape(spec.name, given.shape, len(spec.shape) + signature.batched)
        if signature.batched:
            batch_size = _check_batch_size(given, batch_size, schema.max_items)
    tensors = {}
    for given in request.inputs:  # the binary ones follow in this order
        dtype = dtypes[given.name]
        if isinstance(given.data, msgspec.Raw):
            tensors[given.name] = _from_json(given, given.data, dtype)
        else:
            size = _binary_size(given, len(binary))
            tensors[given.name] = from_bytes(given.name, binary[:size], dtype, given.shape)
            binary = binary[size:]
    if len(binary):
        raise RequestError(f"{len(binary)} bytes are left over after the last input", help="see binary_data_size")
    rows = [tensors] if batch_size is None else [{n: t[i] for n, t in tensors.items()} for i in range(batch_size)]
    check_row(rows[0], signature)  # the others have its shapes
    return rows


def _checked_dtype(given: _Input, spec: InputSpec) -> torch.dtype:
    wanted = input_dtype(spec)
    if given.datatype != wanted.v2:
        raise RequestError(
            f"input {spec.name!r} is {reprlib.repr(given.datatype)}; the model takes {wanted.v2}", help="convert it"
        )
    if "shared_memory_region" in given.parameters:
        raise RequestError(f"input {spec.name!r}: shared memory is not supported", help="send the numbers")
    if ("binary_data_size" in given.parameters) == isinstance(given.data, msgspec.Raw):
        raise RequestError(f"input {spec.name!r} needs data or binary_data_size, one of them", help="send one")
    return wanted.torch


def _check_batch_size(given: _Input, other: int | None, max_items: int) -> int:
    size = given.shape[0]
    if not size:
        raise RequestError(f"input {given.name!r} holds no row", help="the first dim is the batch; send at least one")
    if size > max_items:
        raise TooLargeError(
            f"input {given.name!r} has {size} rows; at most {max_items} are taken at once", help="send fewer"
        )
    if other not in (None, size):
        raise RequestError(f"input {given.name!r} has {size} rows, another input {other}", help="send equally many")
    return size


def _binary_size(given: _Input, num_left: int) -> int:
    """Bytes of the input behind the header."""
    size = given.parameters["binary_data_size"]
    if type(size) is not int or not 0 <= size <= num_left:
        raise RequestError(
            f"input {given.name!r} has binary_data_size {reprlib.repr(size)}; {num_left} bytes are left",
            help=f"send them, and {HEADER_LENGTH}",
        )
    return size


def _from_json(given: _Input, data: msgspec.Raw, dtype: torch.dtype) -> Tensor:
    """Numbers nested as the shape says, or flat in row-major order."""
    if dtype == torch.bfloat16:
        raise RequestError(f"input {given.name!r}: BF16 goes as binary only", help="send binary_data_size")
    element: Any = float
    if dtype == torch.bool:
        element = bool
    elif not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        # msgspec compares with int64 at most; numpy refuses what is above uint64.
        element = Annotated[int, msgspec.Meta(ge=info.min, le=None if dtype == torch.uint64 else info.max)]
    type_: Any = element
    nested = NESTED.match(data) is not None
    for _ in given.shape if nested else (0,):
        type_ = list[type_]
    try:
        values = msgspec.json.decode(data, type=type_)
        # float64 first: what overflows a smaller dtype shows as infinity, which JSON can't have held.
        array = np.array(values, "float64" if dtype.is_floating_point else dtype_name(dtype))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as exc:
        raise RequestError(f"input {given.name!r}: data: {exc}", help="send its numbers") from None
    if array.shape != tuple(given.shape) if nested else array.size != math.prod(given.shape):
        raise RequestError(
            f"input {given.name!r} has data of shape {list(array.shape)}; its shape is {given.shape}",
            help="send as many numbers as the shape says",
        )
    tensor = torch.from_numpy(array).to(dtype).reshape(given.shape)
    if dtype.is_floating_point and not bool(tensor.isfinite().all()):
        raise RequestError(f"input {given.name!r} has a number too large for {given.datatype}", help="scale it")
    return tensor


def _write(rows: Sequence[Row], chosen: Sequence[tuple[str, bool]], id_: str | None, schema: Schema) -> Written:
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, as_binary in chosen:
        tensor = _joined([row[name] for row in rows], name, batched=schema.signature.batched)
        datatype = DTYPES[dtype_name(tensor.dtype)].v2
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(tensor.shape)}
        if as_binary:
            binary.append(to_bytes(tensor))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = tensor.flatten().tolist()
        outputs.append(output)
    head = {"model_name": schema.model_name, "model_version": MODEL_VERSION}
    header = to_json(head | ({} if id_ is None else {"id": id_}) | {"outputs": outputs})
    if not binary:
        return Written(header, "application/json", {})
    return Written(b"".join((header, *binary)), OCTETS, {HEADER_LENGTH: str(len(header))})


def _joined(tensors: Sequence[Tensor], name: str, *, batched: bool) -> Tensor:
    if not batched:
        return tensors[0]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ValueError(f"output {name!r} has another shape in each row, which one tensor can't hold")
    return torch.stack(list(tensors))
