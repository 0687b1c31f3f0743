"""Typed requests: what ``encode`` is annotated with decides how JSON is read and what OpenAPI says."""

import inspect
import math
import typing
from typing import Any

import msgspec

from torchproof.errors import UsageError
from torchproof.target.service import Service


class RequestError(UsageError):
    """A request that can't be taken. The client of a server reads the message, with status 422.

    ``Service.encode`` raises it for what its annotation doesn't say; torchproof for what is not as annotated, and then
    the message names the key's path.
    """

    def __init__(self, message: str, *, help: str = "send what encode() takes") -> None:
        super().__init__(message, help=help)


class NotJsonError(RequestError):
    """A body that is no JSON at all."""


def request_type(service: Service) -> Any:
    """The annotation of ``encode``'s argument; ``Any`` when there is none."""
    return _hint(service.encode, 0)


def response_type(service: Service) -> Any:
    """The annotation of what ``decode`` returns; ``Any`` when there is none."""
    return _hints(service.decode).get("return", Any)


def convert(value: Any, type_: Any) -> Any:
    """A sample to a request: plain dicts, lists and strings become the annotated type, the rest stays.

    Raises:
        RequestError: the value doesn't fit the type.
    """
    if type_ is Any or _is_already(value, type_):
        return value
    try:
        if _is_pydantic(type_):
            return type_.model_validate(value)
        return msgspec.convert(value, type_)
    except (msgspec.ValidationError, ValueError) as exc:
        raise RequestError(str(exc), help="send what encode() is annotated with") from None
    except TypeError as exc:  # a type that msgspec has no rule for, such as a union of two dataclasses
        raise RequestError(
            f"encode() is annotated with a type that no request can be read as: {exc}",
            help="annotate it with one class",
        ) from None


def _is_already(value: Any, type_: Any) -> bool:
    try:
        return type_ is not dict and isinstance(type_, type) and isinstance(value, type_)
    except TypeError:  # a TypedDict or a Protocol: no class that a value can be an instance of
        return False


def decode_json(body: bytes, type_: Any) -> Any:
    """A JSON text to a request.

    Raises:
        NotJsonError: not JSON.
        RequestError: it doesn't fit the type.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise NotJsonError(f"not JSON: {exc}", help="send one JSON value") from None
    return convert(value, type_)


def to_json(value: Any) -> bytes:
    """A response as JSON; tensors and numpy arrays become nested lists.

    Raises:
        TypeError: JSON has no form for it.
        ValueError: it holds NaN or infinity, which JSON lacks and msgspec would write as null.
    """
    text = msgspec.json.encode(value, enc_hook=_plain)
    if b"null" in text and (path := _non_finite(msgspec.to_builtins(value, enc_hook=_plain), "$")):
        raise ValueError(f"the response is not finite at {path}")
    return text


def _non_finite(value: Any, path: str) -> str:
    """Where the first NaN or infinity is; empty where there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else path
    if isinstance(value, dict):
        parts = ((item, f"{path}.{key}") for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((item, f"{path}[{i}]") for i, item in enumerate(value))
    else:
        return ""
    return next((found for item, where in parts if (found := _non_finite(item, where))), "")


def schemas(types: tuple[Any, ...], template: str) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """JSON schema of each type, and the components they share.

    Args:
        template: where a component lies, such as ``#/components/schemas/{name}``.
    """
    out: list[dict[str, Any]] = []
    components: dict[str, Any] = {}
    for type_ in types:
        if _is_pydantic(type_):
            schema = type_.model_json_schema(ref_template=template.replace("{name}", "{model}"))
            components.update(schema.pop("$defs", {}))
        else:
            (schema,), more = msgspec.json.schema_components((type_,), ref_template=template, schema_hook=_unknown)
            components.update(more)
        out.append(schema)
    return tuple(out), components


def _unknown(type_: type) -> dict[str, Any]:
    return {"title": type_.__name__}  # a type that JSON schema has no words for: anything


def _is_pydantic(type_: Any) -> bool:
    return isinstance(type_, type) and hasattr(type_, "model_validate") and hasattr(type_, "model_json_schema")


def _hints(method: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(method)
    except (NameError, TypeError):  # an annotation that only a type checker can see
        return {}


def _hint(method: Any, position: int) -> Any:
    names = list(inspect.signature(method).parameters)
    return _hints(method).get(names[position], Any) if len(names) > position else Any


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # torch.Tensor, numpy.ndarray and numpy scalars
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"decode() returned a {type(value).__name__}, which JSON has no form for")
