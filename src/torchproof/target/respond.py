"""One request all the way: encode, the model, decode, JSON."""

from collections.abc import Sequence
from typing import Any

import torch

from torchproof.errors import TargetError
from torchproof.target.request import RequestError, to_json
from torchproof.target.rows import Row, Run, dtype_name, named_tensors, restore, run_rows
from torchproof.target.service import Service
from torchproof.types import InputSpec, Signature


def respond(service: Service, signature: Signature, run: Run, request: Any) -> bytes:
    """One request to the response's JSON. Raises whatever the user's code and the model raise.

    ``decode`` runs under inference mode: the outputs may be changed in place only there.

    Raises:
        RequestError: see ``encode``.
        ValueError, TypeError: JSON has no form for the response.
    """
    (outputs,) = run_rows(run, [encode(service, signature, request)], signature)
    with torch.inference_mode():
        response = service.decode(restore(outputs, signature.output_kind), request)
        return to_json(response)


def encode(service: Service, signature: Signature, request: Any) -> Row:
    """The request's tensors, as the model takes them.

    ``Service.encode`` runs in the ordinary grad mode: a tensor made under inference mode carries other dispatch keys
    and makes a compiled model recompile.

    Raises:
        RequestError: it refused the request, or its tensors don't fit the model's signature.
    """
    try:
        value = service.encode(request)
    except TargetError as exc:
        raise RequestError(str(exc), help=exc.help) from None
    row = named_tensors(value, [spec.name for spec in signature.inputs], what="encode()")
    if reason := misfit(row, signature.inputs):
        raise RequestError(reason, help="the signature is in the bundle's proof.json")
    return row


def misfit(row: Row, inputs: Sequence[InputSpec]) -> str:
    """Why a request's tensors can't go through the model; empty when they can."""
    names = [spec.name for spec in inputs]
    if set(row) != set(names):
        return f"encode() gave {', '.join(row) or 'nothing'} for this request; the model takes {', '.join(names)}"
    sizes: dict[str, int] = {}
    for spec in inputs:
        tensor = row[spec.name]
        if dtype_name(tensor.dtype) != spec.dtype:
            return f"input {spec.name!r} is {dtype_name(tensor.dtype)}; the model takes {spec.dtype}"
        if tensor.dim() != len(spec.shape):
            return f"input {spec.name!r} has {tensor.dim()} dims; the model takes {len(spec.shape)}"
        for position, (size, dim) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
            wanted = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
            if size != wanted:
                where = f", as {dim!r} is {wanted} in another input" if isinstance(dim, str) else ""
                return f"dim {position} of input {spec.name!r} is {size}; the model takes {wanted}{where}"
    return ""
