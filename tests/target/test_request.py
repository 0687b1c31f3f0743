"""JSON becomes what ``encode`` is annotated with, and an error names the path of the key."""

from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import msgspec
import pytest
import torch

from torchproof.target import request as req
from torchproof.target.service import Service


@dataclass
class Data:
    name: str
    sizes: list[int]


class Typed(TypedDict):
    name: str
    sizes: list[int]


class Record(msgspec.Struct):
    name: str
    sizes: list[int]


@dataclass
class Nested:
    items: list[Data]


class Named(Protocol):
    name: str


GOOD = {"name": "a", "sizes": [1, 2]}
TYPES = (Data, Typed, Record)


@pytest.mark.parametrize("type_", TYPES)
def test_a_dict_becomes_the_annotated_class(type_: Any) -> None:
    made = req.decode_json(b'{"name": "a", "sizes": [1, 2]}', type_)
    assert made == (GOOD if type_ is Typed else type_(**GOOD))
    assert req.convert(made, type_) == made  # what is one already stays


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": 3, "sizes": []}, "Expected `str`, got `int` - at `$.name`"),
        ({"name": "a", "sizes": [1, "x"]}, "Expected `int`, got `str` - at `$.sizes[1]`"),
        ({"name": "a"}, "Object missing required field `sizes`"),
        ([1], "Expected `object`, got `array`"),
        ("text", "Expected `object`, got `str`"),
    ],
)
def test_an_error_names_the_path(type_: Any, value: object, message: str) -> None:
    with pytest.raises(req.RequestError) as caught:
        req.convert(value, type_)
    assert str(caught.value) == message
    assert not isinstance(caught.value, req.NotJsonError)


def test_objects_inside_objects() -> None:
    """Dicts are converted at every depth, and ready objects stay; the path goes all the way down."""
    ready = Data("b", [])
    assert req.convert({"items": [GOOD, ready]}, Nested) == Nested([Data(**GOOD), ready])
    with pytest.raises(req.RequestError, match=r"at `\$\.items\[0\]\.sizes`"):
        req.convert({"items": [{"name": "a", "sizes": 3}]}, Nested)


def test_plain_types() -> None:
    tensor = torch.ones(2)
    assert req.convert([1, 2.5], list[float]) == [1.0, 2.5]
    assert req.convert({"a": 1}, dict[str, Any]) == {"a": 1}
    assert req.convert({"a": tensor}, dict[str, Any])["a"] is tensor
    assert req.convert({"a": tensor}, dict)["a"] is tensor
    assert req.convert({"a": [1, "x", None]}, Any) == {"a": [1, "x", None]}
    assert req.convert(tensor, torch.Tensor) is tensor
    assert req.convert(Data("a", []), Data | None) == Data("a", [])
    assert req.convert(None, Data | None) is None
    with pytest.raises(req.RequestError, match=r"Expected `float`, got `str` - at `\$\[1\]`"):
        req.convert([1.0, "x"], list[float])
    with pytest.raises(req.RequestError, match="Expected `array`, got `Tensor`"):
        req.convert(tensor, list[float])
    with pytest.raises(req.RequestError, match="Expected `Tensor`, got `list`"):
        req.convert([1.0], torch.Tensor)


@pytest.mark.parametrize("type_", [Data | Nested, Record | Data])
def test_an_annotation_that_no_json_can_be_read_as(type_: Any) -> None:
    """It is said to be the annotation, not the request."""
    with pytest.raises(req.RequestError, match=r"encode\(\) is annotated with a type"):
        req.convert(GOOD, type_)


@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b"\xff", b"NaN", b'"\xff"', b"[" * 100_000])
def test_a_body_that_is_no_json(body: bytes) -> None:
    with pytest.raises(req.NotJsonError, match=r"^not JSON"):
        req.decode_json(body, Any)


def test_the_annotations_are_found() -> None:
    """Written as text or not; Any where there is none, or none that can be read."""

    class Annotated(Service):
        def encode(self, request: "Data") -> Any: ...
        def decode(self, outputs: Any, request: Data) -> "list[float]": ...

    class Unreadable(Service):
        def encode(self, request: "Gone") -> Any: ...  # type: ignore[name-defined]  # noqa: F821

    assert req.request_type(Annotated()) is Data
    assert req.response_type(Annotated()) == list[float]
    assert req.request_type(Unreadable()) is Any
    assert req.response_type(Service()) is Any


def test_schemas_are_json_schema() -> None:
    """Shared classes become components; a type without words in JSON schema is anything."""
    (nested, numbers, anything, tensor), components = req.schemas(
        (Nested, list[float], Any, torch.Tensor), "#/components/schemas/{name}"
    )
    assert nested == {"$ref": "#/components/schemas/Nested"}
    assert numbers == {"type": "array", "items": {"type": "number"}}
    assert (anything, tensor) == ({}, {"title": "Tensor"})
    assert set(components) == {"Nested", "Data"}
    assert components["Data"]["required"] == ["name", "sizes"]


def test_a_response_becomes_json() -> None:
    """Objects, tensors and numbers; what JSON lacks is an error that names where it is."""
    assert req.to_json(Nested([Data("a", [1])])) == b'{"items":[{"name":"a","sizes":[1]}]}'
    assert req.to_json({"x": torch.ones(2), "none": None}) == b'{"x":[1.0,1.0],"none":null}'
    with pytest.raises(ValueError, match=r"not finite at \$\.x\[1\]"):
        req.to_json({"none": None, "x": torch.tensor([1.0, float("nan")])})
    with pytest.raises(TypeError, match="decode\\(\\) returned a object"):
        req.to_json(object())
