"""Typed requests: what ``encode`` is annotated with decides how JSON is read and what OpenAPI says."""

import inspect
import typing
from typing import Any

import msgspec

from torchproof.errors import UsageError
from torchproof.target.service import Service


class RequestError(UsageError):
    """A request that is not what ``encode`` is annotated with; the message names the key's path."""


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
    if type_ is Any or (isinstance(type_, type) and type_ is not dict and isinstance(value, type_)):
        return value
    try:
        if _is_pydantic(type_):
            return type_.model_validate(value)
        return msgspec.convert(value, type_)
    except (msgspec.ValidationError, ValueError) as exc:
        raise RequestError(str(exc), help="send what encode() is annotated with") from None


def decode_json(body: bytes, type_: Any) -> Any:
    """A JSON text to a request.

    Raises:
        RequestError: not JSON, or it doesn't fit the type.
    """
    try:
        return convert(msgspec.json.decode(body), type_)
    except msgspec.DecodeError as exc:
        raise RequestError(f"not JSON: {exc}", help="send one JSON value") from None


def to_json(value: Any) -> bytes:
    """A response as JSON; tensors and numpy arrays become nested lists."""
    return msgspec.json.encode(value, enc_hook=_plain)


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
    return {}  # a type that JSON schema has no words for: anything


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
