"""Bodies: what fits the model becomes requests or tensors, whatever else becomes one RequestError that says why."""

import io
import json
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

import torchproof as tp
from torchproof.serve.formats import JSON, NPY, SAFETENSORS, Schema, TooLargeError, parse, takes_lists
from torchproof.serve.openapi import document
from torchproof.serve.wire import Format, Job
from torchproof.target.modules import ModuleService
from torchproof.target.request import NotJsonError, RequestError, request_type
from torchproof.types import InputSpec, OutputSpec, Signature
from torchproof.types.serving import Caps

ONE = Signature(
    inputs=(InputSpec(name="x", dtype="float32", shape=("length", 2)),),
    outputs=(OutputSpec(name="output", dtype="float32", shape=("length",)),),
    call="keyword",
    output_kind="tensor",
)
TWO = Signature(
    inputs=(
        InputSpec(name="ids", dtype="int64", shape=("length",)),
        InputSpec(name="mask", dtype="bool", shape=("length",)),
    ),
    outputs=(
        OutputSpec(name="a", dtype="float32", shape=(2,)),
        OutputSpec(name="b", dtype="bfloat16", shape=()),
    ),
    call="keyword",
    output_kind="dict",
)


@dataclass
class Text:
    text: str


class OfText(tp.Service):
    def encode(self, request: Text) -> Any:
        raise NotImplementedError

    def decode(self, outputs: Tensor, request: Text) -> list[float]:
        raise NotImplementedError


class Bare(tp.Service):
    """Annotated with nothing."""


def schema_of(signature: Signature = ONE, service: tp.Service | None = None, **more: Any) -> Schema:
    service = service or OfText()
    known = {"request_type": request_type(service), "takes_lists": True, "max_items": 3}
    return Schema(signature=signature, service=service, **(known | more))


def job(body: bytes, format: Format = "json", header_length: int = 0) -> Job:
    return Job(id=1, format=format, body=body, deadline=0.0, header_length=header_length)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_of(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1") + data


def safetensors_of(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(body: bytes, format: Format, schema: Schema, header_length: int = 0) -> str:
    with pytest.raises(RequestError) as caught:
        parse(job(body, format, header_length), schema)
    assert type(caught.value) is RequestError
    return str(caught.value)


def test_one_request_answers_one_response() -> None:
    parsed = parse(job(b'{"text": "a"}'), schema_of())
    assert (parsed.requests, parsed.rows) == ([Text("a")], [])
    assert parsed.write([{"n": 1}]) == (b'{"n":1}', JSON, {})


def test_a_list_of_requests_answers_a_list_in_order() -> None:
    parsed = parse(job(b' \n[{"text": "a"}, {"text": "b"}]'), schema_of())
    assert parsed.requests == [Text("a"), Text("b")]
    assert parsed.write([torch.tensor([1.0]), 2]).body == b"[[1.0],2]"
    assert parse(job(b'[{"text": "a"}]'), schema_of()).write([1]).body == b"[1]"  # a list of one stays a list


def test_where_requests_are_arrays_an_array_is_one_request() -> None:
    schema = schema_of(request_type=list[float], takes_lists=False)
    parsed = parse(job(b"[1, 2, 3, 4]"), schema)
    assert parsed.requests == [[1.0, 2.0, 3.0, 4.0]]
    assert parsed.write([5]).body == b"5"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{", NotJsonError, "not JSON"),
        (b"", NotJsonError, "not JSON"),
        (b"[" * 100_000, NotJsonError, "not JSON"),
        (b'{"text": ' * 100_000, NotJsonError, "not JSON"),
        (b'[{"text": "a"}', NotJsonError, "not JSON"),
        (b'[{"text": "\xff"}]', NotJsonError, "item 0: not JSON"),
        (b'{"text": NaN}', NotJsonError, "not JSON"),
        (b'{"text": 1}', RequestError, "$.text"),
        (b'[{"text": "a"}, {"txt": "b"}]', RequestError, "item 1: .*text"),
        (b"[]", RequestError, "the list is empty"),
        (b"[1,2,3,4]", TooLargeError, "the list has 4 items; at most 3 are taken at once"),  # before any is converted
        (b'{"text": "' + b"a" * 100 + b'"}', TooLargeError, "the request has 112 bytes; at most 100"),
        (b'[{"text": "' + b"a" * 100 + b'"}]', TooLargeError, "item 0: the request has 112 bytes; at most 100"),
    ],
)
def test_json_that_is_no_request_is_refused_with_its_place(body: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("$.", r"\$\.")) as caught:
        parse(job(body), schema_of(max_item_bytes=None if len(body) > 1000 else 100))
    assert type(caught.value) is kind


def test_a_response_that_is_not_finite_is_refused_when_it_is_written() -> None:
    parsed = parse(job(b'[{"text": "a"}, {"text": "b"}]'), schema_of())
    with pytest.raises(ValueError, match=r"not finite at \$\[1\]\[0\]"):
        parsed.write([[1.0], [float("nan")]])


class Typed(TypedDict):
    text: str


class Pair(NamedTuple):
    a: int
    b: int


class Packed(msgspec.Struct, array_like=True):
    a: int


class Model(pydantic.BaseModel):
    text: str


class Numbers(pydantic.RootModel[list[float]]):
    pass


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (Text, True),
        (Typed, True),
        (Model, True),
        (dict[str, Any], True),
        (str, True),
        (float, True),
        (Literal["a", "b"], True),
        (Text | None, True),
        (list[float], False),
        (tuple[int, int], False),
        (Pair, False),
        (Packed, False),
        (Numbers, False),
        (str | list[str], False),
        (object, False),
        (Tensor, False),
    ],
)
def test_lists_of_requests_are_taken_only_where_no_request_is_an_array(type_: Any, expected: bool) -> None:
    service = Bare()
    service.encode = lambda request: None  # type: ignore[method-assign]
    service.encode.__annotations__["request"] = type_
    assert takes_lists(service, []) is expected


@pytest.mark.parametrize(
    ("examples", "expected"),
    [([{"a": 1}], True), (["a"], True), ([], False), ([[1.0]], False), ([(1,)], False), ([torch.ones(1)], False)],
)
def test_without_an_annotation_the_samples_decide(examples: list[Any], expected: bool) -> None:
    assert takes_lists(Bare(), examples) is expected


def test_a_bare_module_takes_lists() -> None:
    assert takes_lists(ModuleService(nn.Identity(), [torch.ones(1, 2)]), [])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(3, 2),
        np.asfortranarray(np.arange(6, dtype="<f4").reshape(3, 2)),
        np.arange(6, dtype=">f4").reshape(3, 2),
        np.asfortranarray(np.arange(6, dtype=">f4").reshape(3, 2)),
        np.zeros((0, 2), "<f4"),
    ],
)
def test_npy_is_the_tensor_of_a_model_with_one_input(array: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a buffer that can't be written
        parsed = parse(job(npy(array), "npy"), schema_of())
    (row,) = parsed.rows
    assert parsed.requests == []
    assert row["x"].tolist() == array.tolist()
    row["x"] += 1
    assert not row["x"].is_inference()
    body, content_type, headers = parsed.write([{"output": torch.tensor([1.5, 2.5])}])
    assert np.load(io.BytesIO(body)).tolist() == [1.5, 2.5]
    assert (content_type, headers) == (NPY, {})


@pytest.mark.parametrize(
    "outputs", [{"a": torch.ones(2), "b": torch.ones(())}, {"a": torch.ones(2, dtype=torch.bfloat16)}]
)
def test_what_npy_has_no_form_for_is_answered_as_safetensors(outputs: dict[str, Tensor]) -> None:
    body, content_type, _ = parse(job(npy(np.ones((1, 2), "f4")), "npy"), schema_of()).write([outputs])
    assert content_type == SAFETENSORS
    assert {name: t.dtype for name, t in load(body).items()} == {name: t.dtype for name, t in outputs.items()}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not npy"),
        (b"\x93NUMPY\x09\x00", "npy version (9, 0) holds no plain tensor"),
        (b"\x93NUMPY\x01\x00\xff", "not npy"),
        (npy(np.ones((1, 2), "f8")), "'float64'; the model takes float32"),
        (npy(np.ones((1, 2), "i4")), "'int32'; the model takes float32"),
        (npy(np.ones((1, 3), "f4")), "dim 1 of input 'x' is 3; the model takes 2"),
        (npy(np.ones(2, "f4")), "input 'x' has 1 dims; the model takes 2"),
        (npy(np.ones((1, 2), "f4"))[:-1], "has 7 bytes; float32 of shape [1, 2] has 8"),
        (npy(np.ones((1, 2), ">f4"))[:-1], "has 4 bytes; float32 of shape [1, 2] has 8"),
        (npy(np.ones((1, 2), "f4")) + b"\0", "has 9 bytes; float32 of shape [1, 2] has 8"),
        (npy(np.array([[{}, {}]], dtype=object)), "the model takes float32"),  # a pickle, which is not opened
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2)}"), "has 0 bytes"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2)}", b"\0" * 8), "a size below 0"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2)}", b"\0" * 8), "has 8 bytes"),
        (npy_of(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30})}}"), "a size below 0 or above"),
        (npy_of("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1, 2)}"), "the model takes float32"),
        (npy_of("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1, 2)}"), "the model takes float32"),
        (npy_of("(" * 3000), "not npy"),
        (npy_of("__import__('os').abort()"), "not npy"),
    ],
)
def test_npy_that_does_not_fit_is_refused(body: bytes, message: str) -> None:
    assert message in refused(body, "npy", schema_of())


def test_npy_for_two_inputs_names_them() -> None:
    message = refused(npy(np.ones((1, 2), "f4")), "npy", schema_of(TWO))
    assert message == "npy holds one tensor; the model takes ids, mask"


@pytest.mark.parametrize("format", ["npy", "safetensors"])
def test_one_request_of_tensors_is_held_to_its_bytes(format: Format) -> None:
    with pytest.raises(TooLargeError, match="the request has 200 bytes; at most 199"):
        parse(job(b"\0" * 200, format), schema_of(max_item_bytes=199))


def test_safetensors_hold_each_input_by_its_name() -> None:
    sent = {"ids": torch.tensor([1, 2, 3]), "mask": torch.tensor([True, False, True])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = parse(job(save(sent), "safetensors"), schema_of(TWO))
    (row,) = parsed.rows
    assert {name: (t.dtype, t.tolist()) for name, t in row.items()} == {
        name: (t.dtype, t.tolist()) for name, t in sent.items()
    }
    row["ids"] += 1
    with torch.inference_mode():
        whole = torch.arange(4.0).reshape(2, 2)
        body, content_type, headers = parsed.write([{"a": whole.T[0], "b": whole[0]}])  # views of one memory
    assert {name: t.tolist() for name, t in load(body).items()} == {"a": [0.0, 2.0], "b": [0.0, 1.0]}
    assert (content_type, headers) == (SAFETENSORS, {})


IDS, MASK = torch.tensor([1, 2]), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not safetensors"),
        (b"\xff" * 30, "not safetensors"),
        (save({"ids": IDS, "mask": MASK})[:-1], "not safetensors"),
        (save({"ids": IDS}), "the body holds ['ids']; the model takes ids, mask"),
        (save({"ids": IDS, "mask": MASK, "more": MASK.clone()}), "the body holds ['ids', 'mask', 'more']"),
        (save({"ids": IDS, "mask": MASK.byte()}), "input 'mask' is U8; the model takes BOOL"),
        (save({"ids": IDS.int(), "mask": MASK}), "input 'ids' is I32; the model takes I64"),
        (save({"ids": IDS, "mask": MASK[:1]}), "dim 0 of input 'mask' is 1; the model takes 2, as 'length' is 2"),
        (save({"ids": IDS[None], "mask": MASK}), "input 'ids' has 2 dims; the model takes 1"),
        (
            safetensors_of(
                {
                    "ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
                    "mask": {"dtype": "BOOL", "shape": [1], "data_offsets": [8, 9]},
                },
                b"\0" * 8 + b"\2",
            ),
            "input 'mask' has a byte other than 0 and 1",
        ),
        (safetensors_of({"ids": {"dtype": "I64", "shape": [10**15], "data_offsets": [0, 8]}}, b"\0" * 8), "not safe"),
        (safetensors_of({"ids": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}, b"\0" * 8), "not safe"),
        (safetensors_of({"ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 10**15]}}), "not safetensors"),
        (safetensors_of({"ids": {"dtype": "WHAT", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8), "not safe"),
    ],
)
def test_safetensors_that_do_not_fit_are_refused(body: bytes, message: str) -> None:
    assert message in refused(body, "safetensors", schema_of(TWO))


def test_a_dtype_that_no_format_has_is_said() -> None:
    spec = InputSpec(name="x", dtype="complex64", shape=(1,))
    signature = msgspec.structs.replace(ONE, inputs=(spec,))
    assert "'x' is complex64" in refused(npy(np.ones(1, "c8")), "npy", schema_of(signature))


def test_nan_in_a_binary_tensor_is_the_clients_own() -> None:
    """Near miss: JSON has no NaN, but a binary tensor does, in both directions."""
    parsed = parse(job(npy(np.full((1, 2), np.nan, "f4")), "npy"), schema_of())
    assert parsed.rows[0]["x"].isnan().all()
    assert np.isnan(np.load(io.BytesIO(parsed.write([{"output": torch.tensor([torch.nan])}]).body))).all()


# Bodies that are almost right: every byte of a good one may be another, and it may end early.
GOOD: dict[Format, list[bytes]] = {
    "json": [b'{"text": "a"}', b'[{"text": "a"}, {"text": "b"}]'],
    "npy": [npy(np.ones((3, 2), "f4"))],
    "safetensors": [save({"x": torch.ones(3, 2)})],
    "v2": [
        b'{"inputs": [{"name": "x", "shape": [1, 1, 2], "datatype": "FP32", "data": [1, 2]}]}',
        b'{"inputs":[{"name":"x","shape":[1,1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}' + b"\0" * 8,
    ],
}


@st.composite
def damaged(draw: Callable[..., Any]) -> Job:
    format = draw(st.sampled_from(sorted(GOOD)))
    body = bytearray(draw(st.sampled_from(GOOD[format])))
    for _ in range(draw(st.integers(0, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    length = 95 if body.endswith(b"\0" * 8) and format == "v2" else 0
    return job(bytes(body[: draw(st.integers(0, len(body)))]), format, length)


@given(
    damaged()
    | st.builds(job, st.binary(max_size=200), st.sampled_from(sorted(GOOD)), st.integers(-(2**40), 2**40))
    | st.builds(
        lambda value, format: job(msgspec.json.encode(value), format),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["text", "inputs", "x", "shape"]), inner),
        ),
        st.sampled_from(["json", "v2"]),
    )
)
def test_nothing_but_a_request_error_comes_of_any_body(sent: Job) -> None:
    schema = schema_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (SyntaxWarning, DeprecationWarning))  # of literals in an npy header
        warnings.simplefilter("ignore", UserWarning)  # numpy's, of an npy header that Python 2 wrote
        message = ""
        try:
            parsed = parse(sent, schema)
        except RequestError as exc:
            message = str(exc)
    if message:
        assert len(message) < 1000
        return
    assert all(isinstance(request, Text) for request in parsed.requests)
    assert all(row["x"].dtype == torch.float32 and row["x"].shape[1:] == (2,) for row in parsed.rows)
    assert bool(parsed.requests) != bool(parsed.rows)


shapes = st.lists(st.integers(-3, 3) | st.integers(-(2**70), 2**70), max_size=4)


@given(shapes, st.binary(max_size=40), st.sampled_from(["npy", "safetensors", "v2", "v2 binary"]))
def test_no_declared_shape_is_believed(shape: list[int], data: bytes, how: str) -> None:
    header_length = 0
    if how == "npy":
        text = "".join(f"{size}," for size in shape)
        body = npy_of(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({text})}}", data)
    elif how == "safetensors":
        body = safetensors_of({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}, data)
    else:
        spec: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": shape}
        spec |= {"parameters": {"binary_data_size": len(data)}} if "binary" in how else {"data": list(data)}
        body = json.dumps({"inputs": [spec]}).encode()
        if "binary" in how:
            header_length = len(body)
            body += data
    try:
        rows = parse(job(body, how.split()[0], header_length), schema_of()).rows  # type: ignore[arg-type]
    except RequestError:
        return
    assert sum(row["x"].numel() for row in rows) == (len(data) if how == "v2" else len(data) // 4)


CAPS = Caps(max_body_bytes=2**20, max_item_bytes=2**19, max_items=3, max_sizes={"length": 77})


def the_document(service: tp.Service, signature: Signature = ONE, *, lists: bool = True) -> dict[str, Any]:
    text = document(service, "app", [Text("a")], caps=CAPS, takes_lists=lists, model_name="net", signature=signature)
    value: dict[str, Any] = json.loads(text)
    return value


def test_the_document_says_what_is_taken() -> None:
    whole = the_document(OfText())
    predict = whole["paths"]["/predict"]["post"]
    content = predict["requestBody"]["content"]
    assert set(content) == {JSON, NPY, SAFETENSORS}
    one, many = content[JSON]["schema"]["anyOf"]
    assert (many["type"], many["items"], many["description"]) == ("array", one, "At most 3.")
    assert content[JSON]["example"] == {"text": "a"}
    assert "x: float32 [length, 2]" in content[NPY]["schema"]["description"]
    assert "1 MiB" in predict["description"]
    assert "length at most 77" in predict["description"]
    assert {"400", "401", "413", "422", "429", "500", "503", "504"} < set(predict["responses"])
    infer = whole["paths"]["/v2/models/net/infer"]["post"]
    assert "at most 3 rows" in infer["description"]
    assert infer["responses"]["422"]["content"][JSON]["schema"]["required"] == ["error"]
    text = json.dumps(whole)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        value = whole
        for key in reference.split("/"):
            value = value[key]  # every reference leads somewhere


def test_the_document_offers_only_what_the_model_takes() -> None:
    predict = the_document(OfText(), TWO, lists=False)["paths"]["/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {JSON, SAFETENSORS}
    assert "anyOf" not in predict["requestBody"]["content"][JSON]["schema"]
    assert predict["summary"] == "Answer one request."
