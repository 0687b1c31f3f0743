"""The report of a comparison of precisions: every number with what it means, and no line over the width."""

from typing import Any

import pytest

from torchproof.machine.environment import read_environment
from torchproof.render import precision as render
from torchproof.types import SCHEMA, Target
from torchproof.types.precision import (
    DryRun,
    MetricComparison,
    MetricSpread,
    Overflow,
    PrecisionCandidate,
    PrecisionProof,
    Ratio,
    ScalerSeen,
    SeedPlan,
    SeedRun,
)


def run(seed: int, num_skipped: int | None = None) -> SeedRun:
    return SeedRun(
        seed=seed,
        metrics={"acc": 0.96},
        first_metrics={},
        num_steps=120,
        step_s=0.01,
        peak_bytes=1000,
        scaler=None if num_skipped is None else scaler(num_skipped),
    )


def scaler(num_skipped: int) -> ScalerSeen:
    return ScalerSeen(
        target="examples/digits.py",
        run="16-mixed, seed 0",
        num_steps=120,
        num_skipped=num_skipped,
        num_skipped_last=0,
        first_scale=65536.0,
        last_scale=65536.0 / 2**num_skipped,
    )


def comparison(**changes: Any) -> MetricComparison:
    return MetricComparison(
        **{
            "metric": "acc",
            "margin": 0.005,
            "verdict": "equivalent",
            "is_worse": None,
            "differences": (0.0,) * 12,
            "num_seeds": 12,
            "estimate": -0.00091,
            "low": -0.00287,
            "high": 0.00031,
            "non_finite_seeds": (),
            "num_more_seeds": None,
            "reason": "within 0.005",
            **changes,
        }
    )


OVERFLOW = Overflow(phase="forward", module="b.2", op="aten.mul.Tensor", line="net.py:9", largest=130048.0)
BF16 = PrecisionCandidate(
    precision="bf16-mixed",
    fp32_modules=(),
    comparisons=(
        comparison(),
        comparison(metric="nll", margin=None, verdict="undecided", reason="no margin was given"),
    ),
    step_time=Ratio(estimate=0.93, low=0.91, high=0.96),
    memory=Ratio(estimate=1.0, low=None, high=None),
    runs=tuple(run(seed) for seed in range(12)),
    ended="",
    verdict="chosen",
)
FP16 = PrecisionCandidate(
    precision="16-mixed",
    fp32_modules=("b.2",),
    comparisons=(comparison(verdict="undecided", reason="the interval reaches beyond 0.005", num_more_seeds=12),),
    step_time=Ratio(estimate=6.05, low=5.9, high=6.2),
    memory=Ratio(estimate=1.0, low=0.99, high=1.01),
    runs=tuple(run(seed, num_skipped=1 + seed % 4) for seed in range(12)),
    ended="",
    verdict="acc is undecided: the interval reaches beyond 0.005; 12 more seeds would decide it",
)


def proof(**changes: Any) -> PrecisionProof:
    return PrecisionProof(
        **{
            "schema": SCHEMA,
            "torchproof": "0.1.0",
            "created": "2026-01-01T00:00:00Z",
            "target": Target(reference="examples/digits.py", kind="python", path="/digits.py"),
            "environment": read_environment(),
            "device": "cpu",
            "precision": "bf16-mixed",
            "fp32_modules": (),
            "margins": {"acc": 0.005},
            "plan": SeedPlan(looks=(6, 12, 24, 48), confidence=0.9875, power=0.8, sd_in_margins=1.77),
            "num_steps": 120,
            "full_num_steps": 120,
            "dry_run": DryRun(overflows=(OVERFLOW,) * 5, fp32_modules=("b.2",)),
            "baseline": (
                MetricSpread(metric="acc", mean=0.96235, sd=0.0084, better="higher", values=(0.96,) * 12),
                MetricSpread(metric="nll", mean=None, sd=None, better="unknown", values=(None,) * 12),
            ),
            "runs": tuple(run(seed) for seed in range(12)),
            "candidates": (BF16, FP16),
            "stopped": "the budget was spent",
            "findings": (),
            "search_s": 600.0,
            **changes,
        }
    )


def test_the_whole_report() -> None:
    assert render.text(proof()) == (
        """\
examples/digits.py on cpu: 12 seeds in 32-true, each trained for 120 steps
planned: up to 48 seeds, looked at after 6, 12, 24 and 48, with intervals of
  98.75%; 80% power where the sd of the differences is at most acc 0.0089

32-true     acc 0.9624, sd between seeds 0.0084; higher is better
            nll: not finite with any seed

bf16-mixed  acc equivalent: -0.0009 [-0.0029, +0.0003] over 12 seeds, within
              0.005
            nll undecided: -0.0009 [-0.0029, +0.0003] over 12 seeds, no margin
              was given
            step time 0.93x [0.91, 0.96], peak memory 1.00x
            chosen

16-mixed    overflow predicted: aten.mul.Tensor (b.2, net.py:9) reaches 1.3e+05
              in forward
            overflow predicted: aten.mul.Tensor (b.2, net.py:9) reaches 1.3e+05
              in forward
            overflow predicted: aten.mul.Tensor (b.2, net.py:9) reaches 1.3e+05
              in forward
            and 2 more
            trained with b.2 in float32, where none is left
            acc undecided: -0.0009 [-0.0029, +0.0003] over 12 seeds, the
              interval reaches beyond 0.005
            step time 6.0x [5.9, 6.2], peak memory 1.00x [0.99, 1.01]
            the scaler skipped 1 to 4 of 120 steps
            not chosen: acc is undecided: the interval reaches beyond 0.005; 12
              more seeds would decide it

stopped: the budget was spent; took 10 min 0 s
precision: bf16-mixed
"""
    )


def test_a_chosen_precision_names_its_islands() -> None:
    text = render.text(proof(precision="16-mixed", fp32_modules=("b.2", "head")))
    assert text.endswith("precision: 16-mixed --fp32-module b.2 --fp32-module head\n")


def test_a_part_of_a_run_is_said_to_be_one() -> None:
    text = " ".join(render.text(proof(full_num_steps=5000)).split())
    assert "120 steps of the recipe's 5,000, so the end of a whole run wasn't seen" in text


def test_without_a_seed_there_is_no_baseline_and_no_empty_line() -> None:
    fp16 = PrecisionCandidate(
        precision="16-mixed",
        fp32_modules=(),
        comparisons=(comparison(estimate=None, low=None, high=None, verdict="undecided", differences=()),),
        step_time=None,
        memory=None,
        runs=(),
        ended="its gradients are not finite at any scale",
        verdict="its gradients are not finite at any scale",
    )
    text = render.text(proof(runs=(), baseline=(), candidates=(fp16,), dry_run=DryRun(), precision="32-true"))
    assert "16-mixed    not chosen: its gradients are not finite at any scale\n" in text
    assert "\n\n\n" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_over_the_width(width: int) -> None:
    assert max(map(len, render.text(proof(), width).splitlines())) <= width
