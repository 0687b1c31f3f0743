"""The whole comparison in real processes, with recipes of a few steps."""

from pathlib import Path
from typing import Any

import pytest

from torchproof.errors import RefusedError, TargetError, UsageError, UserCodeError
from torchproof.render import precision
from torchproof.target.resolve import resolve
from torchproof.tune.precision import compare_precisions
from torchproof.tune.precision.processes import Processes
from torchproof.types import decode, encode
from torchproof.types.precision import PrecisionProof
from torchproof.types.training import TrainPrecision

GUARD_S = 280.0

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import torchproof as tp

class Fit(tp.Recipe):
    batch_size = 16
    seed = 3
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).squeeze(1).float(), y) SCALED
    def train_data(self):
        x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1))
    eval_data = train_data
    def metrics(self, model, batch):
        return {"mse": nn.functional.mse_loss(model(batch[0]).squeeze(1).float(), batch[1])}
"""


def compare(
    path: Path, *precisions: TrainPrecision, margins: dict[str, float] | None = None, budget_s: float = GUARD_S
) -> PrecisionProof:
    return compare_precisions(
        resolve(str(path)),
        margins={"mse": 5.0} if margins is None else margins,
        precisions=precisions or ("bf16-mixed",),
        num_steps=4,
        budget_s=budget_s,
        progress=lambda text, share: None,
    )


def recipe(folder: Path, scaled: str = "") -> Path:
    path = folder / "recipe.py"
    path.write_text(RECIPE.replace("SCALED", scaled))
    return path


@pytest.mark.timeout(300)
def test_a_precision_is_compared_on_the_metric_after_training_from_equal_seeds(tmp_path: Path) -> None:
    """A margin as wide as the metric itself: whatever bfloat16 does here is within it."""
    proof = compare(recipe(tmp_path))
    assert proof.stopped == "it was settled"
    (bf16,) = proof.candidates
    assert [run.seed for run in proof.runs] == [run.seed for run in bf16.runs] == [3, 4, 5, 6, 7, 8]
    assert {(run.num_steps, run.scaler) for run in (*proof.runs, *bf16.runs)} == {(4, None)}
    (comparison,) = bf16.comparisons
    assert comparison.verdict == "equivalent"
    own = [a.metrics["mse"] - b.metrics["mse"] for a, b in zip(bf16.runs, proof.runs, strict=True)]  # type: ignore[operator]
    assert comparison.differences == pytest.approx(own)
    assert 0 < max(map(abs, own)) < 0.05  # two precisions of the same run, not two runs
    (spread,) = proof.baseline
    assert spread.better == "lower"
    assert spread.sd is not None
    assert spread.sd > 3 * max(map(abs, own))
    assert (proof.num_steps, proof.full_num_steps) == (4, 6)
    assert bf16.step_time is not None
    assert bf16.step_time.low is not None
    assert (proof.precision == "bf16-mixed") == (bf16.step_time.high < 1)  # type: ignore[operator]
    assert all(run.peak_bytes > 2**20 for run in proof.runs)
    assert decode(encode(proof), PrecisionProof, what="the proof") == proof
    text = precision.text(proof)
    assert "mse equivalent" in text
    assert max(map(len, text.splitlines())) <= 80


def test_gradients_that_no_scale_makes_finite_are_not_trained_with(tmp_path: Path) -> None:
    """Finite in float32: 1e30 is beyond float16 at any scale that leaves something of the gradients."""
    proof = compare(recipe(tmp_path, "* 1e30"), "16-mixed")
    assert (proof.precision, proof.runs) == ("32-true", ())
    (fp16,) = proof.candidates
    assert fp16.verdict == "its gradients are not finite at any scale"
    assert proof.stopped == "no candidate is left to train"
    assert proof.dry_run is not None
    assert proof.dry_run.loss_32 is not None
    assert "gradients are not finite" in precision.text(proof)


def test_a_budget_that_is_too_small_is_undecided_and_keeps_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over after a second of training, however long it took to get there."""
    left_s = iter([GUARD_S, 1.0])
    monkeypatch.setattr(Processes, "left_s", lambda processes: next(left_s))
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace("x, y = batch", "import time; time.sleep(1e6); x, y = batch"))
    proof = compare(path)
    assert proof.precision == "32-true"
    assert proof.stopped == "the budget was spent"
    assert proof.candidates[0].comparisons[0].verdict == "undecided"


@pytest.mark.parametrize(
    ("margins", "precisions", "says"),
    [
        ({"mse": 0.0}, ("bf16-mixed",), "the margin of mse is 0, and a margin is above 0"),
        ({"mse": float("nan")}, ("bf16-mixed",), "the margin of mse is nan"),
        ({}, ("32-true",), "there is no precision to compare with 32-true"),
        ({}, ("fp16",), "there is no precision fp16"),
        ({"acc": 0.1}, ("bf16-mixed",), r"a margin is given for acc, and metrics\(\) returns mse"),
    ],
)
def test_bad_input_is_said_before_anything_is_trained(
    tmp_path: Path, margins: dict[str, float], precisions: tuple[TrainPrecision, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        compare(recipe(tmp_path), *precisions, margins=margins)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_steps": 0}, "0 steps train nothing"),
        ({"num_steps": -1}, "-1 steps train nothing"),
        ({"budget_s": 0.0}, "a budget of 0 s is no time"),
        ({"budget_s": float("nan")}, "a budget of nan s is no time"),
    ],
)
def test_no_steps_and_no_time_are_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"margins": {"mse": 5.0}, "precisions": ("bf16-mixed",), "num_steps": 4, "budget_s": 60.0}
    with pytest.raises(UsageError, match=says):
        compare_precisions(resolve(str(recipe(tmp_path))), **{**asked, **changed}, progress=lambda text, share: None)


def test_a_recipe_without_a_metric_has_nothing_to_compare(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace('return {"mse"', 'return {} and {"mse"'))
    with pytest.raises(TargetError, match=r"metrics\(\) returned nothing"):
        compare(path, margins={})


def test_an_error_in_the_recipe_is_the_users_own(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace('return {"mse"', 'return {"mse": 1 / 0, "other"'))
    with pytest.raises(UserCodeError, match=r"metrics\(\) raised ZeroDivisionError"):
        compare(path)


def test_a_crash_in_float32_is_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace("x, y = batch", "import os; os._exit(5)"))
    with pytest.raises(RefusedError, match="can't be trained in 32-true with seed 3: exited with code 5"):
        compare(path)
