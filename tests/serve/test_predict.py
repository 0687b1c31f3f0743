"""A request goes through encode, the model and decode, and every way to get it wrong has its own answer."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, TypedDict

import httpx
import msgspec
import pydantic
import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor, nn

import torchproof as tp
from torchproof.errors import TargetError
from torchproof.serve import app as serve_app
from torchproof.serve.answer import Answerer
from torchproof.serve.app import create_app
from torchproof.serve.model import Model
from torchproof.target.modules import ModuleService

ClientOf = Callable[[tp.Service], TestClient]
ModelOf = Callable[[tp.Service], Model]
PROBLEM = "application/problem+json"


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Plain(tp.Service):
    """Doubles numbers."""

    variable_dims = {"x": {0: "length"}}

    def load(self) -> nn.Module:
        return Double()

    def encode(self, request: Any) -> Any:
        return {"x": torch.tensor(request["values"], dtype=torch.float32)}

    def decode(self, outputs: Any, request: Any) -> Any:
        return {"values": outputs}

    def samples(self) -> Iterable[Any]:
        return [{"values": [1.0, 2.0]}, {"values": [1.0, 2.0, 3.0]}]


@dataclasses.dataclass
class DataRequest:
    values: list[float]


class DictRequest(TypedDict):
    values: list[float]


class StructRequest(msgspec.Struct):
    values: list[float]


class PydanticRequest(pydantic.BaseModel):
    values: list[float]


class OfDataclass(Plain):
    def encode(self, request: DataRequest) -> Any:
        return torch.tensor(request.values)

    def decode(self, outputs: Tensor, request: DataRequest) -> DataRequest:
        return DataRequest(outputs.tolist())


class OfTypedDict(Plain):
    def encode(self, request: DictRequest) -> Any:
        return torch.tensor(request["values"])

    def decode(self, outputs: Tensor, request: DictRequest) -> DictRequest:
        return {"values": outputs.tolist()}


class OfStruct(Plain):
    def encode(self, request: StructRequest) -> Any:
        return (torch.tensor(request.values),)

    def decode(self, outputs: Tensor, request: StructRequest) -> StructRequest:
        return StructRequest(outputs.tolist())


class OfPydantic(Plain):
    def encode(self, request: PydanticRequest) -> Any:
        return torch.tensor(request.values)

    def decode(self, outputs: Tensor, request: PydanticRequest) -> PydanticRequest:
        return PydanticRequest(values=outputs.tolist())


@pytest.mark.parametrize("service", [Plain, OfDataclass, OfTypedDict, OfStruct, OfPydantic])
def test_a_request_is_typed_by_the_annotations(service: type[tp.Service], client_of: ClientOf) -> None:
    client = client_of(service())
    answer = client.post("/predict", json={"values": [1.5, 2, -3, 0]})
    assert (answer.status_code, answer.json()) == (200, {"values": [3.0, 4.0, -6.0, 0.0]})
    document = client.get("/openapi.json").json()
    content = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"] == {"values": [1.0, 2.0]}
    if service is not Plain:
        wrong = client.post("/predict", json={"values": [1, "two"]})
        assert (wrong.status_code, wrong.headers["content-type"]) == (422, PROBLEM)
        assert "values" in wrong.json()["detail"]


def test_a_bare_module_takes_and_gives_tensors(client_of: ClientOf) -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"sum": a + b, "product": a * b}

    client = client_of(ModuleService(Two(), [{"a": torch.ones(2, 3), "b": torch.ones(2, 3)}]))
    answer = client.post("/predict", json={"a": [1, 2, 3], "b": [4, 5, 6]})
    assert answer.json() == {"sum": [5.0, 7.0, 9.0], "product": [4.0, 10.0, 18.0]}
    for body, message in [
        ({"a": [1, 2, 3]}, "the request lacks b"),
        ({"a": [1, 2, 3], "b": [1, 2]}, "dim 0 of input 'b' is 2; the model takes 3"),
        ({"a": [1, 2, 3], "b": [[1, 2, 3]]}, "input 'b' has 2 dims; the model takes 1"),
        ({"a": [1, 2, 3], "b": None}, "no tensor can be made of it"),
        ([1], "Expected `object`"),
    ]:
        refused = client.post("/predict", json=body)
        assert refused.status_code == 422
        assert message in refused.json()["detail"]


def test_sizes_of_one_name_have_to_agree(client_of: ClientOf) -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    examples = [{"a": torch.ones(1, n), "b": torch.ones(1, n)} for n in (2, 3)]
    client = client_of(ModuleService(Add(), examples))
    assert client.post("/predict", json={"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}).json() == [2.0, 4.0, 6.0, 8.0]
    refused = client.post("/predict", json={"a": [1, 2, 3, 4], "b": [1]})
    assert (refused.status_code, refused.json()["title"]) == (422, HTTPStatus.UNPROCESSABLE_ENTITY.phrase)
    assert "dim 0 of input 'b' is 1; the model takes 4" in refused.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'"\xff"', b"[" * 100_000, b'{"values": NaN}'])
def test_what_is_no_json_is_400(body: bytes, client_of: ClientOf) -> None:
    answer = client_of(OfStruct()).post("/predict", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
    assert answer.json().keys() == {"type", "title", "status", "detail"}
    assert answer.json()["detail"].startswith("not JSON: ")


class Broken(OfStruct):
    """Raises, or gives something wrong, where the test says."""

    def __init__(self, encode: Callable[[], Any] | None = None, decode: Callable[[], Any] | None = None) -> None:
        self.armed = False
        self.in_encode, self.in_decode = encode, decode

    def encode(self, request: StructRequest) -> Any:
        return self.in_encode() if self.armed and self.in_encode else super().encode(request)

    def decode(self, outputs: Tensor, request: StructRequest) -> Any:
        return self.in_decode() if self.armed and self.in_decode else super().decode(outputs, request)


def raising(exc: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise exc

    return function


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        (raising(KeyError("secret")), None),
        (raising(SystemExit(3)), None),
        (lambda: "secret", None),
        (lambda: {"x": [1.0]}, None),
        (None, raising(ValueError("secret"))),
        (None, lambda: {"value": float("nan")}),
        (None, lambda: [None, {"value": torch.tensor([1.0, float("inf")])}]),
        (None, lambda: object()),
        (None, lambda: {1, "a", object()}),
    ],
)
def test_an_error_in_the_users_code_is_500_and_stays_in_the_log(
    encode: Any, decode: Any, model_of: ModelOf, caplog: pytest.LogCaptureFixture
) -> None:
    service = Broken(encode, decode)
    client = TestClient(create_app(model_of(service)))
    service.armed = True
    answer = client.post("/predict", json={"values": [1]})
    assert (answer.status_code, answer.headers["content-type"]) == (500, PROBLEM)
    assert answer.json()["detail"] == "the service raised an error; its log says more"
    assert "Traceback" in caplog.text
    service.armed = False
    assert client.post("/predict", json={"values": [1]}).json() == {"values": [2.0]}


def test_what_encode_refuses_is_422(client_of: ClientOf) -> None:
    service = Broken(raising(TargetError("too long by 3 tokens", help="shorten it")))
    client = client_of(service)
    service.armed = True
    answer = client.post("/predict", json={"values": [1]})
    assert (answer.status_code, answer.json()["detail"]) == (422, "too long by 3 tokens")


def test_decode_may_change_the_outputs_in_place(client_of: ClientOf) -> None:
    class InPlace(OfStruct):
        def decode(self, outputs: Tensor, request: StructRequest) -> StructRequest:
            return super().decode(outputs.clamp_(max=5), request)

    assert client_of(InPlace()).post("/predict", json={"values": [1, 9]}).json() == {"values": [2.0, 5.0]}


def test_none_in_a_response_is_no_error(client_of: ClientOf) -> None:
    service = Broken(None, lambda: {"label": None, "score": 0.5})
    client = client_of(service)
    service.armed = True
    assert client.post("/predict", json={"values": [1]}).json() == {"label": None, "score": 0.5}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_413(chunked: bool, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_app, "MAX_BODY_BYTES", 20)
    client = client_of(Plain())
    body = json.dumps({"values": [1] * 20}).encode()
    answer = client.post("/predict", content=iter([body[:5], body[5:]]) if chunked else body)
    assert (answer.status_code, answer.headers["content-type"]) == (413, PROBLEM)
    assert client.post("/predict", content=b'{"values": [1.0000]}').status_code == 200  # 20 bytes


def test_wrong_paths_and_methods_are_problems_too(client_of: ClientOf) -> None:
    client = client_of(Plain())
    for answer, status in [(client.get("/nothing"), 404), (client.get("/predict"), 405), (client.post("/docs"), 405)]:
        assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
        assert answer.json()["status"] == status
    assert client.get("/predict").headers["allow"] == "POST"
    assert client.get("/predict").json()["detail"] == "/predict answers POST only"


def test_the_docs_come_from_the_disk(client_of: ClientOf) -> None:
    client = client_of(OfDataclass())
    page = client.get("/docs").text
    assert "http" not in page  # nothing is asked of another host
    for name in ("swagger-ui.css", "swagger-ui-bundle.js"):
        assert f"docs/{name}" in page
        assert len(client.get(f"/docs/{name}").content) > 100_000
    assert client.get("/docs/index.html").status_code == 404
    assert client.get("/docs/..%2f__init__.py").status_code == 404


def test_the_openapi_document_is_whole(client_of: ClientOf) -> None:
    document = client_of(OfDataclass()).get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert document["info"]["title"] == "OfDataclass"
    assert document["info"]["description"] == ""  # no docstring of its own; the base's is not the user's
    assert set(document["paths"]) == {"/predict", "/healthz", "/readyz"}
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        value = document
        for key in reference.split("/"):
            value = value[key]  # every reference leads somewhere
    assert document["components"]["schemas"]["DataRequest"]["required"] == ["values"]


def test_annotations_without_a_schema_are_said_at_the_start(load: Callable[[tp.Service], Any]) -> None:
    class A(msgspec.Struct):
        a: int

    class B(msgspec.Struct):
        b: int

    class Either(Plain):
        def decode(self, outputs: Any, request: Any) -> Any:
            return outputs

    Either.decode.__annotations__["return"] = A | B  # JSON can't tell two structs without a tag apart
    with pytest.raises(TargetError, match="have no JSON schema"):
        Answerer(load(Either()))


class Held(OfStruct):
    """Holds the model's thread until the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.release, self.threads = threading.Event(), threading.Event(), set[int]()

    def encode(self, request: StructRequest) -> Any:
        self.threads.add(threading.get_ident())
        if request.values[0] == 42:
            self.entered.set()
            assert self.release.wait(30)
        return super().encode(request)


def test_health_is_answered_while_the_model_is_busy(model_of: ModelOf) -> None:
    service = Held()
    app = create_app(model_of(service))

    async def scenario() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            busy = asyncio.create_task(client.post("/predict", json={"values": [42]}))
            assert await asyncio.to_thread(service.entered.wait, 30)
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 200
            waiting = asyncio.create_task(client.post("/predict", json={"values": [1]}))
            assert not busy.done()
            service.release.set()
            assert (await busy).json() == {"values": [84.0]}
            assert (await waiting).json() == {"values": [2.0]}

    asyncio.run(scenario())
    # The samples were encoded while it was loaded, and both requests since: all on the model's one thread.
    assert len(service.threads) == 1
    assert threading.get_ident() not in service.threads


def test_a_client_that_leaves_does_no_harm(model_of: ModelOf) -> None:
    service = Held()
    app = create_app(model_of(service))

    async def scenario() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            busy = asyncio.create_task(client.post("/predict", json={"values": [42]}))
            assert await asyncio.to_thread(service.entered.wait, 30)
            busy.cancel()  # the server's task ends with it, as when uvicorn gives a request up
            service.release.set()
            assert (await client.post("/predict", json={"values": [1]})).json() == {"values": [2.0]}

    asyncio.run(scenario())


def test_a_client_that_leaves_within_its_body_does_no_harm(model_of: ModelOf) -> None:
    app = create_app(model_of(Plain()))

    async def scenario() -> list[Any]:
        messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
        sent: list[Any] = []

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        return sent

    assert asyncio.run(scenario())[0]["status"] == 499
    assert TestClient(app).post("/predict", json={"values": [1]}).status_code == 200


def test_ready_only_while_the_model_can_answer(model_of: ModelOf) -> None:
    model = Model()
    client = TestClient(create_app(model))
    assert client.get("/healthz").status_code == 200
    for path in ("/readyz", "/openapi.json"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (503, "the model is not loaded yet")
    assert client.post("/predict", json={"values": [1]}).status_code == 503
    assert model.close()

    model = model_of(Plain())
    client = TestClient(create_app(model))
    assert client.get("/readyz").status_code == 200
    assert model.close()  # its thread ends
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["detail"] == "the model's thread has ended"
    assert client.post("/predict", json={"values": [1]}).status_code == 503
