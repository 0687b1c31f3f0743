"""The OpenAPI 3.1 document of a Service, from its annotations, its docstring, its first sample and its signature."""

import inspect
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from torchproof import __version__
from torchproof.errors import TargetError
from torchproof.serve.formats import JSON, NPY, SAFETENSORS
from torchproof.serve.oip import HEADER_LENGTH, OCTETS, model_metadata
from torchproof.serve.problem import MEDIA_TYPE
from torchproof.target.request import request_type, response_type, schemas, to_json
from torchproof.target.service import Service
from torchproof.types import InputSpec, OutputSpec, Signature
from torchproof.types.serving import Caps

MIB = 1024 * 1024
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
# What each status means, of /predict and of an inference request.
PROBLEMS = {
    HTTPStatus.BAD_REQUEST: "The body is not JSON.",
    HTTPStatus.UNAUTHORIZED: "An API key is asked for, and none came, or another one.",
    HTTPStatus.REQUEST_TIMEOUT: "The body did not come before the deadline.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "More than is taken at once.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body has a content encoding.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request is not what the model takes.",
    HTTPStatus.TOO_MANY_REQUESTS: "More requests wait than can be answered in time; come again later.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The service raised an error.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The model is not ready.",
    HTTPStatus.GATEWAY_TIMEOUT: "The deadline passed before the answer was there.",
}
# Of the Open Inference Protocol.
TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "data": {"type": "array", "description": "Nested, or flat in row-major order."},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer"}}},
    },
}
V2_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
OBJECT = {"type": "object"}


def document(
    service: Service,
    target: str,
    examples: Sequence[Any],
    *,
    caps: Caps,
    takes_lists: bool,
    model_name: str,
    signature: Signature,
) -> bytes:
    """The document as JSON.

    Args:
        target: names a service that has no class of its own.
        examples: at most one request, shown as the example.
        caps: are said in words: a schema with a limit in it would make a client refuse what the server explains.
        takes_lists: whether a JSON array is a list of requests.
        model_name: in the URLs of the Open Inference Protocol.

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
                "/predict": {"post": _predict(request, response, examples, caps, signature, takes_lists=takes_lists)},
                **_v2_paths(model_name, caps, signature),
                "/healthz": {"get": _get("The process is alive.")},
                "/readyz": {"get": _probe("The model answers.")},
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


def _predict(
    request: dict[str, Any],
    response: dict[str, Any],
    examples: Sequence[Any],
    caps: Caps,
    signature: Signature,
    *,
    takes_lists: bool,
) -> dict[str, Any]:
    plain: dict[str, Any] = {"schema": _or_list(request, f"At most {caps.max_items}.") if takes_lists else request}
    if examples and (example := _plain(examples[0])):
        plain["example"] = example[0]
    content = {JSON: plain, SAFETENSORS: _binary(signature.inputs)}
    answers = {
        JSON: {"schema": _or_list(response, "In the order of the requests.") if takes_lists else response},
        SAFETENSORS: _binary(signature.outputs),
    }
    if len(signature.inputs) == 1:
        content[NPY] = _binary(signature.inputs)
        if len(signature.outputs) == 1:
            answers[NPY] = _binary(signature.outputs)
    return {
        "operationId": "predict",
        "summary": "Answer one request, or a list of them." if takes_lists else "Answer one request.",
        "description": _limits(caps) + " Tensors go to the model itself, past encode() and decode().",
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            **{str(status.value): {"$ref": f"#/components/responses/{status.value}"} for status in PROBLEMS},
        },
    }


def _or_list(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Not ``oneOf``: a request of any type would match both."""
    return {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1, "description": description}]}


def _binary(specs: Sequence[InputSpec | OutputSpec]) -> dict[str, Any]:
    tensors = ", ".join(f"{spec.name}: {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs)
    return {"schema": {"type": "string", "format": "binary", "description": f"{tensors}; without the batch dim."}}


def _limits(caps: Caps) -> str:
    sizes = "".join(f", {dim} at most {size}" for dim, size in caps.max_sizes.items())
    return (
        f"A body has at most {caps.max_body_bytes / MIB:.3g} MiB, one request in it {caps.max_item_bytes / MIB:.3g} MiB"
        f"{sizes}."
    )


def _v2_paths(name: str, caps: Caps, signature: Signature) -> dict[str, Any]:
    """The Open Inference Protocol's; ``{}`` in a schema is anything."""
    model = f"/v2/models/{name}"
    problems = {
        str(status.value): {"description": text, "content": {JSON: {"schema": V2_ERROR}}}
        for status, text in PROBLEMS.items()
    }
    request = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": TENSOR},
            "outputs": {
                "type": "array",
                "description": "All where it is missing.",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "parameters": OBJECT},
                },
            },
            "parameters": {"type": "object", "properties": {"binary_data_output": {"type": "boolean"}}},
        },
    }
    response = {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": TENSOR},
        },
    }
    octets = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": f"JSON of so many bytes as {HEADER_LENGTH} says, then the binary tensors.",
        }
    }
    rows = f" The first dim is the batch; it has at most {caps.max_items} rows." if signature.batched else ""
    length = {HEADER_LENGTH: {"schema": {"type": "integer"}, "description": "Where binary tensors follow the JSON."}}
    infer = {
        "operationId": "infer",
        "summary": "Answer tensors, by the Open Inference Protocol.",
        "description": _limits(caps) + rows,
        "parameters": [{"name": key, "in": "header", "required": False, **value} for key, value in length.items()],
        "requestBody": {"required": True, "content": {JSON: {"schema": request}, OCTETS: octets}},
        "responses": {
            "200": {
                "description": "The answer.",
                "headers": length,
                "content": {JSON: {"schema": response}, OCTETS: octets},
            },
            **problems,
        },
    }
    metadata = _get("The model's inputs and outputs.")
    metadata["responses"]["200"]["content"] = {
        JSON: {"schema": OBJECT, "example": model_metadata(name, signature)},
    }
    return {
        "/v2": {"get": _get("The server's name, version and extensions.")},
        "/v2/health/live": {"get": _get("The process is alive.")},
        "/v2/health/ready": {"get": _probe("The model answers.")},
        model: {"get": metadata},
        f"{model}/ready": {"get": _probe("The model answers.")},
        f"{model}/infer": {"post": infer},
    }


def _get(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": summary}}}


def _probe(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary}, "503": {"$ref": "#/components/responses/503"}},
    }


def _description(service: Service, *, own: bool) -> str:
    """The Service's own docstring; of torchproof's own services the first line, as the rest is for developers."""
    text = inspect.cleandoc(type(service).__doc__ or "")
    return text if own else text.partition("\n")[0]


def _plain(example: Any) -> list[Any]:
    try:
        return [msgspec.json.decode(to_json(example))]
    except (TypeError, ValueError):  # a request that JSON has no form for is no example
        return []
