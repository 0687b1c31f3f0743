"""What only tune finds in the examples: torch.compile that compiles nothing."""

from pathlib import Path

import pytest

from torchproof.bundle.read import open_bundle
from torchproof.runtimes import RUNTIMES
from torchproof.target.resolve import resolve
from torchproof.tune import TuneRequest, tune

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_lstm_that_torch_compile_passes_over_is_a_finding_and_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be timed as eager PyTorch under another name. Plain eager is served.

    The bundle is named as people name it, relative to where they are.
    """
    monkeypatch.chdir(tmp_path)
    proof = tune(
        TuneRequest(
            target=resolve(str(EXAMPLES / "lstm.py")),
            output=Path("lstm.tp"),
            budget_s=60.0,
            runtimes={name: RUNTIMES[name] for name in ("eager", "inductor")},
        )
    )
    (compiled,) = (trial for trial in proof.trials if trial.candidate.runtime == "inductor")
    assert compiled.outcome == "failed"
    assert compiled.reason.startswith("nothing was compiled: 0 graphs of")
    assert [finding.code for finding in proof.findings] == ["TP301"]
    assert proof.plan.chosen.candidate.runtime == "eager"
    assert open_bundle(tmp_path / "lstm.tp").proof.plan == proof.plan
