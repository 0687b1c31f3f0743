"""What a rehearsal of a recipe saw on two ranks, and what it says at the end."""

from typing import Literal

from torchproof.types.finding import Finding
from torchproof.types.record import Record
from torchproof.types.target import Target

Verdict = Literal["fine", "found", "undecided", "skipped"]
DataName = Literal["train_data", "eval_data"]


class LengthsSeen(Record):
    """How long a dataset is on each rank.

    Attributes:
        lengths: by rank.
    """

    target: str
    data: DataName
    lengths: tuple[int, ...]


class SamplesSeen(Record):
    """The same indices of a dataset, read on every rank with the same random numbers.

    A sample is compared by its parts (its tensors, numbers and strings), and only by those that are the same when the
    rank reads it a second time.

    Attributes:
        num_indices: that were read.
        num_comparable: of these, what has a part that can be compared; 0 where everything changes from call to call.
        num_different: indices whose sample differs between ranks. A part that is the same at all indices doesn't count
            where others vary.
        num_agreeing_parts: parts that vary from index to index and agree between the ranks at each of them.
        num_elsewhere: of those that differ, what another rank has under another one of the indices.
        index: the first that differs; -1 where none does.
    """

    target: str
    data: DataName
    num_indices: int
    num_comparable: int
    num_different: int
    num_agreeing_parts: int
    num_elsewhere: int
    index: int


class Draws(Record):
    """Samples that come in pairs which should differ, where anything in them changes from call to call.

    Attributes:
        num_values: different samples among all.
        num_pairs: as many pairs between two workers in one epoch, as between two epochs in one worker.
        num_equal_workers, num_equal_epochs: pairs of equal samples.
        chance: that two samples taken at random are equal.
    """

    num_values: int
    num_pairs: int
    num_equal_workers: int
    num_equal_epochs: int
    chance: float


class DrawsSeen(Record):
    """``train_data`` read by two DataLoader workers in two epochs, the global generators reset before each sample.

    Attributes:
        other_index: each call for another index than the one it is paired with.
        same_index: each call for the same index.
    """

    target: str
    other_index: Draws
    same_index: Draws


class WeightsSeen(Record):
    """Parameters of the model on each rank, compared bit for bit.

    Attributes:
        num_steps: optimizer steps before that; 0: as ``model()`` returned it, buffers included.
        num_tensors: that were compared.
        different: names of those that differ.
        shapes_differ: whether ranks have other names or shapes, so that they can't train together.
    """

    target: str
    num_steps: int
    num_tensors: int
    different: tuple[str, ...]
    shapes_differ: bool


class GradientsSeen(Record):
    """Which parameters got no gradient from ``loss``, in backward passes of single batches.

    Attributes:
        num_batches: on all ranks together.
        num_parameters: that require a gradient.
        missing: batches without a gradient, by the parameter's name.
    """

    target: str
    num_batches: int
    num_parameters: int
    missing: dict[str, int]


class ResumeSeen(Record):
    """A checkpoint loaded by fresh processes, against the processes that went on.

    Attributes:
        num_stored: values in the checkpoint, of the model, the optimizer and the scheduler.
        changed: names of those that were others after loading.
        same_batch: whether the next step had the same samples; without them the step says nothing.
        step_diff: largest difference of a parameter after the next step, by the largest change that the step made.
        again_diff: the same between two processes that both loaded it; None where it wasn't looked at.
        parameter: the one that differs most; empty where none does.
        attributes: plain attributes of model, optimizer and recipe that were others after loading.
    """

    target: str
    num_stored: int
    changed: tuple[str, ...]
    same_batch: bool
    step_diff: float
    again_diff: float | None
    parameter: str
    attributes: tuple[str, ...]


class Checked(Record):
    """One thing that was looked at.

    Attributes:
        detail: what was compared, or why it can't be told.
    """

    name: str
    verdict: Verdict
    detail: str


class RehearsalReport(Record):
    """What ``train --rehearse`` found.

    Attributes:
        seconds: it took.
        batch_size: samples of one step, those of all ranks together.
    """

    target: Target
    world_size: int
    num_steps: int
    batch_size: int
    seconds: float
    checked: tuple[Checked, ...]
    findings: tuple[Finding, ...]
