"""Which precision to train in: what was compared, what it showed, and what was chosen."""

from typing import Literal

from torchproof.types.environment import Environment
from torchproof.types.finding import Finding
from torchproof.types.record import Record
from torchproof.types.target import Target
from torchproof.types.training import TrainPrecision

Equivalence = Literal["equivalent", "different", "undecided"]
Better = Literal["higher", "lower", "unknown"]


class SeedPlan(Record):
    """How many seeds are trained and when they are looked at; fixed before the first run.

    Attributes:
        looks: numbers of seeds after which the intervals are judged; the last one is the most that are trained.
        confidence: of each look's interval, so that all looks together are wrong as seldom as one.
        power: chance that a precision without any difference is found equivalent by the last look, where the paired
            differences have the standard deviation ``sd_in_margins`` times the margin.
    """

    looks: tuple[int, ...]
    confidence: float
    power: float
    sd_in_margins: float


class Ratio(Record):
    """Candidate / baseline, the median over the seeds, with its 95% interval; below 1 the candidate needs less.

    Attributes:
        low, high: None where the seeds are too few for an interval.
    """

    estimate: float
    low: float | None
    high: float | None


class Difference(Record):
    """Candidate - baseline: the mean over equal seeds, and its interval, corrected for all looks."""

    mean: float
    low: float
    high: float


class MetricSpread(Record):
    """A metric of the baseline over the seeds.

    Attributes:
        mean, sd: over the seeds where it is finite; None where there are none, or one.
        better: which way training moved it, in every seed; ``unknown`` where it went both ways.
        values: by seed; None where it is not finite.
    """

    metric: str
    mean: float | None
    sd: float | None
    better: Better
    values: tuple[float | None, ...]


class MetricComparison(Record):
    """A metric of a candidate against the baseline, by the paired differences of equal seeds.

    Attributes:
        margin: a difference up to here doesn't matter to the user; None: none was given, so nothing is judged.
        is_worse: where they are different: whether the candidate is worse; None where the better way is unknown.
        differences: candidate - baseline, by seed; None where one of them is not finite.
        num_seeds: behind the interval.
        estimate, low, high: of the mean difference; None where there are too few seeds.
        non_finite_seeds: where the candidate's is not finite and the baseline's is.
        num_more_seeds: that would decide it where spread and difference stay as they are; None where that is unknown.
        reason: of the verdict, in a few words.
    """

    metric: str
    margin: float | None
    verdict: Equivalence
    is_worse: bool | None
    differences: tuple[float | None, ...]
    num_seeds: int
    estimate: float | None
    low: float | None
    high: float | None
    non_finite_seeds: tuple[int, ...]
    num_more_seeds: int | None
    reason: str


class Overflow(Record):
    """An operation whose result is too large for float16.

    Attributes:
        phase: of the step.
        module: qualified name of the innermost module that runs it; empty: the model's own forward, or the loss.
        op: as the dispatcher names it, such as ``aten.mul.Tensor``.
        line: of the user's source, ``file.py:12``; empty where there is none on the stack.
        largest: absolute value.
    """

    phase: Literal["forward", "backward", "evaluation"]
    module: str
    op: str
    line: str
    largest: float


class DryRun(Record):
    """A few micro-batches without a step, before anything is trained.

    Attributes:
        overflows: by operation, without islands; none where 16-mixed then ran as well as 32-true: a value that is
            clamped next may overflow.
        fp32_modules: islands in float32 after which none is left, and with which 16-mixed then ran; empty where none
            is needed, or none helps.
        loss_32: of the micro-batches, in 32-true; None where they were not run, or it is not finite.
        loss_16: the same in 16-mixed with the islands.
        scale: the largest power of two up to the scaler's first one at which the gradients of 16-mixed are finite;
            None where there is none.
        lost_metrics: not finite in 16-mixed, and finite in 32-true.
        num_batches: micro-batches of ``train_data`` that were run.
        refusal: why it could not be done; empty where it could.
    """

    overflows: tuple[Overflow, ...] = ()
    fp32_modules: tuple[str, ...] = ()
    loss_32: float | None = None
    loss_16: float | None = None
    scale: float | None = None
    lost_metrics: tuple[str, ...] = ()
    num_batches: int = 0
    refusal: str = ""


class ScalerSeen(Record):
    """What the gradient scaler of a run in 16-mixed did.

    Attributes:
        run: which one, such as ``seed 0``; empty where there is one only.
        num_steps: steps that were tried.
        num_skipped, num_skipped_last: of them, those that it skipped; and those in a row at the end.
        first_scale, last_scale: before the first step and after the last one.
    """

    target: str
    run: str
    num_steps: int
    num_skipped: int
    num_skipped_last: int
    first_scale: float
    last_scale: float


class SeedRun(Record):
    """One training in a fresh process.

    Attributes:
        metrics: at the end; None where one is not finite.
        first_metrics: of the untrained model; empty for a candidate.
        step_s: the median of its steps.
        peak_bytes: resident memory of the process; on CUDA what was allocated there.
        scaler: None without one.
    """

    seed: int
    metrics: dict[str, float | None]
    first_metrics: dict[str, float | None]
    num_steps: int
    step_s: float
    peak_bytes: int
    scaler: ScalerSeen | None


class PrecisionCandidate(Record):
    """One precision against the baseline.

    Attributes:
        comparisons: by metric.
        step_time, memory: None where no seed was trained.
        ended: what ruled it out before the other precisions had their seeds; empty where nothing did.
        verdict: why it was chosen, or why not.
    """

    precision: TrainPrecision
    fp32_modules: tuple[str, ...]
    comparisons: tuple[MetricComparison, ...]
    step_time: Ratio | None
    memory: Ratio | None
    runs: tuple[SeedRun, ...]
    ended: str
    verdict: str


class PrecisionProof(Record):
    """The precision to train in, with its evidence.

    Attributes:
        precision, fp32_modules: chosen; ``32-true`` where nothing faster was shown to be as good.
        num_steps: optimizer steps of each training; ``full_num_steps`` are the recipe's own.
        dry_run: None without 16-mixed.
        baseline: its metrics over the seeds.
        runs: of the baseline.
        stopped: why no more seeds were trained.
    """

    schema: int
    torchproof: str
    created: str
    target: Target
    environment: Environment
    device: str
    precision: TrainPrecision
    fp32_modules: tuple[str, ...]
    margins: dict[str, float]
    plan: SeedPlan
    num_steps: int
    full_num_steps: int
    dry_run: DryRun | None
    baseline: tuple[MetricSpread, ...]
    runs: tuple[SeedRun, ...]
    candidates: tuple[PrecisionCandidate, ...]
    stopped: str
    findings: tuple[Finding, ...]
    search_s: float
