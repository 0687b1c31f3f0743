"""What a probe saw, as plain numbers. Probes use torch and look; rules import nothing and judge."""

from torchproof.types.loading import PickleSeen, SharedMemorySeen, WorkerMemorySeen
from torchproof.types.precision import Better, Difference, Overflow, ScalerSeen
from torchproof.types.record import Record
from torchproof.types.rehearsal import (
    DrawsSeen,
    GradientsSeen,
    LengthsSeen,
    ResumeSeen,
    SamplesSeen,
    WeightsSeen,
)


class ModesSeen(Record):
    """One request run several times: first as ``load()`` returned the model, then as it is served.

    Differences are the largest absolute difference divided by the largest absolute output.

    Attributes:
        target: what was looked at.
        training: the model's own flag as loaded; a hint, not a proof.
        loaded_repeat_diff: between equal requests, as loaded.
        loaded_mutated_buffers: buffers that a forward changed, as loaded.
        eval_diff: as loaded against an ``eval()`` copy, the same request.
        repeat_diff: between equal requests, in eval mode and inference mode, as served.
        uses_rng: whether a forward, as served, drew random numbers.
        mutated_buffers: buffers that a forward changed, as served.
        num_autograd_nodes: ``grad_fn`` nodes behind the outputs, as served.
        non_finite_outputs: outputs with NaN or infinite values, as served.
        num_samples: requests that were run.
        threshold: what rounding alone may explain in the model's own precision.
    """

    target: str
    training: bool
    loaded_repeat_diff: float
    loaded_mutated_buffers: tuple[str, ...]
    eval_diff: float
    repeat_diff: float
    uses_rng: bool
    mutated_buffers: tuple[str, ...]
    num_autograd_nodes: int
    non_finite_outputs: tuple[str, ...]
    num_samples: int
    threshold: float = 1e-5


class BatchSeen(Record):
    """The same row alone and among others.

    Attributes:
        row_diff: largest difference, relative to the largest output.
        output: the output that differs most.
        batch_size: rows in the batch.
        threshold: what rounding alone may explain in this precision.
        precision: ``float64`` where the model runs in it.
        error: why the model could not take a batch; empty when it could.
    """

    target: str
    row_diff: float
    output: str
    batch_size: int
    threshold: float
    precision: str
    error: str = ""


class PaddingSeen(Record):
    """The same request unpadded and padded.

    Attributes:
        pad_diff: largest difference on the unpadded part of the outputs, relative to the largest output.
        output: the output that differs most.
        dim: the variable dim that was padded.
        size, padded_size: its size before and after.
        threshold, precision, error: as in ``BatchSeen``.
    """

    target: str
    pad_diff: float
    output: str
    dim: str
    size: int
    padded_size: int
    threshold: float
    precision: str
    error: str = ""


class CompileSeen(Record):
    """What ``torch.compile`` did.

    Attributes:
        num_graphs: graphs that were compiled.
        num_graph_breaks: places where tracing stopped.
        num_frames: Python frames that it looked at.
        reasons: first line of each distinct graph break's reason.
    """

    target: str
    num_graphs: int
    num_graph_breaks: int
    num_frames: int
    reasons: tuple[str, ...] = ()


class GoldenSeen(Record):
    """A replay of the golden set.

    Attributes:
        candidate: label of what was run.
        output: the output that is furthest off.
        metric, error, bound: the tolerance's metric, the value reached and the bound.
        within: whether every row is inside the tolerance.
        num_rows: rows replayed.
        batch_size: rows to a forward.
    """

    target: str
    candidate: str
    output: str
    metric: str
    error: float
    bound: float
    within: bool
    num_rows: int
    batch_size: int


class ArtifactSeen(Record):
    """An artifact on the machine that should run it.

    Attributes:
        candidate: label of the choice whose artifact it is.
        missing_cpu_flags: instruction sets that it was compiled for and this CPU lacks.
        error: first line of what loading it raised; empty when it loaded.
        fallback: label of the choice used instead; empty when there was none.
    """

    target: str
    candidate: str
    missing_cpu_flags: tuple[str, ...]
    error: str
    fallback: str


class LoadSeen(Record):
    """A Service whose ``encode`` was called before ``load()``.

    Attributes:
        encode_needs_load: whether ``encode`` raised without ``load()`` and works with it.
        error: first line of what it raised.
        load_s: seconds that ``load()`` took.
    """

    target: str
    encode_needs_load: bool
    error: str
    load_s: float


class PlanSeen(Record):
    """The facts that a plan rests on, and the same facts where it is served.

    Attributes:
        expected: by name, as ``Plan.holds_while`` has them.
        found: by name; a fact that is missing or empty on either side is unknown.
    """

    target: str
    expected: dict[str, str]
    found: dict[str, str]


class Growth(Record):
    """How one kind of memory went with the requests answered: bytes per request, each slope with its interval.

    Attributes:
        slope, low, high: over all of them.
        first, first_low: over the first half; its lower bound.
        second, second_low: over the second half.
    """

    slope: float
    low: float
    high: float
    first: float
    first_low: float
    second: float
    second_low: float


class MemorySeen(Record):
    """The memory of a replica over the requests that it has answered, without the first ones, which warmed it up.

    Attributes:
        replica: its number.
        num_samples: looks at its memory.
        num_requests: answered between the first look and the last one.
        seconds: between these two.
        resident, private: mapped pages that are in memory, all of them and those that no other process shares.
        in_use: handed out by malloc; None where malloc can't be asked.
        free: held by malloc and not handed out; None as above.
        device_allocated, device_reserved: CUDA; None without it.
        num_device_ooms: allocations on the device that were refused between the two.
    """

    target: str
    replica: int
    num_samples: int
    num_requests: int
    seconds: float
    resident: Growth
    private: Growth
    in_use: Growth | None = None
    free: Growth | None = None
    device_allocated: Growth | None = None
    device_reserved: Growth | None = None
    num_device_ooms: int = 0


class TrainSeen(Record):
    """A training run, from its first step to its last.

    Attributes:
        batch_size: samples of one optimizer step, those of all processes together.
        micro_batch_asked: samples that one process should forward at once; ``micro_batch_size`` what it came to.
        non_finite_steps: those whose loss was NaN or infinite.
        non_finite_metrics: of the last evaluation.
    """

    target: str
    batch_size: int
    world_size: int
    micro_batch_asked: int
    micro_batch_size: int
    num_steps: int
    non_finite_steps: tuple[int, ...]
    non_finite_metrics: tuple[str, ...]


class OverflowSeen(Record):
    """A few micro-batches of a recipe under autocast to a low precision that has float32's range.

    Attributes:
        overflows: operations that autocast to float16 would run in float16, with results that float16 can't hold and
            arguments that it can; the first one first.
        fp32_modules: modules that cure it when they stay in float32, tried out; empty where none was found.
        num_batches: micro-batches that were run.
    """

    target: str
    overflows: tuple[Overflow, ...]
    fp32_modules: tuple[str, ...]
    num_batches: int


class MetricSeen(Record):
    """A metric trained in a lower precision against 32-true, over equal seeds.

    Attributes:
        candidate: the precision.
        baseline_mean: the metric in 32-true.
        better: which way training moves it.
        margin: up to here a difference doesn't matter.
        difference: None where none was shown.
        num_seeds: behind it.
        num_non_finite: seeds with which the candidate's is not finite and 32-true's is.
    """

    target: str
    candidate: str
    metric: str
    baseline_mean: float | None
    better: Better
    margin: float
    difference: Difference | None
    num_seeds: int
    num_non_finite: int = 0


Observation = (
    ModesSeen
    | BatchSeen
    | PaddingSeen
    | CompileSeen
    | GoldenSeen
    | ArtifactSeen
    | LoadSeen
    | PlanSeen
    | MemorySeen
    | TrainSeen
    | OverflowSeen
    | ScalerSeen
    | MetricSeen
    | LengthsSeen
    | SamplesSeen
    | DrawsSeen
    | WeightsSeen
    | GradientsSeen
    | ResumeSeen
    | SharedMemorySeen
    | WorkerMemorySeen
    | PickleSeen
)
