"""A run in 16-mixed whose scaler never steps says so; one whose scaler finds its scale does not."""

from collections.abc import Callable
from typing import Any

import pytest

Train = Callable[..., Any]
STEPS = ("--precision", "16-mixed", "--steps", "24")
LOSS = "return nn.functional.mse_loss(model(x).squeeze(1), y)"


def with_loss(code: str, changed: str) -> str:
    """The recipe with another loss; its metrics stay."""
    assert LOSS in code
    return code.replace(LOSS, changed)


def codes(done: Any) -> list[str]:
    return [finding["code"] for finding in done.report["findings"]]


def weights(done: Any) -> bytes:
    written: bytes = (done.run / "model.safetensors").read_bytes()
    return written


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_loss_that_no_scale_makes_finite_is_a_finding_of_the_run(train: Train, recipe: str, nproc: str) -> None:
    """Infinite by a division: the loss of each step is no number, and every step is skipped."""
    code = with_loss(recipe, LOSS + " / 0.0")
    done = train(*STEPS, "--nproc", nproc, code=code)
    assert done.code == 1, done.err
    assert codes(done) == ["TP610", "TP603"]
    found = done.report["findings"][1]
    assert found["severity"] == "error"
    assert found["evidence"]["num_skipped"] == found["evidence"]["num_steps"] == 24
    assert (found["evidence"]["first_scale"], found["evidence"]["last_scale"]) == (2.0**16, 2.0**-8)
    for text in ("TP603", "the scaler skipped all 24 steps", "nothing was trained"):
        assert text in done.out


def test_a_finite_loss_with_gradients_that_never_fit_is_found_by_the_scaler_alone(train: Train, recipe: str) -> None:
    """float16 in the middle of the backward pass: the loss curve looks like that of any run."""
    code = with_loss(recipe, "return nn.functional.mse_loss(Steep.apply(model(x)).squeeze(1), y)").replace(
        "class Points",
        """class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * 1e30

class Points""",
    )
    done = train(*STEPS, code=code)
    assert done.code == 1, done.err
    assert None not in done.losses
    assert codes(done) == ["TP603"]


def test_a_scale_that_is_too_large_at_first_is_no_finding(train: Train, recipe: str) -> None:
    """A dozen steps are skipped, then it steps: what the scaler is there for."""
    code = with_loss(recipe, LOSS + " * 1e3")
    done = train(*STEPS, code=code)
    assert done.code == 0, done.err
    scales = [line["scale"] for line in done.lines if "scale" in line]
    assert scales[0] == 2.0**16
    assert 3 <= scales.index(scales[-1]) < 20
    assert codes(done) == []
    untrained = train("--precision", "16-mixed", "--steps", "1", code=code, run="untrained")
    assert weights(untrained) != weights(done)


def test_steps_that_were_skipped_before_a_resumption_count_with_those_after_it(train: Train, recipe: str) -> None:
    """Two calls of twelve steps, neither of which is enough by itself, after one that trains."""
    poison = LOSS + " / (0.0 if os.path.exists(os.path.join(os.path.dirname(__file__), 'poison')) else 1.0)"
    code = with_loss(recipe, poison)
    first = train("--precision", "16-mixed", "--steps", "4", code=code)
    (first.run.parent / "poison").touch()
    half = train("--precision", "16-mixed", "--steps", "16", code=code)
    assert codes(half) == ["TP610"]
    whole = train("--precision", "16-mixed", "--steps", "28", code=code)
    assert codes(whole) == ["TP610", "TP603"]
    evidence = whole.report["findings"][1]["evidence"]
    assert (evidence["num_steps"], evidence["num_skipped_last"]) == (28, 24)
    assert "the last 24 steps" in whole.out
