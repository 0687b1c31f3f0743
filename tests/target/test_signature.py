"""What flows through a model is found from the samples and a few forwards; samples that disagree are named.

Shape legend: B requests in a batch, L length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchproof.errors import TargetError, UserCodeError
from torchproof.target.rows import Row
from torchproof.target.service import Service
from torchproof.target.signature import UNKNOWN_DIM, input_specs, read_signature
from torchproof.types import Signature


class Fn(nn.Module):
    """A forward that is a function of x."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def service(
    variable_dims: Mapping[str, Mapping[int, str]] | None = None, pad_values: Mapping[str, float] | None = None
) -> Service:
    made = Service()
    made.variable_dims = variable_dims or {}  # type: ignore[misc]
    made.pad_values = pad_values or {}  # type: ignore[misc]
    return made


def read(function: Callable[[Tensor], Any], *lengths: int, width: int = 4) -> Signature:
    """The signature over rows (L, width), of which L is declared variable."""
    rows = [{"x": torch.ones(length, width)} for length in lengths or (3, 6)]
    return read_signature(Fn(function), rows, service({"x": {0: "length"}}))


def outputs(signature: Signature) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in signature.outputs}


def refused(rows: Sequence[Row], *args: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        input_specs(rows, service(*args))
    return caught.value


def test_a_dim_that_varies_must_be_declared() -> None:
    """The error names the sample, the input, the dim and the line to add, and following it cures."""
    rows = [{"x": torch.ones(2, n)} for n in (5, 5, 7)]
    error = refused(rows)
    assert str(error) == ("sample 2: dim 1 of input 'x' is 7, in sample 0 it is 5, and it is not declared variable")
    assert error.help == 'declare it: variable_dims = {"x": {1: "length"}}'
    (spec,) = input_specs(rows, service({"x": {1: "length"}}))
    assert spec.shape == (2, "length")


def test_samples_must_agree_in_name_dtype_and_rank() -> None:
    x = torch.ones(3)
    assert str(refused([{"x": x}, {"y": x}])) == "sample 1: encode() returned y, for sample 0 x"
    assert str(refused([{"x": x, "y": x}, {"y": x, "x": x}])) == "sample 1: encode() returned y, x, for sample 0 x, y"
    assert str(refused([{"x": x}, {"x": x.long()}])) == "sample 1: input 'x' is int64, in sample 0 float32"
    assert str(refused([{"x": x}, {"x": x.view(1, 3)}])) == "sample 1: input 'x' has 2 dims, in sample 0 1"


def test_what_is_declared_must_be_there() -> None:
    rows = [{"x": torch.ones(3)}]
    assert str(refused(rows, {"ids": {0: "length"}})) == "variable_dims names the input 'ids'"
    assert refused(rows, {"ids": {0: "length"}}).help == "encode() returns: x"
    assert str(refused(rows, {"x": {1: "length"}})).startswith("variable_dims names dim 1 of 'x', which has 1")
    assert str(refused(rows, {"x": {-1: "length"}})).startswith("variable_dims names dim -1 of 'x'")
    assert str(refused(rows, {}, {"ids": 1.0})) == "pad_values names the input 'ids'"


def test_dims_of_one_name_have_one_size() -> None:
    rows = [{"x": torch.ones(3), "y": torch.ones(3)}, {"x": torch.ones(4), "y": torch.ones(5)}]
    error = refused(rows, {"x": {0: "length"}, "y": {0: "length"}})
    assert str(error) == "sample 1: dim 0 of 'y' is 5, but 'length' is 4 in another input"
    specs = input_specs(rows, service({"x": {0: "a"}, "y": {0: "b"}}, {"y": 7}))
    assert [(s.shape, s.pad_value) for s in specs] == [(("a",), 0.0), (("b",), 7.0)]


@pytest.mark.parametrize(
    ("function", "kind", "names"),
    [
        (lambda x: x, "tensor", ["output"]),
        (lambda x: (x, x), "tuple", ["output0", "output1"]),
        (lambda x: [x, None, x], "tuple", ["output0", "output2"]),
        (lambda x: {"a": x, "none": None, "b": x}, "dict", ["a", "b"]),
        (lambda x: Output(x), "dict", ["logits"]),
        (lambda x: Output(x, x), "dict", ["logits", "loss"]),
    ],
)
def test_outputs_are_named(function: Callable[[Tensor], Any], kind: str, names: list[str]) -> None:
    """Tensor, tuple, list, dict, dataclass; fields that are None are left out."""
    signature = read(function)
    assert (signature.output_kind, list(outputs(signature))) == (kind, names)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: {"a": x, "hidden": (x, x)}, "output 'hidden' is a nested tuple"),
        (lambda x: (x, {"b": x}), "output 'output1' is a nested dict"),
        (lambda x: {"a": Output(x)}, "output 'a' is a nested Output"),
        (lambda x: {"a": x, "label": "cat"}, "output 'label' is a str"),
        (lambda x: x.shape[0], "the model returned a int"),
        (lambda x: None, "the model returned a NoneType"),
        (lambda x: {"a": None}, "the model returned no tensor"),
        (lambda x: (), "the model returned no tensor"),
        (lambda x: x.sum(), r"output 'output' has shape () for a batch of 1: no batch dim in front"),
        (lambda x: (x, x[0]), "output 'output1' has shape (3, 4) for a batch of 1: no batch dim in front"),
        (lambda x: x.to(torch.complex64), "output 'output' is complex"),
        (lambda x: x if x.shape[1] < 5 else (x, x), "the model returned output for one input size and"),
        (
            lambda x: x if x.shape[1] < 5 else torch.cat([x, x]),
            "output 'output' has shape (2, 6, 4) for a batch of 1: no batch dim in front",
        ),
        (lambda x: x if x.shape[1] < 5 else x[..., None], "output 'output' has another number of dims"),
    ],
)
def test_outputs_that_are_not_supported(function: Callable[[Tensor], Any], message: str) -> None:
    """Each says which output it is, and what it is."""
    with pytest.raises(TargetError) as caught:
        read(function)
    assert message in str(caught.value)


@pytest.mark.parametrize("lengths", [(3, 6), (4, 4), (5,), (6, 3, 4)])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x, ("length", 4)),
        (lambda x: x.mean(1), (4,)),
        (lambda x: x.mT, (4, "length")),
        (lambda x: x @ x.mT, ("length", "length")),
        (lambda x: x[:, ::2], (UNKNOWN_DIM, 4)),
        (lambda x: torch.cat([x, x], 1), (UNKNOWN_DIM, 4)),
        (lambda x: x.new_ones(1, 7), (7,)),
    ],
)
def test_output_dims_follow_input_dims(
    function: Callable[[Tensor], Any], shape: tuple[int | str, ...], lengths: tuple[int, ...]
) -> None:
    """Whether the samples have several sizes or one: then one more size is tried."""
    assert outputs(read(function, *lengths))["output"] == shape


def test_a_size_equal_to_a_fixed_one_is_not_confused() -> None:
    """Width and length are both 4 in every sample."""
    assert outputs(read(lambda x: x, 4, 4))["output"] == ("length", 4)


@pytest.mark.parametrize("sizes", [((4, 4), (4, 4)), ((3, 3), (5, 5)), ((3, 5), (5, 3)), ((2, 4), (2, 8))])
def test_two_dims_are_told_apart(sizes: Sequence[tuple[int, int]]) -> None:
    """Also where both have the same size in every sample."""
    rows = [{"x": torch.ones(a, b)} for a, b in sizes]
    signature = read_signature(Fn(lambda x: x.mT), rows, service({"x": {0: "height", 1: "width"}}))
    assert outputs(signature)["output"] == ("width", "height")


@pytest.mark.parametrize("longest", [8, 2])
def test_samples_at_the_largest_size_that_the_model_takes(longest: int) -> None:
    """A size that no sample has is tried, but one that the model refuses is no error; a smaller one shows as much."""

    def forward(x: Tensor) -> Tensor:
        if x.shape[1] > longest:
            raise IndexError("position out of range")
        return x

    assert outputs(read(forward, longest))["output"][0] == ("length" if longest > 3 else longest)
    with pytest.raises(UserCodeError, match="running the model on a sample raised IndexError"):
        read(forward, longest, longest + 1)


def test_a_forward_that_writes_into_its_input_leaves_the_samples_alone() -> None:
    rows = [{"x": torch.ones(3, 4)}]
    read_signature(Fn(lambda x: x.mul_(2)), rows, service({"x": {0: "length"}}))
    assert torch.equal(rows[0]["x"], torch.ones(3, 4))


class Keyword(nn.Module):
    def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
        return a - b


class AnyKeyword(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["a"] - inputs["b"]


class PositionalOnly(nn.Module):
    def forward(self, a: Tensor, b: Tensor, /) -> Tensor:
        return a - b


class Plain(nn.Module):
    def forward(self, b: Tensor, a: Tensor, scale: float = 1.0) -> Tensor:
        return (a - b) * scale


class Star(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] - inputs[1]


class StarAndAnyKeyword(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return args[0] - args[1] if args else kwargs["a"] - kwargs["b"]


@pytest.mark.parametrize(
    ("module", "names", "call"),
    [
        (Plain(), ("a", "b"), "keyword"),
        (Keyword(), ("a", "b"), "keyword"),
        (AnyKeyword(), ("a", "b"), "keyword"),
        (StarAndAnyKeyword(), ("a", "b"), "keyword"),
        (StarAndAnyKeyword(), ("input0", "input1"), "positional"),
        (PositionalOnly(), ("a", "b"), "positional"),
        (Star(), ("input0", "input1"), "positional"),
        (Star(), ("first", "second"), "positional"),
    ],
)
def test_inputs_are_passed_the_way_that_forward_takes_them(
    module: nn.Module, names: tuple[str, str], call: str
) -> None:
    """By name wherever forward knows the name, in order otherwise."""
    first, second = names
    rows = [{first: torch.full((2,), 5.0), second: torch.full((2,), 3.0)}]
    assert read_signature(module, rows, service()).call == call


def test_a_fixed_batch_has_no_batch_dim() -> None:
    """A saved model that takes one request as a whole may return anything, a single number too."""
    signature = read_signature(Fn(lambda x: (x, x.sum())), [{"x": torch.ones(1, 3)}], service(), batched=False)
    assert signature.batched is False
    assert outputs(signature) == {"output0": (1, 3), "output1": ()}
