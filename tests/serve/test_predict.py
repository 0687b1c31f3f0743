"""A request goes through encode, the model and decode, and every way to get it wrong has its own answer."""

import asyncio
import dataclasses
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import torchproof as tp
from torchproof.errors import TargetError
from torchproof.serve import logs
from torchproof.target.modules import ModuleService
from torchproof.types.serving import CapsAsked

ClientOf = Callable[..., Any]
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
        (1, "Expected `object`"),
        ([1], "item 0: Expected `object`"),
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
    encode: Any, decode: Any, client_of: ClientOf, caplog: pytest.LogCaptureFixture
) -> None:
    service = Broken(encode, decode)
    client = client_of(service)
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


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_413(chunked: bool, client_of: ClientOf) -> None:
    client = client_of(Plain(), asked=CapsAsked(max_body_bytes=20))
    body = json.dumps({"values": [1] * 20}).encode()
    answer = client.post("/predict", content=chunks(body[:5], body[5:]) if chunked else body)
    assert (answer.status_code, answer.headers["content-type"]) == (413, PROBLEM)
    assert "at most 20 are taken" in answer.json()["detail"]
    assert client.post("/predict", content=b'{"values": [1.0000]}').status_code == 200  # 20 bytes
    assert client.dispatcher.depth == 0
    assert (client.count("too_large"), client.count("ok")) == (1, 1)


def test_a_body_above_the_limit_is_not_read(client_of: ClientOf) -> None:
    """Neither after its declared length nor after the chunk that goes over it."""
    client = client_of(Plain(), asked=CapsAsked(max_body_bytes=20))
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            read.append(b"x" * 15)
            yield read[-1]

    assert client.post("/predict", content=body(), headers={"content-length": "21"}).status_code == 413
    assert read == []
    assert client.post("/predict", content=body()).status_code == 413
    assert len(read) <= 3


def test_what_is_larger_than_the_model_takes_is_413(client_of: ClientOf) -> None:
    client = client_of(Plain(), asked=CapsAsked(max_items=2, max_sizes={"length": 3}))
    for body, message in [
        ({"values": [1] * 4}, "length is 4; at most 3 is taken"),
        ([{"values": [1]}, {"values": [1] * 4}], "length is 4 in item 1; at most 3 is taken"),
        ([{"values": [1]}] * 3, "the list has 3 items; at most 2 are taken at once"),
    ]:
        answer = client.post("/predict", json=body)
        assert (answer.status_code, answer.headers["content-type"]) == (413, PROBLEM)
        assert message in answer.json()["detail"]
    many_bytes = b'{"values": [1]' + b" " * client.supervisor.facts.caps.max_item_bytes + b"}"
    answer = client.post("/predict", content=many_bytes)  # a list of them could be so long
    assert (answer.status_code, answer.json()["title"]) == (413, HTTPStatus.REQUEST_ENTITY_TOO_LARGE.phrase)
    assert client.post("/predict", json=[{"values": [1]}, {"values": [1, 2, 3]}]).status_code == 200


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
    assert {"/predict", "/healthz", "/readyz", "/v2/models/net/infer"} < set(document["paths"])
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        value = document
        for key in reference.split("/"):
            value = value[key]  # every reference leads somewhere
    assert document["components"]["schemas"]["DataRequest"]["required"] == ["values"]


def test_annotations_without_a_schema_are_said_at_the_start(client_of: ClientOf) -> None:
    class A(msgspec.Struct):
        a: int

    class B(msgspec.Struct):
        b: int

    class Either(Plain):
        def decode(self, outputs: Any, request: Any) -> Any:
            return outputs

    Either.decode.__annotations__["return"] = A | B  # JSON can't tell two structs without a tag apart
    with pytest.raises(TargetError, match="have no JSON schema"):
        client_of(Either())


def test_a_list_is_answered_in_its_order_and_in_shared_forwards(client_of: ClientOf) -> None:
    rows: list[int] = []

    class Counted(Double):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            return x * 2

    class Counting(OfStruct):
        def load(self) -> nn.Module:
            return Counted()

    client = client_of(Counting())
    rows.clear()
    answer = client.post("/predict", json=[{"values": [n, n]} for n in range(5)])
    assert answer.json() == [{"values": [2.0 * n, 2.0 * n]} for n in range(5)]
    assert sum(rows) == 5


def test_one_bad_item_refuses_the_list_by_its_number(client_of: ClientOf) -> None:
    answer = client_of(OfStruct()).post("/predict", json=[{"values": [1]}, {"values": ["two"]}])
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("item 1: ")
    assert "values" in answer.json()["detail"]


def test_tensors_are_answered_as_tensors(client_of: ClientOf) -> None:
    client = client_of(Plain())
    sent = torch.tensor([1.0, 2.0, 3.0])
    headers = {"content-type": "application/vnd.safetensors"}
    answer = client.post("/predict", content=save({"x": sent}), headers=headers)
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    assert load(answer.content)["output"].equal(2 * sent)
    file = io.BytesIO()
    np.save(file, sent.numpy())
    answer = client.post("/predict", content=file.getvalue(), headers={"content-type": "application/x-npy"})
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.load(io.BytesIO(answer.content)).tolist() == [2.0, 4.0, 6.0]


def test_the_open_inference_protocol_answers_in_its_own_form(client_of: ClientOf) -> None:
    client = client_of(Plain())
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
    for path in ("/v2/models/net/infer", "/v2/models/net/versions/1/infer"):
        answer = client.post(path, json={"id": "a", "inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
        assert (answer.json()["id"], answer.json()["model_name"]) == ("a", "net")
    assert client.get("/v2/models/net").json()["inputs"][0]["name"] == "x"
    assert client.get("/v2").json()["name"] == "torchproof"
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/net/ready", "/v2/models/net/versions/1/ready"):
        assert client.get(path).status_code == 200
    assert client.count("ok", "/v2/models/{name}/infer") == 2
    for method, path, status in [
        ("GET", "/v2/models/net/infer", 405),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/net/versions/2/ready", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/net/versions/2/infer", 404),
        ("POST", "/v2/models/net/infer", 400),
    ]:
        answer = client.run(client.http.request(method, path))
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), path


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/predict", {"x-deadline": "soon"}, 400),
        ("/predict", {"x-deadline": "0"}, 400),
        ("/predict", {"x-deadline": "nan"}, 400),
        ("/predict", {"x-deadline": "inf"}, 200),  # it can shorten the deadline only
        ("/predict", {"x-deadline": "5"}, 200),
        ("/predict", {"content-encoding": "gzip"}, 415),
        ("/predict", {"content-encoding": "identity"}, 200),
        ("/v2/models/net/infer", {"inference-header-content-length": "-1"}, 400),
        ("/v2/models/net/infer", {"inference-header-content-length": "9" * 5000}, 400),
    ],
)
def test_headers_that_cannot_be_kept_are_refused(
    path: str, headers: dict[str, str], status: int, client_of: ClientOf
) -> None:
    client = client_of(Plain())
    answer = client.post(path, content=b'{"values": [1]}', headers=headers)
    assert answer.status_code == status
    assert client.dispatcher.depth == 0


def test_a_request_has_one_id_in_the_answer_and_in_the_log(
    client_of: ClientOf, caplog: pytest.LogCaptureFixture
) -> None:
    service = Broken(raising(KeyError("secret")))
    client = client_of(service)
    answer = client.post("/predict", json={"values": [1]}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert len(client.post("/predict", json={}, headers={"x-request-id": "a b"}).headers["x-request-id"]) == 16
    service.armed = True
    ids: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        ids.append(logs.current_request.get())
        return True

    caplog.handler.addFilter(note)
    client.post("/predict", json={"values": [1]}, headers={"x-request-id": "mine-2"})
    assert ids == ["mine-2", "mine-2"]  # the traceback, and how it ended


def test_only_who_has_a_key_is_answered(client_of: ClientOf, tmp_path: Path) -> None:
    """A probe has none; the answer never says a key."""
    file = tmp_path / "keys.txt"
    file.write_text("of-the-first-client\n")
    client = client_of(Plain(), keys=file)
    body = {"values": [1]}
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert client.get(path).status_code == 200
    for path in ("/docs", "/metrics", "/openapi.json", "/v2/models/net", "/nothing"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert client.get(path, headers={"x-api-key": "of-the-first-client"}).status_code != 401
    for headers in ({}, {"authorization": "Bearer another"}, {"x-api-key": ""}):
        answer = client.post("/predict", json=body, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "of-the-first-client" not in answer.text
    for headers in ({"authorization": "Bearer of-the-first-client"}, {"x-api-key": "of-the-first-client"}):
        assert client.post("/predict", json=body, headers=headers).status_code == 200

    file.write_text("of-the-second-client\n")
    second = {"x-api-key": "of-the-second-client"}
    assert client.post("/admin/reload", headers={"x-api-key": "of-the-first-client"}).status_code == 200
    assert client.post("/predict", json=body, headers=second).status_code == 200
    file.unlink()
    answer = client.post("/admin/reload", headers=second)
    assert (answer.status_code, answer.headers["content-type"]) == (409, PROBLEM)
    assert client.post("/predict", json=body, headers=second).status_code == 200  # those read before stay


def test_a_reload_switches_once_the_new_one_is_proven(client_of: ClientOf, tmp_path: Path) -> None:
    class Triple(Plain):
        def load(self) -> nn.Module:
            return Threefold()

    class Threefold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    file = tmp_path / "keys.txt"
    file.write_text("a-key-of-the-test\n")
    client = client_of(Plain(), keys=file)
    key = {"x-api-key": "a-key-of-the-test"}

    def answer() -> Any:
        return client.post("/predict", json={"values": [1]}, headers=key).json()

    client.service = Broken(raising(KeyError("nothing")))
    client.service.armed = True
    failed = client.post("/admin/reload", headers=key)
    assert failed.status_code == 409
    assert "what was served before goes on" in failed.json()["detail"]
    assert answer() == {"values": [2.0]}
    assert client.get("/readyz").status_code == 200
    client.service = Triple()
    assert client.post("/admin/reload", headers=key).status_code == 200
    assert answer() == {"values": [3.0]}
    assert len(client.dispatcher.holders) == 1


def test_reloading_over_http_needs_keys(client_of: ClientOf) -> None:
    """Else whoever can ask the model could make the server load it again and again."""
    answer = client_of(Plain()).post("/admin/reload")
    assert (answer.status_code, answer.headers["content-type"]) == (403, PROBLEM)


def test_a_full_queue_is_429_and_says_when_to_come_again(client_of: ClientOf) -> None:
    client = client_of(Plain(), max_queue=2)

    async def scenario() -> Any:
        return await asyncio.gather(*(client.http.post("/predict", json={"values": [n]}) for n in range(5)))

    answers = client.run(scenario())
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers[2:])
    assert [answer.json()["values"] for answer in answers[:2]] == [[0.0], [2.0]]
    assert client.count("refused_queue_full") == 3
    assert client.post("/predict", json={"values": [1]}).status_code == 200


def test_requests_that_come_together_get_their_own_answers(client_of: ClientOf) -> None:
    """Also: what one ``decode`` changes in place is not seen by the request beside it."""

    class InPlace(OfStruct):
        def decode(self, outputs: Tensor, request: StructRequest) -> StructRequest:
            return super().decode(outputs.add_(request.values[0]), request)

    client = client_of(InPlace(), max_queue=64)

    async def scenario() -> Any:
        return await asyncio.gather(*(client.http.post("/predict", json={"values": [n, 1]}) for n in range(32)))

    assert [answer.json()["values"] for answer in client.run(scenario())] == [[3.0 * n, 2.0 + n] for n in range(32)]


async def ask(app: Any, *messages: dict[str, Any], headers: tuple[tuple[bytes, bytes], ...] = ()) -> list[Any]:
    """What the app sends to a client that sends these."""
    coming = iter(messages)
    sent: list[Any] = []

    async def receive() -> Any:
        for message in coming:
            return message
        return await asyncio.Event().wait()  # nothing more comes

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return sent


def test_a_client_that_leaves_does_no_harm(client_of: ClientOf) -> None:
    client = client_of(Plain())

    async def scenario() -> None:
        leaving = asyncio.create_task(client.http.post("/predict", json={"values": [42]}))
        while not client.dispatcher.depth:
            await asyncio.sleep(0)
        leaving.cancel()  # the server's task ends with it, as when uvicorn gives a request up
        assert (await client.http.post("/predict", json={"values": [1]})).json() == {"values": [2.0]}

    client.run(scenario())
    assert client.dispatcher.depth == 0


def test_a_client_that_leaves_within_its_body_does_no_harm(client_of: ClientOf) -> None:
    client = client_of(Plain())
    leaves: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    assert client.run(ask(client.app, *leaves)) == []
    assert client.dispatcher.depth == 0
    assert client.count("disconnected") == 1
    assert client.post("/predict", json={"values": [1]}).status_code == 200


def test_an_answer_counts_though_it_could_not_be_sent(client_of: ClientOf) -> None:
    """It is sent first and counted then, whether the client could still take it or not."""
    client = client_of(Plain())
    body = {"type": "http.request", "body": b'{"values": [1]}', "more_body": False}

    async def receive() -> dict[str, Any]:
        return body

    async def send(message: dict[str, Any]) -> None:
        assert client.dispatcher.depth == 0
        raise ConnectionResetError("it has hung up")

    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
    with pytest.raises(ConnectionResetError):
        client.run(client.app(scope, receive, send))
    assert client.count("ok") == 1


@pytest.mark.parametrize(("deadline_s", "header"), [(0.01, None), (0.01, b"60"), (60, b"0.01")])
def test_a_body_that_never_ends_is_408_at_the_deadline(
    deadline_s: float, header: bytes | None, client_of: ClientOf
) -> None:
    """The header can shorten the deadline, never put it off."""
    client = client_of(Plain(), deadline_s=deadline_s)
    headers = ((b"x-deadline", header),) if header is not None else ()
    begins = {"type": "http.request", "body": b"{", "more_body": True}
    start, body = client.run(asyncio.wait_for(ask(client.app, begins, headers=headers), 30))
    assert start["status"] == 408
    assert b"did not come before the deadline" in body["body"]
    assert client.dispatcher.depth == 0


def test_ready_only_while_the_model_can_answer(client_of: ClientOf) -> None:
    client = client_of(Plain(), start=False)
    assert client.get("/healthz").status_code == 200
    assert client.get("/docs").status_code == 200
    for path in ("/readyz", "/openapi.json"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (503, "the model is not loaded yet")
    for path in ("/v2", "/v2/health/ready", "/v2/models/net", "/v2/models/net/ready"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"error": "the model is not loaded yet"})
    answer = client.post("/predict", json={"values": [1]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    client.start()
    assert client.get("/readyz").status_code == 200
    client.dispatcher.closed = "the server is stopping"
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["detail"] == "the server is stopping"
    assert client.post("/predict", json={"values": [1]}).status_code == 503
    assert client.count("not_ready") == 2


def test_a_model_that_goes_wrong_is_loaded_again(client_of: ClientOf) -> None:
    """Weights that were overwritten give NaN; no such answer goes out, and the next request finds one that works."""
    modules: list[nn.Linear] = []

    class Weighty(Plain):
        def load(self) -> nn.Module:
            torch.manual_seed(0)
            modules.append(nn.Linear(2, 2))
            return modules[-1]

        variable_dims = {}

        def samples(self) -> Iterable[Any]:
            return [{"values": [1.0, 2.0]}, {"values": [3.0, 4.0]}]

        def encode(self, request: Any) -> Any:
            return torch.tensor(request["values"], dtype=torch.float32)

    client = client_of(Weighty())
    before = client.post("/predict", json={"values": [1, 2]}).json()
    with torch.no_grad():
        modules[-1].weight.fill_(float("nan"))

    async def scenario() -> None:
        wrong = await client.http.post("/predict", json={"values": [1, 2]})
        assert (wrong.status_code, wrong.json()["detail"]) == (503, "the model gives wrong answers")
        while client.dispatcher.unready:
            await asyncio.sleep(0)
        assert (await client.http.post("/predict", json={"values": [1, 2]})).json() == before

    client.run(scenario())
    assert len(modules) == 2
