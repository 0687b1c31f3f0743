"""A few rows whose answers are known find out a model that has gone wrong, and leave alone one that has not."""

from collections.abc import Callable

import pytest
import torch

from torchproof.serve.canary import OWN_TOLERANCE, Canary
from torchproof.serve.wire import CHECK_ROWS
from torchproof.target.rows import Batch, Row
from torchproof.types import InputSpec, OutputSpec, Signature, Tolerance

SIGNATURE = Signature(
    inputs=(InputSpec(name="x", dtype="float32", shape=("length",)),),
    outputs=(OutputSpec(name="y", dtype="float32", shape=("length",)),),
    call="keyword",
    output_kind="tensor",
)
LENGTHS = (5, 2, 9, 3, 7)


class Model:
    """Gives x + 1, after ``spoil``; remembers the lengths that it saw."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda y: y

    def __call__(self, batch: Batch) -> Batch:
        self.lengths.append(batch["x"].shape[1])
        return {"y": self.spoil(batch["x"] + 1)}


def rows(*lengths: int) -> list[Row]:
    return [{"x": torch.arange(length, dtype=torch.float32)} for length in lengths]


def canary_of(model: Model, *lengths: int, tolerance: Tolerance = OWN_TOLERANCE) -> Canary:
    references = [{"y": row["x"] + 1} for row in rows(*lengths)]
    return Canary(model, SIGNATURE, rows(*lengths), references, tolerance)


def test_a_model_that_is_well_passes() -> None:
    """Also one that another thread count changed in the last digits."""
    model = Model()
    canary = canary_of(model, *LENGTHS)
    assert canary.look() == ""
    model.spoil = lambda y: y * (1 + 1e-5)
    assert canary.look() == ""


def test_the_smallest_the_median_and_the_largest_row_are_run_alone() -> None:
    """And of these only the first where few are asked for."""
    model = Model()
    canary = canary_of(model, *LENGTHS)
    canary.look()
    assert model.lengths == [2, 5, 9]
    assert len(model.lengths) == CHECK_ROWS
    model.lengths.clear()
    canary.look(1)
    assert model.lengths == [2]


@pytest.mark.parametrize(("lengths", "run"), [((4,), [4]), ((4, 3), [3, 4]), ((), [])])
def test_fewer_rows_than_that_are_run_once_each(lengths: tuple[int, ...], run: list[int]) -> None:
    """Of none nothing can be said."""
    model = Model()
    assert canary_of(model, *lengths).look() == ""
    assert model.lengths == run


def test_wrong_numbers_are_told_with_the_bound() -> None:
    model = Model()
    canary = canary_of(model, *LENGTHS)
    model.spoil = lambda y: y * 1.01
    assert canary.look() == "output 'y' of a row whose answer is known has max_rel 0.01, the bound is 0.001"
    canary = canary_of(model, *LENGTHS, tolerance=Tolerance(metric="cos", bound=0.999))
    assert canary.look() == ""
    model.spoil = lambda y: y.flip(1)
    assert "has cos" in canary.look()


def test_each_row_counts() -> None:
    """Only the largest is wrong, which a look at one row doesn't see."""
    model = Model()
    canary = canary_of(model, *LENGTHS)
    model.spoil = lambda y: y * 2 if y.shape[1] == max(LENGTHS) else y
    assert canary.look(1) == ""
    assert canary.look() != ""


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_number_at_all_is_told(value: float) -> None:
    model = Model()
    canary = canary_of(model, *LENGTHS)
    assert canary.finite
    model.spoil = lambda y: torch.full_like(y, value)
    assert canary.look() == "output 'y' of a row whose answer is known is not finite"


def test_what_is_not_finite_by_nature_is_no_fault() -> None:
    """Log-probabilities of what is impossible: expected at the same place, and no reason to look at others'."""
    model = Model()
    model.spoil = lambda y: y.log()
    given = rows(*LENGTHS)
    for row in given:
        row["x"][0] = -1.0  # log(0)
    references = [{"y": (row["x"] + 1).log()} for row in given]
    canary = Canary(model, SIGNATURE, given, references, OWN_TOLERANCE)
    assert not canary.finite
    assert canary.look() == ""
    model.spoil = lambda y: torch.full_like(y, -torch.inf)
    assert canary.look() != ""


def test_a_row_that_is_not_looked_at_counts_for_finite() -> None:
    """It is in the golden set, so the model gives such answers as a rule."""
    given = rows(*LENGTHS)
    references = [{"y": row["x"] + 1} for row in given]
    references[3]["y"][0] = torch.inf
    assert not Canary(Model(), SIGNATURE, given, references, OWN_TOLERANCE).finite


def test_what_it_raises_is_told() -> None:
    """The first line of it; a look never raises."""
    model = Model()
    canary = canary_of(model, *LENGTHS)

    def fall(y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access\nmore of it")

    model.spoil = fall
    said = canary.look()
    assert said.startswith("a row of the golden set raised")
    assert "illegal memory access" in said
    assert "more of it" not in said
