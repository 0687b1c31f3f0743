"""Hashes of what a user's objects hold: the same for equal values, others for others, and an end to every object."""

import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchproof.train.fingerprints import MAX_PARTS, digest, parts

CODE = (
    "from torchproof.train.fingerprints import digest; print(digest({'words': {'a', 'b', 'c', 'd'}, 3: [1.5, None]}))"
)


class Pair(NamedTuple):
    one: torch.Tensor
    two: int


@dataclass
class Box:
    corners: list[float]
    label: str


class Image:
    """As Pillow's: what it shows isn't in its attributes."""

    __slots__ = ("_bytes", "size")

    def __init__(self, size: tuple[int, int], data: bytes) -> None:
        self.size, self._bytes = size, data

    def tobytes(self) -> bytes:
        return self._bytes


def text(*letters: str) -> list[str]:
    """New objects at each call, at other addresses."""
    return ["".join([letter, "long enough"]) for letter in letters]


@pytest.mark.parametrize(
    ("one", "same", "others"),
    [
        (torch.ones(2), torch.ones(2), [torch.zeros(2), torch.ones(1, 2), torch.ones(2, dtype=torch.int64)]),
        (torch.ones(2, 3).t(), torch.ones(3, 2), [torch.ones(2, 3)]),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), [torch.ones(2, 2).to_sparse()]),
        (np.arange(3), np.arange(3), [np.arange(3.0), np.arange(4)]),
        (np.array(text("a", "b"), object), np.array(text("a", "b"), object), [np.array(text("a", "c"), object)]),
        ({"x": 1, "y": 2}, {"x": 1, "y": 2}, [{"x": 2, "y": 1}, {"x": 1, "z": 2}, {"x": 1}]),
        ({1, 2}, {2, 1}, [{1}, [1, 2]]),
        ([1, [2]], [1, [2]], [[1, 2], [[1], 2], [1, [3]]]),
        (True, True, [1, "True", None]),
        (Pair(torch.ones(1), 2), Pair(torch.ones(1), 2), [Pair(torch.ones(1), 3)]),
        (Box([1.0], "cat"), Box([1.0], "cat"), [Box([1.0], "dog"), Box([2.0], "cat")]),
        (Image((2, 1), b"ab"), Image((2, 1), b"ab"), [Image((2, 1), b"aa"), Image((1, 2), b"ab")]),
    ],
)
def test_equal_values_have_one_digest_and_others_another(one: Any, same: Any, others: list[Any]) -> None:
    assert len({digest(value) for value in [one, same, *others]}) == 1 + len(others)


def test_what_cannot_be_looked_into_counts_by_its_type() -> None:
    """An address in a repr would differ in every process."""
    assert digest([object(), len]) == digest([object(), len])
    assert digest({"dtype": np.float32}) == digest({"dtype": np.float32})


def test_the_digest_is_the_same_in_every_process() -> None:
    """Where hashes of strings, and so the order of a set, are others."""
    calls = [subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True) for _ in range(2)]
    assert calls[0].stdout == calls[1].stdout != b""


def test_parts_are_told_apart() -> None:
    one, other = ({"x": torch.tensor(value), "label": 3} for value in (0.0, 1.0))
    assert [a == b for a, b in zip(parts(one), parts(other), strict=True)] == [False, True]


class Node:
    def __init__(self, parent: "Node | None") -> None:
        self.parent, self.name = parent, "node"
        self.members: list[Node] = [] if parent else [Node(self) for _ in range(1000)]


@pytest.mark.parametrize("endless", [logging.getLogger("torch.distributed"), Node(None)], ids=["logger", "tree"])
def test_an_object_that_holds_others_without_end_comes_to_one(endless: Any) -> None:
    assert 0 < len(list(parts({"it": endless, "and": 1}))) <= MAX_PARTS
