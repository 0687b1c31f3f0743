"""A bare module with examples is served as it is: nested lists in, nested lists out."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchproof.errors import TargetError
from torchproof.target.modules import ModuleService, from_factory


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def rows_of(value: Any) -> list[dict[str, Any]]:
    service = from_factory(value, "app.py:net")
    return [{name: tensor.tolist() for name, tensor in row.items()} for row in service.samples()]


@pytest.mark.parametrize(
    "examples",
    [X, [X], {"input": X}, [{"input": X}], (X,), [(X,)], [X[:1], X[1:]], ((X[:1],), (X[1:],))],
)
def test_every_form_of_examples_with_one_input(examples: Any) -> None:
    """One call or several, by name or in order; each row of the batch is a request. A tuple of tensors is one call."""
    assert rows_of((nn.Identity(), examples)) == [{"input": [1.0] * 3}] * 2


@pytest.mark.parametrize(
    "examples", [(X, Y), [(X, Y)], {"x": X, "y": Y}, [{"x": X[:1], "y": Y[:1]}, {"x": X[1:], "y": Y[1:]}]]
)
def test_every_form_of_examples_with_two_inputs(examples: Any) -> None:
    assert rows_of((Pair(), examples)) == [{"x": [1.0] * 3, "y": [0.0] * 3}] * 2


@pytest.mark.parametrize("value", [nn.Identity(), (nn.Identity(), []), (nn.Identity(), torch.ones(0, 3))])
def test_without_examples_the_traffic_file_is_asked_for(value: Any) -> None:
    with pytest.raises(TargetError) as caught:
        rows_of(value)
    assert str(caught.value) == "there are no example inputs"
    assert "--traffic" in caught.value.help


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (3, "app.py:net returned examples of type int"),
        ((x for x in [X]), "app.py:net returned examples of type generator"),
        ([3], "example 0 returned a int"),
        ([[1.0]], "example 0 returned a float for 'x'"),
        ((X, torch.ones(3, 3)), "example 0 has first dims x: 2, y: 3"),
        ([(X, Y), (X, torch.tensor(1.0))], "example 1 has first dims x: 2, y: None"),
    ],
)
def test_examples_of_another_form(examples: Any, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        from_factory((Pair(), examples), "app.py:net")
    assert message in str(caught.value)


def service(*examples: Any) -> ModuleService:
    return ModuleService(Pair(), examples)


def test_a_request_is_nested_lists() -> None:
    """In the dtype of the examples, in the order of forward, whatever the order of its keys."""
    row = service((X, Y.long())).encode({"y": [1, 2, 3], "x": [1, 2, 3]})
    assert [(n, t.dtype, t.tolist()) for n, t in row.items()] == [
        ("x", torch.float32, [1.0, 2.0, 3.0]),
        ("y", torch.int64, [1, 2, 3]),
    ]
    assert list(service().encode({"y": [1.0], "x": [1.0]})) == ["x", "y"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"x": [1.0]}, "the request lacks y"),
        ({}, "the request lacks x, y"),
        ({"x": [[1.0], [2.0, 3.0]], "y": [1.0]}, "no tensor can be made of it"),
        ({"x": "text", "y": [1.0]}, "no tensor can be made of it"),
        ({"x": None, "y": [1.0]}, "no tensor can be made of it"),
        ({"x": {"a": 1}, "y": [1.0]}, "no tensor can be made of it"),
    ],
)
@pytest.mark.parametrize("examples", [(), ((X, Y),)])
def test_a_request_that_is_none(examples: Iterable[Any], request_: dict[str, Any], message: str) -> None:
    """With and without examples to compare with."""
    with pytest.raises(TargetError, match=message):
        service(*examples).encode(request_)


def test_a_response_is_nested_lists() -> None:
    """In the form that the model returns."""
    decode = service().decode
    assert decode(X[0], {}) == [1.0] * 3
    assert decode((X[0], Y[0]), {}) == [[1.0] * 3, [0.0] * 3]
    assert decode({"a": X[0]}, {}) == {"a": [1.0] * 3}


def test_dims_that_differ_between_requests_vary() -> None:
    """Those that always agree share a name; the others have their own."""
    made = service()
    made.measured_on(
        [
            {"x": torch.ones(2, 5, 1), "y": torch.ones(5, 4)},
            {"x": torch.ones(2, 7, 1), "y": torch.ones(7, 9)},
        ]
    )
    assert made.variable_dims == {"x": {1: "dim0"}, "y": {0: "dim0", 1: "dim1"}}
    made.measured_on([{"x": torch.ones(2)}, {"x": torch.ones(2)}])
    assert made.variable_dims == {}
