"""Whatever a stranger sends, a real server says what its own document says, and goes on."""

import http.client
import io
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

GUARD_S = 60
APP = """
from dataclasses import dataclass, field
from typing import Literal
import torch
import torchproof as tp

@dataclass
class Part:
    weight: float = 1.0
    label: str | None = None

@dataclass
class Ask:
    values: list[float]
    kind: Literal["sum", "mean"] = "sum"
    parts: dict[str, Part] = field(default_factory=dict)

@dataclass
class Total:
    total: float
    kind: str
    labels: list[str]

class Net(torch.nn.Module):
    def forward(self, x):
        return x.sum(1)

class Sum(tp.Service):
    variable_dims = {"x": {0: "length"}}
    def load(self):
        return Net()
    def encode(self, request: Ask):
        return {"x": torch.tensor(request.values)}
    def decode(self, outputs, request: Ask) -> Total:
        return Total(float(outputs), request.kind, [p.label for p in request.parts.values() if p.label])
    def samples(self):
        return [Ask([1.0, 2.0]), Ask([3.0, 4.0, 5.0], "mean", {"a": Part(2.0, "b")})]
"""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


OPERATIONS = [
    ("POST", "/predict"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/app"),
    ("GET", "/v2/models/app/ready"),
    ("POST", "/v2/models/app/infer"),
]
SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "app.py").write_text(APP)
    with start("app.py", "--replicas", "2", cwd=folder) as server:
        yield server.ready()["url"]
        assert server.process.poll() is None
        said = server.log()
    assert "Traceback" not in said, said
    assert "is replaced" not in said, said


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if method == "POST" or mode is GenerationMode.POSITIVE  # with nothing to send nothing is wrong
    ],
)
def test_what_the_document_describes(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    """Requests that fit the document, and requests that don't."""
    operation = document[path][method]

    @given(case=operation.as_strategy(mode))
    @SETTINGS
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    ask()


def test_all_that_the_document_describes_is_asked(document: Any) -> None:
    described = {(found.ok().method, found.ok().path) for found in document.get_all_operations()}
    assert described == {(method.lower(), path) for method, path in OPERATIONS}


ROW = torch.tensor([1.0, 2.0])
NPY = io.BytesIO()
np.save(NPY, ROW.numpy())
V2 = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
V2_HEAD = {
    "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
    "parameters": {"binary_data_output": True},
}
V2_JSON = json.dumps(V2_HEAD).encode()
GOOD = {
    "application/json": b'{"values": [1.0, 2.0]}',
    "application/x-npy": NPY.getvalue(),
    "application/vnd.safetensors": save({"x": ROW}),
    "application/octet-stream": V2_JSON + ROW.numpy().tobytes(),
}
INFER = "/v2/models/app/infer"
NUMBERS = ("0", "8", str(len(V2_JSON)), "-1", "99999999999999999999999", "9" * 5000, "1e3", "\xb2", "")

IN_HEADERS = st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f")  # others are no HTTP


def values() -> st.SearchStrategy[Any]:
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    return st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.dictionaries(
                st.sampled_from(["values", "kind", "parts", "inputs", "name", "shape"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A body that was right once, with some of its bytes cut, put in or changed."""
    body = bytearray(draw(st.sampled_from([*GOOD.values(), json.dumps(V2).encode()])))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        body[start : start + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(body)


BODIES = st.one_of(
    st.binary(max_size=200),
    mutations(),
    values().map(lambda value: json.dumps(value).encode()),
    st.integers(1, 20_000).map(lambda depth: b"[" * depth),
    st.integers(1, 20_000).map(lambda depth: b'{"values":' * depth),
    st.lists(st.just(GOOD["application/json"]), max_size=100).map(lambda items: b"[" + b",".join(items) + b"]"),
)


@given(
    path=st.sampled_from(["/predict", INFER]),
    body=BODIES,
    content_type=st.sampled_from([*GOOD, "text/plain", "", "application/json; charset=utf-16", "\xff"]),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "Inference-Header-Content-Length": st.sampled_from(NUMBERS),
            "X-Deadline": st.sampled_from(["10", "1e400", "nan", "-1", "soon", "\xff"]),
            "X-Request-ID": st.text(IN_HEADERS, max_size=200),
            "Authorization": st.text(IN_HEADERS, max_size=20),
        },
    ),
)
@example("/predict", GOOD["application/json"], "application/json", {})
@example(INFER, V2_JSON, "application/octet-stream", {"Inference-Header-Content-Length": "9" * 23})
@example(INFER, V2_JSON, "application/octet-stream", {"Inference-Header-Content-Length": "9" * 5000})
@settings(SETTINGS, max_examples=400)
def test_any_bytes_get_a_documented_answer(
    url: str, path: str, body: bytes, content_type: str, headers: dict[str, str]
) -> None:
    """200 or the client's mistake, in JSON or the format that came; and the next request is answered as ever."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    try:
        connection.request("POST", path, body, {"Content-Type": content_type, **headers})
        response = connection.getresponse()
        said = response.read()
        assert response.status in (200, 400, 413, 422), said
        kind = response.headers["content-type"]
        if response.status == 200:
            assert kind in GOOD
            if kind == "application/json":
                json.loads(said, parse_constant=lambda text: pytest.fail(text))
        elif path == INFER:
            assert kind == "application/json"
            assert json.loads(said)["error"]
        else:
            assert kind == "application/problem+json"
            assert json.loads(said)["status"] == response.status
            assert json.loads(said)["detail"]
        connection.request("POST", "/predict", GOOD["application/json"])
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["total"]) == (200, 3.0)
    finally:
        connection.close()


@pytest.mark.parametrize("content_type", list(GOOD))
def test_good_bodies_are_good(url: str, content_type: str) -> None:
    """Or the mutations would be of nothing."""
    path, headers = "/predict", {"Content-Type": content_type}
    if content_type == "application/octet-stream":
        path, headers["Inference-Header-Content-Length"] = INFER, str(len(V2_JSON))
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    connection.request("POST", path, GOOD[content_type], headers)
    response = connection.getresponse()
    assert response.read()
    assert (response.status, response.headers["content-type"]) == (200, content_type)
    connection.close()
