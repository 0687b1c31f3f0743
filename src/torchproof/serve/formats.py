"""Bodies in and out: JSON, npy, safetensors and the Open Inference Protocol.

A body is what a stranger sent: whatever it holds, ``parse`` raises a ``RequestError`` or gives what fits the model, and
allocates nothing by a declared size before that was compared with the bytes that came.
"""

import io
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from torchproof.serve.body import (
    Parsed,
    Schema,
    TooLargeError,
    Written,
    check_row,
    check_shape,
    from_bytes,
    input_dtype,
)
from torchproof.serve.oip import parse_infer
from torchproof.serve.wire import Job
from torchproof.target.modules import ModuleService
from torchproof.target.request import NotJsonError, RequestError, decode_json, request_type, schemas, to_json
from torchproof.target.rows import Row
from torchproof.target.service import Service
from torchproof.types import Signature

__all__ = ["Parsed", "Schema", "TooLargeError", "Written", "parse", "takes_lists"]

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"

ARRAY = re.compile(rb"[ \t\r\n]*\[")
COMPONENT = "#/{name}"


def takes_lists(service: Service, examples: Sequence[Any]) -> bool:
    """Whether a JSON array is a list of requests: only where no request is an array itself.

    Args:
        examples: sampled requests; they decide where ``encode`` is annotated with nothing.
    """
    if isinstance(service, ModuleService):
        return True  # a request holds each input by its name
    type_ = request_type(service)
    if type_ is Any:
        return bool(examples) and not any(isinstance(e, (list, tuple)) or hasattr(e, "tolist") for e in examples)
    try:
        (schema,), components = schemas((type_,), COMPONENT)
    except TypeError:  # no schema: nothing is known
        return False
    return _never_array(schema, components)


def _never_array(schema: Mapping[str, Any], components: Mapping[str, Any]) -> bool:
    if reference := schema.get("$ref"):
        return _never_array(components[reference.removeprefix("#/")], components)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return all(_never_array(one, components) for one in alternatives)
    return "enum" in schema or "const" in schema or schema.get("type", "array") != "array"


def parse(job: Job, schema: Schema) -> Parsed:
    """What a request's body asks for. Call it in the ordinary grad mode: tensors made under inference mode recompile.

    Raises:
        NotJsonError: not JSON.
        TooLargeError: more items than are taken at once.
        RequestError: not what the model takes; names the place.
    """
    if job.format == "json":
        return _parse_json(job.body, schema)
    if job.format == "v2":
        return parse_infer(job.body, job.header_length, schema)
    _check_bytes(job.body, schema)
    read = _read_npy if job.format == "npy" else _read_safetensors
    row = read(job.body, schema.signature)
    check_row(row, schema.signature)
    return Parsed([], [row], _write_npy if job.format == "npy" else _write_safetensors)


def _parse_json(body: bytes, schema: Schema) -> Parsed:
    if not (schema.takes_lists and ARRAY.match(body)):
        _check_bytes(body, schema)
        return Parsed([decode_json(body, schema.request_type)], [], lambda responses: _write_json(responses[0]))
    try:
        items = msgspec.json.decode(body, type=list[msgspec.Raw])  # cuts only: the count is known before any work
    except (msgspec.DecodeError, RecursionError) as exc:
        raise NotJsonError(f"not JSON: {exc}", help="send one JSON value") from None
    if not items:
        raise RequestError("the list is empty", help="send at least one request")
    if len(items) > schema.max_items:
        raise TooLargeError(
            f"the list has {len(items)} items; at most {schema.max_items} are taken at once", help="send fewer"
        )
    return Parsed([_item(i, bytes(raw), schema) for i, raw in enumerate(items)], [], _write_json)


def _item(number: int, body: bytes, schema: Schema) -> Any:
    try:
        _check_bytes(body, schema)
        return decode_json(body, schema.request_type)
    except RequestError as exc:
        raise type(exc)(f"item {number}: {exc}", help=exc.help) from None


def _check_bytes(body: bytes, schema: Schema) -> None:
    if schema.max_item_bytes is not None and len(body) > schema.max_item_bytes:
        raise TooLargeError(
            f"the request has {len(body)} bytes; at most {schema.max_item_bytes} are taken", help="send a smaller one"
        )


def _write_json(value: Any) -> Written:
    return Written(to_json(value), JSON, {})


def _read_npy(body: bytes, signature: Signature) -> Row:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise RequestError(f"npy holds one tensor; the model takes {names}", help="send safetensors")
    (spec,) = signature.inputs
    dtype = input_dtype(spec)
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:  # 3.0 is for field names beyond Latin-1, and a tensor has no fields
            raise RequestError(f"npy version {version} holds no plain tensor", help="send version 1.0 or 2.0")
        shape, fortran, descr = read_header(file)
    except RequestError:
        raise
    except Exception as exc:  # noqa: BLE001  the header is a Python literal: numpy's parser raises what it likes
        raise RequestError(f"not npy: {reprlib.repr(str(exc))}", help="send what numpy.save writes") from None
    if descr.newbyteorder("=").name != spec.dtype or descr.shape:
        raise RequestError(
            f"input {spec.name!r} is {reprlib.repr(str(descr))}; the model takes {spec.dtype}",
            help="bfloat16 goes as safetensors" if spec.dtype == "bfloat16" else "convert it",
        )
    check_shape(spec.name, shape, len(spec.shape))
    data = body[file.tell() :]
    if descr.byteorder == ">":
        data = np.frombuffer(data[: len(data) // descr.itemsize * descr.itemsize], descr).byteswap().tobytes()
    if fortran:
        return {spec.name: from_bytes(spec.name, data, dtype.torch, shape[::-1]).permute(*range(len(shape))[::-1])}
    return {spec.name: from_bytes(spec.name, data, dtype.torch, shape)}


def _read_safetensors(body: bytes, signature: Signature) -> Row:
    try:
        stored = dict(deserialize(body))  # type: ignore[no-untyped-call]  # compares sizes with the body's length before it copies
    except (SafetensorError, ValueError) as exc:
        raise RequestError(f"not safetensors: {exc}", help="send what safetensors.torch.save writes") from None
    if stored.keys() != {spec.name for spec in signature.inputs}:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise RequestError(f"the body holds {reprlib.repr(sorted(stored))}; the model takes {names}", help="rename")
    row = {}
    for spec in signature.inputs:
        given = stored[spec.name]
        dtype = input_dtype(spec)
        if given["dtype"] != dtype.safetensors:
            raise RequestError(
                f"input {spec.name!r} is {given['dtype']}; the model takes {dtype.safetensors}", help="convert it"
            )
        check_shape(spec.name, given["shape"], len(spec.shape))
        row[spec.name] = from_bytes(spec.name, given["data"], dtype.torch, given["shape"])
    return row


def _write_npy(rows: list[Any]) -> Written:
    """One output that numpy has a dtype for; else safetensors."""
    tensors = list(rows[0].values())
    if len(tensors) > 1 or tensors[0].dtype == torch.bfloat16:
        return _write_safetensors(rows)
    file = io.BytesIO()
    np.save(file, tensors[0].detach().cpu().numpy(), allow_pickle=False)
    return Written(file.getvalue(), NPY, {})


def _write_safetensors(rows: list[Any]) -> Written:
    (row,) = rows
    # Copies: safetensors refuses tensors that share memory, and two outputs may be views of one.
    copies = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in row.items()}
    return Written(save(copies), SAFETENSORS, {})
