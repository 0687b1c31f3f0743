"""The comparison as a whole: open the recipe, look for overflows, train the seeds, choose."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from torchproof import __version__
from torchproof.errors import TargetError, UsageError
from torchproof.machine.environment import read_environment
from torchproof.rules.registry import judge
from torchproof.stats.equivalence import SEED_CONFIDENCE, SEED_LOOKS, largest_sd
from torchproof.tune.precision.choose import choose
from torchproof.tune.precision.processes import Processes, dry_run
from torchproof.tune.precision.seeds import Arm, Seeds
from torchproof.tune.precision.verdicts import compare, ratio, spread
from torchproof.tune.request import Progress
from torchproof.types import SCHEMA, Finding, MetricSeen, Observation, OverflowSeen, Target
from torchproof.types.precision import (
    Difference,
    DryRun,
    MetricComparison,
    MetricSpread,
    PrecisionCandidate,
    PrecisionProof,
    SeedPlan,
)
from torchproof.types.training import TrainPrecision, TrainRequest

POWER = 0.8


def compare_precisions(
    target: Target,
    *,
    margins: Mapping[str, float],
    precisions: Sequence[TrainPrecision],
    num_steps: int | None,
    budget_s: float,
    progress: Progress,
) -> PrecisionProof:
    """Trains the recipe in 32-true and in each precision from the same seeds, and compares the final metrics.

    Args:
        margins: by metric: a difference up to here doesn't matter. Without any, nothing is decided.
        precisions: the candidates.
        num_steps: optimizer steps of each training; None: the recipe's own.
        budget_s: wall seconds for all of it.

    Returns:
        the fastest precision that was shown to be equivalent or better on all metrics with a margin; else 32-true.

    Raises:
        UsageError: a margin isn't above 0 or names no metric of the recipe, there is no candidate or no precision of
            its name, or ``num_steps`` or ``budget_s`` isn't above 0.
        RefusedError: the recipe can't be opened within the budget, or not be trained in 32-true; or a metric with a
            margin is not finite after the first training.
        TorchproofError, UserCodeError: the recipe is wrong, or its code raised.
    """
    start = time.monotonic()
    wanted = [precision for precision in dict.fromkeys(precisions) if precision != "32-true"]
    _check(margins, wanted, num_steps, budget_s)
    # Fixed before anything is run: the data can't move it.
    plan = SeedPlan(
        looks=SEED_LOOKS,
        confidence=SEED_CONFIDENCE,
        power=POWER,
        sd_in_margins=largest_sd(SEED_LOOKS[-1], POWER),
    )
    processes = Processes(start + budget_s)
    progress("opening the recipe", 0.0)
    opened = processes.open(target, num_steps)
    if not opened["metrics"]:
        raise TargetError("metrics() returned nothing to compare", help="return {name: mean} of what the model is for")
    if unknown := sorted(margins.keys() - set(opened["metrics"])):
        raise UsageError(
            f"a margin is given for {unknown[0]}, and metrics() returns {', '.join(opened['metrics'])}",
            help=f"--margin {opened['metrics'][0]}={margins[unknown[0]]:g}",
        )
    request = msgspec.convert(opened["request"], TrainRequest)
    dry = None
    if "16-mixed" in wanted:
        progress("looking for overflows in float16", (time.monotonic() - start) / budget_s)
        dry = dry_run(processes, request)
    baseline = Arm("32-true")
    candidates = [
        Arm(precision, dry.fp32_modules if dry and precision == "16-mixed" else (), ended=_hopeless(precision, dry))
        for precision in wanted
    ]
    stopped = Seeds(
        train=lambda arm, seed: processes.train(request, arm, seed),
        baseline=baseline,
        candidates=candidates,
        margins=margins,
        first_seed=request.seed,
        budget_s=start + budget_s - time.monotonic(),
        say=progress,
    ).run()
    spreads = tuple(spread(metric, baseline.runs) for metric in opened["metrics"])
    proofs = [_candidate(arm, baseline, spreads, margins) for arm in candidates]
    chosen, judged = choose(proofs)
    return PrecisionProof(
        schema=SCHEMA,
        torchproof=__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=target,
        environment=read_environment(),
        device=opened["device"],
        precision=chosen.precision if chosen else "32-true",
        fp32_modules=chosen.fp32_modules if chosen else (),
        margins=dict(margins),
        plan=plan,
        num_steps=opened["num_steps"],
        full_num_steps=opened["full_num_steps"],
        dry_run=dry,
        baseline=spreads,
        runs=tuple(baseline.runs),
        candidates=tuple(judged),
        stopped=stopped,
        findings=_findings(target, dry, spreads, judged),
        search_s=time.monotonic() - start,
    )


def _check(margins: Mapping[str, float], candidates: Sequence[str], num_steps: int | None, budget_s: float) -> None:
    names = get_args(TrainPrecision)
    if unknown := [name for name in candidates if name not in names]:
        raise UsageError(f"there is no precision {unknown[0]}", help=f"name one of {', '.join(names)}")
    if not candidates:
        raise UsageError("there is no precision to compare with 32-true", help="name bf16-mixed or 16-mixed")
    if num_steps is not None and num_steps < 1:
        raise UsageError(f"{num_steps} steps train nothing", help="name 1 or more, or None for the recipe's own")
    if not budget_s > 0:
        raise UsageError(f"a budget of {budget_s:g} s is no time", help="name the seconds that it may take")
    for metric, margin in margins.items():
        if not (margin > 0 and math.isfinite(margin)):
            raise UsageError(
                f"the margin of {metric} is {margin:g}, and a margin is above 0",
                help="name the difference that doesn't matter to you",
            )


def _hopeless(precision: TrainPrecision, dry: DryRun | None) -> str:
    """Why it isn't trained at all: its gradients were run, and no scale makes them finite."""
    if precision != "16-mixed" or dry is None or dry.refusal or dry.loss_32 is None or dry.scale is not None:
        return ""
    return "its gradients are not finite at any scale"


def _candidate(
    arm: Arm, baseline: Arm, spreads: Sequence[MetricSpread], margins: Mapping[str, float]
) -> PrecisionCandidate:
    comparisons = [
        compare(each.metric, baseline.runs, arm.runs, margins.get(each.metric), each.better).comparison
        for each in spreads
    ]
    return PrecisionCandidate(
        precision=arm.precision,
        fp32_modules=arm.fp32_modules,
        comparisons=tuple(comparisons),
        step_time=ratio(baseline.runs, arm.runs, lambda run: run.step_s),
        memory=ratio(baseline.runs, arm.runs, lambda run: run.peak_bytes),
        runs=tuple(arm.runs),
        ended=arm.ended,
        verdict="",
    )


def _findings(
    target: Target, dry: DryRun | None, spreads: Sequence[MetricSpread], candidates: Sequence[PrecisionCandidate]
) -> tuple[Finding, ...]:
    name = target.reference
    seen: list[Observation] = []
    if dry is not None:
        seen.append(
            OverflowSeen(
                target=name,
                overflows=dry.overflows,
                fp32_modules=dry.fp32_modules,
                num_batches=dry.num_batches,
            )
        )
    for candidate in candidates:
        scalers = [run.scaler for run in candidate.runs if run.scaler]
        if scalers:  # one cause, one finding: the worst seed shows it
            seen.append(max(scalers, key=lambda scaler: scaler.num_skipped_last))
        for base, found in zip(spreads, candidate.comparisons, strict=True):
            if found.margin is None and not found.non_finite_seeds:
                continue
            seen.append(
                MetricSeen(
                    target=name,
                    candidate=candidate.precision,
                    metric=found.metric,
                    baseline_mean=base.mean,
                    better=base.better,
                    margin=found.margin or 0.0,
                    difference=_shown(found),
                    num_seeds=found.num_seeds,
                    num_non_finite=len(found.non_finite_seeds),
                )
            )
    return tuple(finding for observation in seen for finding in judge(observation))


def _shown(found: MetricComparison) -> Difference | None:
    if found.verdict != "different" or found.estimate is None or found.low is None or found.high is None:
        return None
    return Difference(mean=found.estimate, low=found.low, high=found.high)
