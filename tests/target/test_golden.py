"""The golden set tells wrong answers from rounding, whatever the output looks like."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchproof.target import golden
from torchproof.target.rows import Row
from torchproof.types import GoldenError, InputSpec, OutputSpec, Signature, Tolerance

COS = Tolerance(metric="cos", bound=0.999)
INF, NAN = math.inf, math.nan


def error(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> GoldenError:
    return golden.compare([{"y": t} for t in outputs], [{"y": t} for t in references], ["y"])


def vectors(num: int = 4, size: int = 64, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(size, generator=generator) for _ in range(num)]


def changed(references: Sequence[Tensor], row: int, output: Tensor) -> list[Tensor]:
    return [output if i == row else t for i, t in enumerate(references)]


REFERENCES = vectors()
NUMBERS = [torch.tensor([v]) for v in (0.5, -1.0, 2.0, 0.001)]
ONE_TINY = [*vectors(), vectors(1, scale=1e-9)[0]]
TOKENS = [torch.arange(i, i + 64) for i in range(4)]
WITH_NAN = changed(REFERENCES, 1, torch.where(torch.arange(64) < 3, NAN, REFERENCES[1]))
WITH_INF = changed(REFERENCES, 1, torch.where(torch.arange(64) < 3, -INF, REFERENCES[1]))

WRONG = {
    "twice as long": (REFERENCES, [2 * t for t in REFERENCES]),
    "a tenth longer": (REFERENCES, [1.1 * t for t in REFERENCES]),
    "half as long": (REFERENCES, [0.5 * t for t in REFERENCES]),
    "other sign": (REFERENCES, [-t for t in REFERENCES]),
    "one row only": (REFERENCES, changed(REFERENCES, 2, -REFERENCES[2])),
    "two rows swapped": (REFERENCES, [REFERENCES[i] for i in (1, 0, 2, 3)]),
    "all zero": (REFERENCES, [torch.zeros(64)] * 4),
    "one number, other sign": (NUMBERS, changed(NUMBERS, 1, -NUMBERS[1])),
    "one number, a tenth off": (NUMBERS, [1.1 * t for t in NUMBERS]),
    "one number, far from a small one": (NUMBERS, changed(NUMBERS, 3, torch.tensor([0.5]))),
    "a tiny row that grew": (ONE_TINY, changed(ONE_TINY, 4, REFERENCES[0])),
    "all tiny, other sign": ([1e-9 * t for t in REFERENCES], [-1e-9 * t for t in REFERENCES]),
    "zero that is not": ([torch.zeros(64)] * 2, [torch.full((64,), 1e-3)] * 2),
    "NaN": (REFERENCES, changed(REFERENCES, 3, torch.where(torch.arange(64) == 5, NAN, REFERENCES[3]))),
    "infinity": (REFERENCES, changed(REFERENCES, 3, torch.where(torch.arange(64) == 5, INF, REFERENCES[3]))),
    "NaN gone": (WITH_NAN, REFERENCES),
    "infinity of the other sign": (WITH_INF, [-t if bool(t.isinf().any()) else t for t in WITH_INF]),
    "NaN in place of infinity": (WITH_INF, WITH_NAN),
    "another token": (TOKENS, changed(TOKENS, 1, torch.where(torch.arange(64) == 9, 999, TOKENS[1]))),
    "a flipped flag": ([torch.tensor([True, False])], [torch.tensor([True, True])]),
    "another shape of as many numbers": ([torch.ones(2, 3)], [torch.ones(3, 2)]),
    "more numbers": ([torch.ones(3)], [torch.ones(4)]),
    "no numbers": ([torch.ones(3)], [torch.ones(0)]),
}

NOISE = [1e-4 * t for t in vectors(5)][::-1]
RIGHT = {
    "equal": (REFERENCES, REFERENCES),
    "rounding": (REFERENCES, [t + n for t, n in zip(REFERENCES, NOISE, strict=False)]),
    "bfloat16": (REFERENCES, [t.bfloat16() for t in REFERENCES]),
    "another precision of the reference": ([t.double() for t in REFERENCES], REFERENCES),
    "one number, rounding": (NUMBERS, [t * (1 + 1e-4) for t in NUMBERS]),
    "one small number among large ones, off by little": (NUMBERS, changed(NUMBERS, 3, torch.tensor([0.002]))),
    "a tiny row of noise among long ones": (ONE_TINY, changed(ONE_TINY, 4, -ONE_TINY[4])),
    "all tiny, rounding": ([1e-9 * t for t in REFERENCES], [1e-9 * (t + 1e-4) for t in REFERENCES]),
    "zero": ([torch.zeros(64)] * 2, [torch.zeros(64)] * 2),
    "NaN in both": (WITH_NAN, WITH_NAN),
    "NaN everywhere in both": ([torch.full((4,), NAN)], [torch.full((4,), NAN)]),
    "infinity in both": (WITH_INF, WITH_INF),
    "tokens": (TOKENS, TOKENS),
    "empty": ([torch.ones(0)], [torch.ones(0)]),
    "a single number without a dim": ([torch.tensor(3.0)], [torch.tensor(3.0001)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_outside_the_tolerance(name: str) -> None:
    references, outputs = WRONG[name]
    assert not golden.within(error(outputs, references), COS)


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_are_inside_the_tolerance(name: str) -> None:
    references, outputs = RIGHT[name]
    found = error(outputs, references)
    assert golden.within(found, COS)
    assert found.cos is not None
    assert found.cos <= 1 + 1e-12


def test_a_wrong_length_counts_as_an_error_in_direction_would() -> None:
    """Off by the share d: 1 - d*d/2, although the cosine itself is 1."""
    assert error([2 * t for t in REFERENCES], REFERENCES).cos == pytest.approx(0.5)
    assert error([1.01 * t for t in REFERENCES], REFERENCES).cos == pytest.approx(1 - 0.01**2 / 2, abs=1e-7)


def test_the_largest_differences_are_reported() -> None:
    """Absolute, and relative to the row's largest value; the worst of all rows."""
    references = [torch.tensor([4.0, 1.0]), torch.tensor([0.5, -0.5])]
    found = error([torch.tensor([4.0, 1.25]), torch.tensor([0.5, -0.375])], references)
    assert (found.max_abs, found.max_rel) == (0.25, 0.25)


def test_the_worst_output_is_named() -> None:
    references = [{"a": REFERENCES[0], "b": REFERENCES[1]}]
    assert golden.compare([{"a": REFERENCES[0], "b": -REFERENCES[1]}], references, ["a", "b"]).output == "b"
    assert golden.compare([{"a": REFERENCES[0] * NAN, "b": -REFERENCES[1]}], references, ["a", "b"]).output == "a"


@pytest.mark.parametrize(
    ("metric", "value", "bound", "inside"),
    [
        ("cos", 0.999, 0.999, True),
        ("cos", 0.9989, 0.999, False),
        ("max_abs", 0.01, 0.01, True),
        ("max_abs", 0.011, 0.01, False),
        ("max_rel", 0.01, 0.01, True),
        ("max_rel", 0.011, 0.01, False),
        ("cos", None, -1.0, False),
        ("max_abs", None, 1e9, False),
        ("max_rel", None, 1e9, False),
    ],
)
def test_the_tolerance_holds_at_its_bound(metric: str, value: float | None, bound: float, inside: bool) -> None:
    """What is not finite is never inside."""
    found = GoldenError(output="y", **{"cos": 0.0, "max_abs": 0.0, "max_rel": 0.0, metric: value})
    tolerance = Tolerance(metric=metric, bound=bound)  # type: ignore[arg-type]
    assert golden.within(found, tolerance) is inside
    assert math.isnan(golden.value_of(found, tolerance)) is (value is None)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Every dtype and shape, names with dots, more rows than nine (their order), shared and transposed memory."""
    shared = torch.arange(6.0).view(2, 3)
    inputs = [{"x.y": shared.T, "z": torch.tensor(i), "mask": torch.tensor([True])} for i in range(12)]
    outputs = [{"half": torch.full((2,), float(i)).bfloat16(), "empty": torch.ones(0, 3)} for i in range(12)]
    golden.save(tmp_path / "golden.safetensors", inputs, outputs)
    for stored, rows in zip(golden.load(tmp_path / "golden.safetensors"), (inputs, outputs), strict=True):
        assert len(stored) == len(rows)
        for back, row in zip(stored, rows, strict=True):
            assert back.keys() == row.keys()
            assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in row.items())


def test_rows_are_spread_over_the_sizes() -> None:
    """The smallest and the largest are among them, none twice."""
    rows = [{"x": torch.ones(n)} for n in (9, 2, 7, 4, 100, 5, 3)]
    signature = signature_of("float32", ("length",))
    assert [len(rows[i]["x"]) for i in golden.spread(rows, signature, 3)] == [2, 5, 100]
    assert [len(rows[i]["x"]) for i in golden.spread(rows, signature, 50)] == [2, 3, 4, 5, 7, 9, 100]


def signature_of(dtype: str, shape: tuple[int | str, ...]) -> Signature:
    return Signature(
        inputs=(InputSpec(name="x", dtype=dtype, shape=shape),),
        outputs=(OutputSpec(name="output", dtype="float32", shape=(2,)),),
        call="keyword",
        output_kind="tensor",
    )


class Casts(nn.Linear):
    """Refuses float64: casts its input to float32 where its weight has been cast to float64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Table(nn.Module):
    """Has no float64 form, and no floating-point input that would raise: its output tells."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.1, 0.2, 0.3])[x]


@pytest.mark.parametrize(
    ("module", "x", "precision"),
    [
        (nn.Linear(2, 2), torch.rand(2), "float64"),
        (nn.Linear(2, 2).bfloat16(), torch.rand(2).bfloat16(), "float64"),
        (Casts(2, 2), torch.rand(2), "float32"),
        (Table(), torch.tensor([2, 0]), "float32"),
    ],
)
def test_references_are_float64_where_the_model_runs_in_it(module: nn.Module, x: Tensor, precision: str) -> None:
    """The precision is that of the outputs, and the module itself stays as it is."""
    before = [p.dtype for p in module.parameters()]
    rows: list[Row] = [{"x": x}, {"x": x}]
    signature = signature_of("float32", (2,))
    if isinstance(module, nn.Linear) and not isinstance(module, Casts):
        rows = [{"input": x}, {"input": x}]
        signature = Signature(
            inputs=(InputSpec(name="input", dtype="float32", shape=(2,)),),
            outputs=signature.outputs,
            call="keyword",
            output_kind="tensor",
        )
    outputs, said = golden.reference(module, rows, signature)
    assert said == precision
    assert len(outputs) == 2
    assert {str(o["output"].dtype) for o in outputs} == {f"torch.{precision}"}
    assert [p.dtype for p in module.parameters()] == before
