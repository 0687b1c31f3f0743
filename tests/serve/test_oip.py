"""The Open Inference Protocol, held against the bytes that Triton's own client sends and reads."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

import torchproof as tp
from torchproof import __version__
from torchproof.serve.body import DTYPES, Parsed, Schema, TooLargeError, Written
from torchproof.serve.oip import HEADER_LENGTH, model_metadata, parse_infer, server_metadata
from torchproof.target.request import NotJsonError, RequestError
from torchproof.types import InputSpec, OutputSpec, Signature

SIGNATURE = Signature(
    inputs=(
        InputSpec(name="ids", dtype="int64", shape=("length",)),
        InputSpec(name="scale", dtype="float32", shape=()),
    ),
    outputs=(
        OutputSpec(name="a", dtype="float32", shape=("length",)),
        OutputSpec(name="b", dtype="bool", shape=()),
    ),
    call="keyword",
    output_kind="dict",
)


def schema_of(signature: Signature = SIGNATURE) -> Schema:
    return Schema(
        signature=signature,
        service=tp.Service(),
        request_type=Any,
        takes_lists=False,
        max_items=4,
        model_name="net",
    )


def of_one(dtype: str, shape: tuple[int | str, ...] = ("length",), *, batched: bool = True) -> Schema:
    spec = InputSpec(name="x", dtype=dtype, shape=shape)
    output = OutputSpec(name="y", dtype=dtype, shape=shape)
    return schema_of(
        Signature(inputs=(spec,), outputs=(output,), call="keyword", output_kind="tensor", batched=batched)
    )


def sent(
    arrays: dict[str, Any],
    outputs: list[InferRequestedOutput] | None = None,
    *,
    binary: bool = True,
    datatypes: dict[str, str] | None = None,
    **more: Any,
) -> tuple[bytes, int]:
    """What the real client sends."""
    inputs = []
    for name, array in arrays.items():
        datatype = (datatypes or {}).get(name) or DTYPES[str(array.dtype)].v2
        inputs.append(InferInput(name, list(array.shape), datatype).set_data_from_numpy(array, binary_data=binary))
    body, header_length = InferenceServerClient.generate_request_body(inputs, outputs=outputs, **more)
    return body, header_length or 0


def read(written: Written) -> InferResult:
    """What the real client makes of an answer."""
    length = written.headers.get(HEADER_LENGTH)
    return InferenceServerClient.parse_response_body(written.body, header_length=int(length) if length else None)


def values(parsed: Parsed) -> list[dict[str, Any]]:
    assert parsed.requests == []
    return [{name: tensor.tolist() for name, tensor in row.items()} for row in parsed.rows]


ARRAYS = {"ids": np.array([[1, 2, 3], [4, 5, 6]]), "scale": np.array([0.5, 2], "float32")}
ROWS = [{"ids": [1, 2, 3], "scale": 0.5}, {"ids": [4, 5, 6], "scale": 2.0}]
OUTPUTS = [
    {"a": torch.tensor([1.5, 2.0, 3.0]), "b": torch.tensor(True)},
    {"a": torch.tensor([4.0, 5.0, 6.0]), "b": torch.tensor(False)},
]


@pytest.mark.parametrize("binary", [True, False])
def test_the_clients_tensors_become_rows_and_its_answer_is_whole(binary: bool) -> None:
    asked = [InferRequestedOutput("b", binary_data=binary), InferRequestedOutput("a", binary_data=binary)]
    body, header_length = sent(ARRAYS, asked, binary=binary, request_id="7")
    parsed = parse_infer(body, header_length, schema_of())
    assert values(parsed) == ROWS
    with torch.inference_mode():
        written = parsed.write([{name: t.clone() for name, t in row.items()} for row in OUTPUTS])
    assert written.content_type == ("application/octet-stream" if binary else "application/json")
    assert (HEADER_LENGTH in written.headers) is binary
    result = read(written)
    assert result.as_numpy("a").tolist() == [[1.5, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert result.as_numpy("b").tolist() == [True, False]
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("net", "1", "7")
    assert [output["name"] for output in answer["outputs"]] == ["b", "a"]  # in the order asked for
    assert [output["datatype"] for output in answer["outputs"]] == ["BOOL", "FP32"]


def test_rows_can_be_written_to() -> None:
    body, header_length = sent(ARRAYS)
    for row in parse_infer(body, header_length, schema_of()).rows:
        row["ids"] += 1
        assert not row["ids"].is_inference()


def test_all_outputs_come_binary_where_the_client_names_none() -> None:
    body, header_length = sent(ARRAYS)
    written = parse_infer(body, header_length, schema_of()).write(OUTPUTS)
    result = read(written)
    assert result.as_numpy("a").shape == (2, 3)
    assert "id" not in result.get_response()
    assert all("binary_data_size" in output["parameters"] for output in result.get_response()["outputs"])


def test_binary_and_json_mix_in_inputs_and_outputs() -> None:
    inputs = [
        InferInput("scale", [2], "FP32").set_data_from_numpy(ARRAYS["scale"], binary_data=False),
        InferInput("ids", [2, 3], "INT64").set_data_from_numpy(ARRAYS["ids"]),
    ]
    asked = [InferRequestedOutput("a", binary_data=False), InferRequestedOutput("b")]
    body, header_length = InferenceServerClient.generate_request_body(inputs, outputs=asked)
    parsed = parse_infer(body, header_length, schema_of())
    assert values(parsed) == ROWS
    result = read(parsed.write(OUTPUTS))
    assert result.get_output("a")["data"] == [1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert result.as_numpy("b").tolist() == [True, False]


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_dtype_goes_there_and_back(dtype: str, binary: bool) -> None:
    kind = np.dtype(dtype).kind
    ends = {"b": [False, True], "f": [-1.5, 0.25]}.get(kind)
    array = np.array([ends or [np.iinfo(dtype).min, np.iinfo(dtype).max]], dtype)
    asked = [InferRequestedOutput("y", binary_data=binary)]
    body, header_length = sent({"x": array}, asked, binary=binary)
    parsed = parse_infer(body, header_length, of_one(dtype))
    assert parsed.rows[0]["x"].dtype == DTYPES[dtype].torch
    back = read(parsed.write([{"y": parsed.rows[0]["x"]}])).as_numpy("y")
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())


def test_bfloat16_goes_as_binary() -> None:
    array = np.array([[1.5, -2.0]], "float32")
    body, header_length = sent({"x": array}, datatypes={"x": "BF16"})
    parsed = parse_infer(body, header_length, of_one("bfloat16"))
    assert parsed.rows[0]["x"].dtype == torch.bfloat16
    assert read(parsed.write([{"y": parsed.rows[0]["x"]}])).as_numpy("y").tolist() == array.tolist()
    with pytest.raises(RequestError, match="BF16 goes as binary only"):
        parse_infer(as_json([tensor([1, 1], "BF16", [1.5])]), 0, of_one("bfloat16"))


def test_a_model_without_a_batch_dim_takes_its_tensors_whole() -> None:
    schema = of_one("float32", (2, 2), batched=False)
    array = np.arange(4, dtype="float32").reshape(2, 2)
    body, header_length = sent({"x": array})
    parsed = parse_infer(body, header_length, schema)
    assert values(parsed) == [{"x": array.tolist()}]
    assert read(parsed.write([{"y": torch.ones(2, 2)}])).as_numpy("y").shape == (2, 2)


def test_outputs_of_different_shapes_are_no_one_tensor() -> None:
    body, header_length = sent(ARRAYS)
    parsed = parse_infer(body, header_length, schema_of())
    with pytest.raises(ValueError, match="output 'a' has another shape in each row"):
        parsed.write([OUTPUTS[0], OUTPUTS[1] | {"a": torch.ones(2)}])


def test_json_holds_no_nan() -> None:
    """Near miss: binary does."""
    nan = [{"y": torch.tensor([torch.nan])}]
    written = parse_infer(*sent({"x": np.ones((1, 1), "float32")}), of_one("float32")).write(nan)
    assert np.isnan(read(written).as_numpy("y")).all()
    parsed = parse_infer(as_json([tensor([1, 1], "FP32", [1])]), 0, of_one("float32"))
    with pytest.raises(ValueError, match=r"not finite at \$\.outputs\[0\]\.data\[0\]"):
        parsed.write(nan)


def tensor(shape: Any, datatype: str, data: Any = None, name: str = "x", **parameters: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
    if data is not None:
        value["data"] = data
    return value | ({"parameters": parameters} if parameters else {})


def as_json(inputs: list[Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1.0, 2], [3, 4.0]]])
def test_data_is_nested_or_flat(data: list[Any]) -> None:
    parsed = parse_infer(as_json([tensor([2, 2], "FP32", data)]), 0, of_one("float32"))
    assert values(parsed) == [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}]


@pytest.mark.parametrize(
    ("datatype", "dtype", "shape", "data", "message"),
    [
        ("INT64", "float32", [1, 1], [1], "input 'x' is 'INT64'; the model takes FP32"),
        ("BYTES", "float32", [1, 1], ["a"], "input 'x' is 'BYTES'; the model takes FP32"),
        ("FP32", "float32", [1], [1], "input 'x' has 1 dims; the model takes 2"),
        ("FP32", "float32", [1, -1], [1], "a size below 0"),
        ("FP32", "float32", [1, 10**30], [1], "a size below 0 or above"),
        ("FP32", "float32", [1, 1.5], [1], "Expected `int`, got `float`"),
        ("FP32", "float32", [0, 1], [], "input 'x' holds no row"),
        ("FP32", "float32", [1, 2], [1], "has data of shape [1]; its shape is [1, 2]"),
        ("FP32", "float32", [1, 2], [[1], [2]], "has data of shape [2, 1]; its shape is [1, 2]"),
        ("FP32", "float32", [2, 2], [[1, 2], [3]], "input 'x': data: "),
        ("FP32", "float32", [2, 2], [[1, 2], 3], "input 'x': data: Expected `array`"),
        ("FP32", "float32", [1, 1], [[[1]]], "input 'x': data: Expected `float`, got `array`"),
        ("FP32", "float32", [1, 1], 1, "input 'x': data: Expected `array`"),
        ("FP32", "float32", [1, 1], [True], "input 'x': data: Expected `float`, got `bool`"),
        ("FP32", "float32", [1, 1], ["1"], "input 'x': data: Expected `float`, got `str`"),
        ("FP32", "float32", [1, 1], [1e39], "input 'x' has a number too large for FP32"),
        ("FP16", "float16", [1, 1], [70000], "input 'x' has a number too large for FP16"),
        ("INT64", "int64", [1, 1], [1.0], "input 'x': data: Expected `int`, got `float`"),
        ("INT64", "int64", [1, 1], [True], "input 'x': data: Expected `int`, got `bool`"),
        ("INT64", "int64", [1, 1], [2**63], "input 'x': data: Expected `int` <="),
        ("UINT8", "uint8", [1, 1], [-1], "input 'x': data: Expected `int` >= 0"),
        ("UINT8", "uint8", [1, 1], [256], "input 'x': data: Expected `int` <= 255"),
        ("UINT64", "uint64", [1, 1], [2**64], "input 'x': data: "),
        ("BOOL", "bool", [1, 1], [1], "input 'x': data: Expected `bool`, got `int`"),
    ],
)
def test_data_that_does_not_fit_names_the_input(datatype: str, dtype: str, shape: Any, data: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_infer(as_json([tensor(shape, datatype, data)]), 0, of_one(dtype))
    assert message in str(caught.value)


GOOD = tensor([1, 1], "FP32", [1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (as_json([]), "input 'x' is missing; the model has x"),
        (as_json([GOOD | {"name": "z"}]), "input 'z' is unknown; the model has x"),
        (as_json([GOOD, GOOD]), "input 'x' comes twice"),
        (as_json([GOOD], outputs=[{"name": "z"}]), "output 'z' is unknown; the model has y"),
        (as_json([GOOD], outputs=[{"name": "y"}, {"name": "y"}]), "output 'y' comes twice"),
        (
            as_json([GOOD], outputs=[{"name": "y", "parameters": {"classification": 2}}]),
            "output 'y': classification is not supported",
        ),
        (as_json([tensor([1, 1], "FP32", shared_memory_region="r")]), "input 'x': shared memory is not supported"),
        (as_json([tensor([1, 1], "FP32")]), "input 'x' needs data or binary_data_size, one of them"),
        (as_json([GOOD | {"parameters": {"binary_data_size": 4}}]), "input 'x' needs data or binary_data_size"),
        (as_json([tensor([1, 1], "FP32", binary_data_size=4)]), "input 'x' has binary_data_size 4; 0 bytes are left"),
        (b"{}", "not an inference request"),
        (b"[]", "not an inference request"),
        (as_json([{"name": 1}]), "$.inputs[0].name"),
    ],
)
def test_a_request_that_does_not_fit_says_why(body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_infer(body, 0, of_one("float32"))
    assert type(caught.value) is RequestError
    assert message in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b'{"more": ' + b"[" * 100_000, b'{"inputs": NaN}', b'{"id": "\xff"}'])
def test_a_header_that_is_no_json(body: bytes) -> None:
    with pytest.raises(NotJsonError):
        parse_infer(body, 0, of_one("float32"))


@pytest.mark.parametrize(
    ("size", "data", "message"),
    [
        (8, b"\0" * 4, "has binary_data_size 8; 4 bytes are left"),
        (-1, b"\0" * 4, "has binary_data_size -1"),
        (True, b"\0", "has binary_data_size True"),
        ("4", b"\0" * 4, "has binary_data_size '4'"),
        (2**80, b"\0" * 4, "has binary_data_size"),
        (3, b"\0" * 3, "has 3 bytes; float32 of shape [1, 1] has 4"),
        (4, b"\0" * 5, "1 bytes are left over after the last input"),
    ],
)
def test_binary_sizes_are_held_to_the_bytes_that_came(size: Any, data: bytes, message: str) -> None:
    header = as_json([tensor([1, 1], "FP32", binary_data_size=size)])
    with pytest.raises(RequestError) as caught:
        parse_infer(header + data, len(header), of_one("float32"))
    assert message in str(caught.value)


@pytest.mark.parametrize("length", [-1, 10_000])
def test_a_header_length_beyond_the_body_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match=f"{HEADER_LENGTH} is {length}"):
        parse_infer(as_json([GOOD]), length, of_one("float32"))


def test_the_batch_is_capped_before_it_is_read() -> None:
    with pytest.raises(TooLargeError, match="input 'x' has 5 rows; at most 4 are taken at once"):
        parse_infer(as_json([tensor([5, 1], "FP32", ["not read"])]), 0, of_one("float32"))
    assert len(parse_infer(as_json([tensor([4, 1], "FP32", [1] * 4)]), 0, of_one("float32")).rows) == 4


def test_inputs_agree_on_their_sizes() -> None:
    with pytest.raises(RequestError, match="input 'scale' has 3 rows, another input 2"):
        parse_infer(*sent(ARRAYS | {"scale": np.ones(3, "float32")}), schema_of())


def test_an_output_without_a_type_in_the_protocol_is_said_at_once() -> None:
    outputs = (*SIGNATURE.outputs, OutputSpec(name="c", dtype="complex64", shape=()))
    schema = schema_of(msgspec.structs.replace(SIGNATURE, outputs=outputs))
    with pytest.raises(RequestError, match="output 'c' is complex64"):
        parse_infer(*sent(ARRAYS), schema)
    assert parse_infer(*sent(ARRAYS, [InferRequestedOutput("a")]), schema).rows


def test_parameters_that_are_hints_are_let_pass() -> None:
    body, length = sent(ARRAYS, priority=1, timeout=5, parameters={"note": "x"})
    assert values(parse_infer(body, length, schema_of())) == ROWS


def test_metadata_says_what_the_client_needs() -> None:
    assert server_metadata() == {"name": "torchproof", "version": __version__, "extensions": ["binary_tensor_data"]}
    assert model_metadata("net", SIGNATURE) == {
        "name": "net",
        "versions": ["1"],
        "platform": "torchproof",
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "scale", "datatype": "FP32", "shape": [-1]},
        ],
        "outputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "b", "datatype": "BOOL", "shape": [-1]},
        ],
    }
    fixed = of_one("float32", (2, 3), batched=False).signature
    assert model_metadata("net", fixed)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [2, 3]}]


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2), min_size=1, max_size=4), st.booleans()
)
def test_rows_are_split_and_joined_without_a_change(rows: list[list[int]], binary: bool) -> None:
    array = np.array(rows, "int64")
    asked = [InferRequestedOutput("y", binary_data=binary)]
    body, length = sent({"x": array}, asked, binary=binary)
    parsed = parse_infer(body, length, of_one("int64"))
    outputs: list[dict[str, Tensor]] = [{"y": row["x"]} for row in parsed.rows]
    assert read(parsed.write(outputs)).as_numpy("y").tolist() == rows
