"""How far two answers are apart: rounding is small, what is not comparable is infinite."""

import math

import pytest
import torch
from torch import Tensor, nn

from torchproof.check.modes import count_autograd_nodes, precision_of, relative_diff, same

NAN, INF = math.nan, math.inf


def t(*values: float) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("a", "b", "diff"),
    [
        (t(1.0, 4.0), t(1.0, 5.0), 0.25),
        (t(-4.0, 0.0), t(-4.0, 1.0), 0.25),
        (t(0.0, 0.0), t(0.0, 0.0), 0.0),
        (t(0.0, 0.0), t(0.0, 1.0), INF),
        (t(), t(), 0.0),
        (t(1.0), t(1.0, 1.0), INF),
        (t(NAN, 1.0), t(NAN, 1.0), 0.0),
        (t(NAN, 1.0), t(NAN, 1.5), 0.5),
        (t(NAN, 1.0), t(1.0, 1.0), INF),
        (t(INF, 1.0), t(INF, 1.0), 0.0),
        (t(INF, 1.0), t(-INF, 1.0), INF),
        (t(INF), t(-INF), INF),
        (t(INF), t(NAN), INF),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9]), 0.25),
        (torch.tensor([True, False]), torch.tensor([True, True]), 0.5),
        (torch.tensor(2.0), torch.tensor(3.0), 0.5),
    ],
)
def test_the_difference_over_the_largest_value(a: Tensor, b: Tensor, diff: float) -> None:
    """For integers and booleans it is the share that differs."""
    assert relative_diff({"y": a}, {"y": b})[1] == diff
    assert same(a, b) is (diff == 0)


def test_the_output_that_differs_most_is_named() -> None:
    assert relative_diff({"a": t(1.0), "b": t(1.0), "c": t(1.0)}, {"a": t(1.0), "b": t(2.0), "c": t(1.1)})[0] == "b"


def test_each_autograd_node_is_counted_once() -> None:
    """A graph that two outputs share is one graph; without a graph there is none."""
    x = torch.ones(2, requires_grad=True)
    shared = x * 2  # MulBackward0, AccumulateGrad
    assert count_autograd_nodes([shared]) == 2
    assert count_autograd_nodes([shared + 1, shared - 1]) == 4
    assert count_autograd_nodes([x, x.detach(), torch.ones(2)]) == 0


def test_the_coarsest_precision_counts() -> None:
    """One layer in bfloat16 is enough to round the answer as bfloat16 does."""
    assert precision_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).bfloat16())) == "bfloat16"
    assert precision_of(nn.Linear(1, 1).double()) == "float64"
    assert precision_of(nn.Identity()) == "float32"
