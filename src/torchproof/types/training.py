"""What a training run is asked for, says while it runs, and leaves behind."""

from typing import Literal

from torchproof.types.environment import Environment
from torchproof.types.finding import Finding
from torchproof.types.record import Record
from torchproof.types.target import Target

Strategy = Literal["single", "ddp", "fsdp"]
TrainPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]


class Loading(Record):
    """The DataLoader's settings, as PyTorch names them. Batches come in order: a run goes on bit for bit.

    Attributes:
        num_threads: intra-op threads of each training process; 0: its share of the cores.
    """

    num_threads: int = 0
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = True
    pin_memory: bool = True


class StepMemory(Record):
    """What one process needs for a step, in bytes, by what it is for.

    Attributes:
        activation_bytes: the peak, less the others.
        block_bytes: weights of the largest part that FSDP gathers at once.
        refusal: why it could not be found out; then the others are 0.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    block_bytes: int = 0
    refusal: str = ""

    @property
    def state_bytes(self) -> int:
        """What FSDP divides among the ranks."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


class StrategyChoice(Record):
    """How the ranks share a model, and the arithmetic that says so.

    Attributes:
        activation_checkpointing: whether activations are computed again in backward, to need less memory.
        device_bytes: memory of one rank's device.
        memory: of a step in one process; ``checkpointed`` the same with activation checkpointing, where it was needed.
        reason: in one line.
    """

    strategy: Strategy
    activation_checkpointing: bool
    world_size: int
    device_bytes: int
    memory: StepMemory
    checkpointed: StepMemory | None
    reason: str


class TrainRequest(Record):
    """What is asked for; kept in the run's folder, where every process reads it.

    Attributes:
        batch_size: samples of one optimizer step, those of all processes together.
        num_steps: None: as many as ``num_epochs`` have.
        micro_batch_asked: samples that one process should forward at once; ``micro_batch_size`` less after it ran out
            of memory.
        fp32_modules: dotted names that autocast leaves alone.
        activation_checkpointing: activations are computed again in backward.
        save_every_s: time between two checkpoints.
        tensorboard: whether the curves are written for it, too.
    """

    target: Target
    batch_size: int
    micro_batch_asked: int
    micro_batch_size: int
    num_epochs: int
    seed: int
    max_grad_norm: float | None
    num_steps: int | None = None
    strategy: Strategy = "single"
    precision: TrainPrecision = "32-true"
    fp32_modules: tuple[str, ...] = ()
    activation_checkpointing: bool = False
    loading: Loading = Loading()
    save_every_s: float = 300.0
    tensorboard: bool = False


class StepLine(Record, omit_defaults=True):
    """One line of ``metrics.jsonl``: a step, or an evaluation after it.

    Attributes:
        loss: mean over the samples of the step; None where it was no finite number.
        scale: of the gradients in 16-mixed, for this step; it is halved where they overflowed, and the step is skipped.
        metrics: of ``eval_data``.
    """

    step: int
    epoch: int
    loss: float | None = None
    lr: float | None = None
    scale: float | None = None
    metrics: dict[str, float | None] | None = None


class DataSeen(Record):
    """A dataset's fingerprint: its length, and a hash of a few of its samples."""

    num_samples: int
    sha256: str


class TrainReport(Record):
    """``proof.json`` of a run: what was trained on what, and how it ended.

    Attributes:
        metrics: of the last evaluation; ``eval_precision`` is what it ran in.
        world_size: processes of the last call.
        activation_checkpointing: whether activations were computed again in backward.
    """

    schema: int
    torchproof: str
    created: str
    target: Target
    environment: Environment
    strategy: Strategy
    precision: TrainPrecision
    eval_precision: TrainPrecision
    fp32_modules: tuple[str, ...]
    device: str
    world_size: int
    batch_size: int
    micro_batch_size: int
    activation_checkpointing: bool
    loading: Loading
    seed: int
    num_steps: int
    num_epochs: int
    train_data: DataSeen
    eval_data: DataSeen
    loss: float | None
    metrics: dict[str, float | None]
    findings: tuple[Finding, ...]
