"""A rehearsal of a recipe on two ranks of this machine: what would go wrong on many, before they are rented."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchproof.errors import TorchproofError, TrialError, UserCodeError
from torchproof.measure.process import as_trial_error
from torchproof.rules.distributed.checkpoint_loses_state import MIN_STEP_DIFF, loses_state
from torchproof.rules.registry import judge
from torchproof.rules.repeats import ignores_index, repeats, suspicious
from torchproof.train.compare import changed, compare_draws, compare_samples, compare_weights, draw_epochs, spread
from torchproof.train.ranks import Ranks
from torchproof.types import Finding, Target
from torchproof.types.rehearsal import (
    Checked,
    DataName,
    DrawsSeen,
    GradientsSeen,
    LengthsSeen,
    RehearsalReport,
    ResumeSeen,
    SamplesSeen,
    Verdict,
)

WORLD_SIZE = 2
NUM_STEPS = 3  # DDP speaks of an unused parameter at the second one; the optimizer's state is in use from then on
NUM_BATCHES = NUM_STEPS + 1  # for the gradients, on each rank: those of all steps that are taken later
NUM_INDICES = 16  # samples that ranks compare
NUM_DRAWS = 16  # of each worker in each epoch: 32 pairs, of which even a coin is equal by chance in 1 of 4e9 cases
NUM_DRAWN = 64  # indices that they come from
CALL_S = 600.0  # for one step of the rehearsal: reading the data, or a few training steps
DATA: tuple[DataName, ...] = ("train_data", "eval_data")
NOT_FINITE = "the loss is not a finite number"
CHECKS = ("lengths", "workers", "samples", "weights", "gradients", "steps", "checkpoint")


def rehearse(
    target: Target, *, call_s: float = CALL_S, say: Callable[[str, float], None] = lambda text, share: None
) -> RehearsalReport:
    """Runs it in fresh processes.

    Args:
        call_s: limit of each single wait; then the rank that gives no answer is named.
        say: is told what is being done, and the share that is.

    Raises:
        TorchproofError, UserCodeError: the recipe can't be trained on any number of ranks, or a rank died.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchproof-rehearsal-") as run:
        rehearsal = _Rehearsal(target, run, call_s, say)
        rehearsal.run_all()
    return RehearsalReport(
        target=target,
        world_size=WORLD_SIZE,
        num_steps=NUM_STEPS,
        batch_size=rehearsal.batch_size,
        seconds=time.monotonic() - start,
        checked=tuple(rehearsal.checked.get(name) or _skipped(name) for name in CHECKS),
        findings=tuple(rehearsal.findings),
    )


class _Rehearsal:
    """One rehearsal: what it has found so far."""

    def __init__(self, target: Target, run: str, call_s: float, say: Callable[[str, float], None]) -> None:
        self.target = target
        self.name = target.reference
        self.run = run
        self.call_s = call_s
        self.say = say
        self.batch_size = 0
        self.checked: dict[str, Checked] = {}
        self.findings: list[Finding] = []

    def run_all(self) -> None:
        went_on = None
        with self.ranks("first", f"opening the data on {WORLD_SIZE} ranks") as ranks:
            same_length = self.look_at_lengths()
            self.look_at_draws(ranks)  # before the ranks read: a generator that is made by then would be copied
            if same_length:
                self.look_at_samples(ranks)
            if self.look_at_model(ranks) and same_length and self.take_steps(ranks):
                went_on = self.go_on(ranks, "went-on")
        if went_on is not None:
            self.resume(went_on)

    @contextmanager
    def ranks(self, group: str, doing: str) -> Iterator[Ranks]:
        """Ranks that have the recipe and its data open."""
        self.tell(doing)
        with Ranks(WORLD_SIZE, self.call_s) as ranks:
            self.opened = ranks.each(
                "open",
                "opening train_data() and eval_data()",
                target=self.target,
                run=self.run,
                group=group,
                wait_s=self.call_s / 2,  # less than a call's: who waits for another speaks first
            )
            yield ranks

    def tell(self, text: str) -> None:
        """Says what is being done."""
        self.say(text, len(self.checked) / len(CHECKS))

    def look_at_lengths(self) -> bool:
        """Whether the ranks agree in them; before any rank waits for another."""
        self.lengths = [
            LengthsSeen(target=self.name, data=data, lengths=tuple(opened[data] for opened in self.opened))
            for data in DATA
        ]
        self.check("lengths", self.lengths, ", ".join(f"{seen.data}() {seen.lengths[0]:,}" for seen in self.lengths))
        return all(len(set(seen.lengths)) == 1 for seen in self.lengths)

    def look_at_samples(self, ranks: Ranks) -> None:
        """The same indices on each rank."""
        seen_all = [self.samples(ranks, seen.data, seen.lengths[0]) for seen in self.lengths]
        unclear = [seen.data for seen in seen_all if not seen.num_comparable]
        self.check(
            "samples",
            seen_all,
            f"{', '.join(f'{seen.num_indices} of {seen.data}()' for seen in seen_all)}, by index",
            undecided=f"every part of {' and '.join(unclear)} changes from call to call" if unclear else "",
        )

    def samples(self, ranks: Ranks, data: DataName, length: int) -> SamplesSeen:
        indices = spread(length, NUM_INDICES)
        read = ranks.each("samples", f"reading samples of {data}()", name=data, indices=indices)
        return compare_samples(self.name, data, indices, read)

    def look_at_model(self, ranks: Ranks) -> bool:
        """The weights; whether ranks have the same names and shapes."""
        seen = compare_weights(self.name, ranks.each("weights", "calling model()"), num_steps=0)
        self.check("weights", [seen], f"{seen.num_tensors} tensors as model() returns them")
        return not seen.shapes_differ

    def take_steps(self, ranks: Ranks) -> bool:
        """Gradients, and steps with DDP; whether the ranks are still one model."""
        self.tell("taking a few steps")
        self.batch_size = ranks.each("prepare", "making the optimizer, and DDP around the model")[0]
        by_rank = ranks.each("gradients", "calling loss() and backward()", num_batches=NUM_BATCHES)
        seen = GradientsSeen(
            target=self.name,
            num_batches=NUM_BATCHES * WORLD_SIZE,
            num_parameters=len(by_rank[0]),
            missing={name: times for name in by_rank[0] if (times := sum(rank[name] for rank in by_rank))},
        )
        self.check(
            "gradients", [seen], f"each of {seen.num_parameters} parameters in each of {seen.num_batches} batches"
        )
        if seen.missing:
            return False
        trained = ranks.each("train", "training", num_steps=NUM_STEPS)
        weights = compare_weights(self.name, [rank["weights"] for rank in trained], NUM_STEPS)
        detail = f"{weights.num_tensors} parameters after {NUM_STEPS} steps of {self.batch_size} samples with DDP"
        self.check("steps", [weights], detail, undecided="" if trained[0]["finite"] else NOT_FINITE)
        return not weights.different

    def go_on(self, ranks: Ranks, save_as: str) -> list[Any]:
        return ranks.each("go_on", "taking a step", save_as=save_as)

    def resume(self, went_on: list[Any]) -> None:
        """Loads the checkpoint in fresh processes, and once more where they take another step."""
        with self.resumed("resumed") as (ranks, resumed):
            step_diff, parameter = ranks.each("step_diff", "comparing steps", one="went-on", other="resumed")[0]
        same_batch = all(one["batches"] == other["batches"] for one, other in zip(went_on, resumed, strict=True))
        again_diff = None
        if step_diff > MIN_STEP_DIFF and same_batch:
            with self.resumed("again") as (ranks, _):
                again_diff, _ = ranks.each("step_diff", "comparing steps", one="resumed", other="again")[0]
        one, other = went_on[0], resumed[0]
        seen = ResumeSeen(
            target=self.name,
            num_stored=len(one["stored"]),
            changed=changed(one["stored"], other["stored"]),
            same_batch=same_batch,
            step_diff=step_diff,
            again_diff=again_diff,
            parameter=parameter,
            attributes=changed(one["attributes"], other["attributes"]),
        )
        undecided = ""
        if not one["finite"]:
            undecided = NOT_FINITE
        elif not same_batch:
            undecided = "the samples of the same indices are others after loading"
        elif step_diff > MIN_STEP_DIFF and not loses_state(seen):
            undecided = "a step from the same checkpoint is another one each time"
        detail = f"{seen.num_stored} values after loading, and the next step"
        self.check("checkpoint", [seen], detail, undecided=undecided)

    @contextmanager
    def resumed(self, save_as: str) -> Iterator[tuple[Ranks, list[Any]]]:
        """Fresh ranks that have loaded the checkpoint and taken a step."""
        with self.ranks(save_as, "loading the checkpoint in fresh processes") as ranks:
            ranks.each("weights", "calling model()")
            ranks.each("prepare", "making the optimizer, and DDP around the model")
            ranks.each("load", "loading the checkpoint", num_steps=NUM_STEPS)
            yield ranks, self.go_on(ranks, save_as)

    def look_at_draws(self, ranks: Ranks) -> None:
        """What DataLoader workers read, epoch by epoch; undecided where the data can't be read there."""
        self.tell("reading samples")
        other, same = draw_epochs(spread(min(self.lengths[0].lengths), NUM_DRAWN), NUM_DRAWS)
        try:
            epochs = ranks.first("draws", epochs=[*other, *same], wait_s=self.call_s / 4)
        except (TrialError, TorchproofError, UserCodeError) as exc:
            cause = str(as_trial_error(exc))
            self.checked["workers"] = Checked(name="workers", verdict="undecided", detail=cause)
            return
        seen = compare_draws(self.name, epochs[: len(other)], epochs[len(other) :])
        undecided = "samples repeat, and may do so by chance" if _may_repeat(seen) else ""
        self.check("workers", [seen], "order and random numbers in 2 workers and 2 epochs", undecided=undecided)

    def check(self, name: str, seen_all: list[Any], detail: str, *, undecided: str = "") -> None:
        """Judges what was seen."""
        found = [finding for seen in seen_all for finding in judge(seen)]
        self.findings += found
        verdict: Verdict = "found" if found else "undecided" if undecided else "fine"
        detail = ", ".join(dict.fromkeys(finding.code for finding in found)) or undecided or detail
        self.checked[name] = Checked(name=name, verdict=verdict, detail=detail)


def _skipped(name: str) -> Checked:
    return Checked(name=name, verdict="skipped", detail="needs what was found above to be cured first")


def _may_repeat(seen: DrawsSeen) -> bool:
    """Whether repeated samples could be, and aren't proven."""
    other, draws = seen.other_index, seen.same_index
    if suspicious(other.num_equal_epochs, other):
        return not ignores_index(other)
    return any(
        suspicious(num, draws) and not repeats(num, draws) for num in (draws.num_equal_workers, draws.num_equal_epochs)
    )
