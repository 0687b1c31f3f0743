"""The OpenAPI 3.1 document of a Service, from its annotations, its docstring and its first sample."""

import inspect
from http import HTTPStatus
from typing import Any

import msgspec

from torchproof import __version__
from torchproof.errors import TargetError
from torchproof.serve.problem import MEDIA_TYPE
from torchproof.target.request import request_type, response_type, schemas, to_json
from torchproof.target.service import Service

SCHEMA_PATH = "#/components/schemas/{name}"
PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}
# What each status of /predict means.
PROBLEMS = {
    HTTPStatus.BAD_REQUEST: "The body is not JSON.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request is not what the model takes.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The service raised an error.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The model is not ready.",
}


def document(service: Service, target: str, examples: tuple[Any, ...]) -> bytes:
    """The document as JSON.

    Args:
        target: names a service that has no class of its own.
        examples: at most one request, shown as the example.

    Raises:
        TargetError: JSON schema has no form for an annotation.
    """
    try:
        (request, response), components = schemas((request_type(service), response_type(service)), SCHEMA_PATH)
    except TypeError as exc:
        raise TargetError(
            f"{target}: the annotations of encode() and decode() have no JSON schema: {exc}",
            help="annotate with dataclasses, TypedDicts, msgspec.Structs or pydantic models",
        ) from None
    content = {"schema": request}
    if examples and (example := _plain(examples[0])):
        content["example"] = example[0]
    predict = {
        "operationId": "predict",
        "summary": "Answer one request.",
        "requestBody": {"required": True, "content": {"application/json": content}},
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": response}}},
            **{str(status.value): {"$ref": f"#/components/responses/{status.value}"} for status in PROBLEMS},
        },
    }
    own = not type(service).__module__.startswith("torchproof.")
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": type(service).__name__ if own else target,
                "version": __version__,
                "description": _description(service, own=own),
            },
            "paths": {
                "/predict": {"post": predict},
                "/healthz": {"get": _probe("The process is alive.", {})},
                "/readyz": {"get": _probe("The model answers.", {"503": {"$ref": "#/components/responses/503"}})},
            },
            "components": {
                "schemas": components,
                "responses": {
                    str(status.value): {"description": text, "content": {MEDIA_TYPE: {"schema": PROBLEM}}}
                    for status, text in PROBLEMS.items()
                },
            },
        }
    )


def _probe(summary: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": summary}, **more}}


def _description(service: Service, *, own: bool) -> str:
    """The Service's own docstring; of torchproof's own services the first line, as the rest is for developers."""
    text = inspect.cleandoc(type(service).__doc__ or "")
    return text if own else text.partition("\n")[0]


def _plain(example: Any) -> list[Any]:
    try:
        return [msgspec.json.decode(to_json(example))]
    except (TypeError, ValueError):  # a request that JSON has no form for is no example
        return []
