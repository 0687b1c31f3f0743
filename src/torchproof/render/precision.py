"""What ``tune`` says of a recipe's precision: the baseline, each candidate's metrics and cost, and what was chosen."""

import math
import textwrap
from collections.abc import Iterator, Sequence

from torchproof.render import units
from torchproof.rules.wording import count
from torchproof.types.precision import DryRun, MetricComparison, Overflow, PrecisionCandidate, PrecisionProof, SeedPlan

MAX_OVERFLOWS = 3  # more of them hide the rest; the stored proof has all


def text(proof: PrecisionProof, width: int = 80) -> str:
    """The whole report, without the findings."""
    lines = [_subject(proof), _plan(proof.plan, proof.margins)]
    parts = ["\n".join(_wrap(line, width) for line in lines)]
    if proof.runs:
        parts.append(_block("32-true", list(_baseline(proof)), width))
    parts += [_block(c.precision, list(_candidate(c, proof.dry_run)), width) for c in proof.candidates]
    islands = "".join(f" --fp32-module {name}" for name in proof.fp32_modules)
    parts.append(
        _wrap(f"stopped: {proof.stopped}; took {units.seconds(proof.search_s)}", width)
        + f"\nprecision: {proof.precision}{islands}"
    )
    return "\n\n".join(parts) + "\n"


def _subject(proof: PrecisionProof) -> str:
    steps = f"{proof.num_steps:,} steps"
    if proof.num_steps < proof.full_num_steps:
        steps += f" of the recipe's {proof.full_num_steps:,}, so the end of a whole run wasn't seen"
    seeds = count(len(proof.runs), "seed")
    return f"{proof.target.reference} on {proof.device}: {seeds} in 32-true, each trained for {steps}"


def _plan(plan: SeedPlan, margins: dict[str, float]) -> str:
    looks = ", ".join(map(str, plan.looks[:-1]))
    said = (
        f"planned: up to {plan.looks[-1]} seeds, looked at after {looks} and {plan.looks[-1]}, with intervals of "
        f"{plan.confidence:.2%}"
    )
    if not margins:
        return said
    spreads = ", ".join(f"{name} {plan.sd_in_margins * margin:.2g}" for name, margin in margins.items())
    return f"{said}; {plan.power:.0%} power where the sd of the differences is at most {spreads}"


def _baseline(proof: PrecisionProof) -> Iterator[str]:
    for each in proof.baseline:
        if each.mean is None:
            yield f"{each.metric}: not finite with any seed"
            continue
        places = units.decimals(each.sd) - 1 if each.sd else units.decimals(each.mean)
        sd = f", sd between seeds {units.number(each.sd, places)}" if each.sd else ""
        yield f"{each.metric} {units.number(each.mean, places)}{sd}; {_better(each.better)}"


def _better(better: str) -> str:
    return f"{better} is better" if better != "unknown" else "training moved it both ways"


def _candidate(candidate: PrecisionCandidate, dry: DryRun | None) -> Iterator[str]:
    if candidate.precision == "16-mixed" and dry is not None:
        yield from _dry_run(dry)
    if candidate.runs:
        yield from (_metric(each) for each in candidate.comparisons)
        costs = (("step time", candidate.step_time), ("peak memory", candidate.memory))
        yield ", ".join(f"{name} {units.ratio(r.estimate, r.low, r.high)}" for name, r in costs if r is not None)
    if skipped := sorted(run.scaler.num_skipped for run in candidate.runs if run.scaler):
        spread = f"{skipped[0]}" if skipped[0] == skipped[-1] else f"{skipped[0]} to {skipped[-1]}"
        yield f"the scaler skipped {spread} of {candidate.runs[0].num_steps} steps"
    if candidate.ended and not candidate.verdict.startswith(candidate.ended):
        yield f"trained no more: {candidate.ended}"
    yield candidate.verdict if candidate.verdict == "chosen" else f"not chosen: {candidate.verdict}"


def _metric(each: MetricComparison) -> str:
    if each.estimate is None:
        return f"{each.metric} {each.verdict}: {each.reason}"
    places = _places(each)
    numbers = _signed(each.estimate, places)
    if each.low is not None and each.high is not None:
        numbers += f" [{_signed(each.low, places)}, {_signed(each.high, places)}]"
    return f"{each.metric} {each.verdict}: {numbers} over {count(each.num_seeds, 'seed')}, {each.reason}"


def _places(each: MetricComparison) -> int:
    """Two digits of the interval's half; the estimate is often much nearer to 0 than that."""
    half = (each.high - each.low) / 2 if each.high is not None and each.low is not None else abs(each.estimate or 0.0)
    return 1 - math.floor(math.log10(half)) if half > 0 else 2


def _signed(value: float, places: int) -> str:
    return ("+" if value > 0 else "") + units.number(value, places)


def _dry_run(dry: DryRun) -> Iterator[str]:
    if dry.refusal:
        yield f"overflows could not be looked for: {dry.refusal}"
    for overflow in dry.overflows[:MAX_OVERFLOWS]:
        yield f"overflow predicted: {_overflow(overflow)}"
    if len(dry.overflows) > MAX_OVERFLOWS:
        yield f"and {len(dry.overflows) - MAX_OVERFLOWS} more"
    if dry.fp32_modules:
        yield f"trained with {', '.join(dry.fp32_modules)} in float32, where none is left"


def _overflow(overflow: Overflow) -> str:
    where = ", ".join(part for part in (overflow.module, overflow.line) if part)
    return f"{overflow.op} ({where}) reaches {overflow.largest:.3g} in {overflow.phase}"


def _block(label: str, lines: Sequence[str], width: int) -> str:
    indent = " " * 12
    wrapped = [_wrap(line, width, indent) for line in lines]
    return (label.ljust(12) + "\n".join(wrapped)[12:]).rstrip()


def _wrap(line: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
