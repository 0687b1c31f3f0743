"""Triton's own client, unchanged, against a real server."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from torchproof import __version__

APP = """
import torch
import torchproof as tp

class Net(torch.nn.Module):
    def forward(self, ids, scale):
        scaled = ids.float() * scale.unsqueeze(-1)
        return {"scaled": scaled, "positive": scaled.sum(-1) > 0}

class Scale(tp.Service):
    variable_dims = {"ids": {0: "length"}}
    def load(self):
        return Net()
    def encode(self, request: dict[str, float]):
        return {"ids": torch.arange(int(request["length"])), "scale": torch.tensor(request["scale"])}
    def decode(self, outputs, request) -> list[float]:
        return outputs["scaled"].tolist()
    def samples(self):
        return [{"length": 2.0, "scale": 0.5}, {"length": 3.0, "scale": -2.0}]
"""
IDS = np.array([[1, 2, 3], [4, 5, 6]])
SCALE = np.array([2, -0.5], "float32")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]) -> Iterator[InferenceServerClient]:
    folder = tmp_path_factory.mktemp("triton")
    (folder / "app.py").write_text(APP)
    with start("app.py", "--replicas", "2", cwd=folder) as server:
        client = InferenceServerClient(urlsplit(server.ready()["url"]).netloc, network_timeout=90)
        yield client
        client.close()


def inputs(*, binary: bool, ids: np.ndarray = IDS, scale: np.ndarray = SCALE) -> list[InferInput]:
    made = []
    for name, array, datatype in (("ids", ids, "INT64"), ("scale", scale, "FP32")):
        made.append(InferInput(name, list(array.shape), datatype))
        made[-1].set_data_from_numpy(array, binary_data=binary)
    return made


def test_health_and_metadata(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("app")
    assert client.is_model_ready("app", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("app", "2")
    assert client.get_server_metadata() == {
        "name": "torchproof",
        "version": __version__,
        "extensions": ["binary_tensor_data"],
    }
    assert client.get_model_metadata("app") == {
        "name": "app",
        "versions": ["1"],
        "platform": "torchproof",
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "scale", "datatype": "FP32", "shape": [-1]},
        ],
        "outputs": [
            {"name": "scaled", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "positive", "datatype": "BOOL", "shape": [-1]},
        ],
    }


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_infer(client: InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    """Rows in a batch, tensors as JSON or as bytes, either way."""
    outputs = [InferRequestedOutput(name, binary_data=binary_out) for name in ("positive", "scaled")]
    result = client.infer("app", inputs(binary=binary_in), outputs=outputs, request_id="mine")
    np.testing.assert_array_equal(result.as_numpy("scaled"), IDS * SCALE[:, None])
    np.testing.assert_array_equal(result.as_numpy("positive"), [True, False])
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("app", "1", "mine")
    assert [output["name"] for output in response["outputs"]] == ["positive", "scaled"]


def test_infer_without_outputs_and_with_a_version(client: InferenceServerClient) -> None:
    """The client then asks for all of them as bytes."""
    result = client.infer("app", inputs(binary=True), model_version="1")
    np.testing.assert_array_equal(result.as_numpy("scaled"), IDS * SCALE[:, None])
    np.testing.assert_array_equal(result.as_numpy("positive"), [True, False])


def test_requests_in_flight_at_once_get_their_own_answers(client: InferenceServerClient) -> None:
    asked = [client.async_infer("app", inputs(binary=True, ids=IDS + 100 * number)) for number in range(16)]
    for number, result in enumerate(asked):
        np.testing.assert_array_equal(result.get_result().as_numpy("scaled"), (IDS + 100 * number) * SCALE[:, None])


@pytest.mark.parametrize(("compression", "status"), [(None, "422"), ("gzip", "415"), ("deflate", "415")])
def test_errors_are_raised_with_what_the_server_says(
    client: InferenceServerClient, compression: str | None, status: str
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer("app", inputs(binary=True)[:1], request_compression_algorithm=compression)
    assert raised.value.status() == status
    assert "scale" in raised.value.message() or "content encoding" in raised.value.message()


def test_another_model_or_version_is_not_this_one(client: InferenceServerClient) -> None:
    for name, version in (("other", ""), ("app", "2")):
        with pytest.raises(InferenceServerException) as raised:
            client.infer(name, inputs(binary=True), model_version=version)
        assert raised.value.status() == "404"
