"""Trains seed after seed, baseline and candidates in turns, until the looks settle it or the time is up."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchproof.errors import RefusedError, TorchproofError, TrialError, UserCodeError
from torchproof.render import units
from torchproof.rules.precision.scaler_never_steps import MIN_STEPS
from torchproof.stats.equivalence import SEED_LOOKS
from torchproof.tune.precision.verdicts import compare, spread
from torchproof.types.precision import SeedRun
from torchproof.types.training import TrainPrecision


@dataclass
class Arm:
    """The trainings of one precision.

    Attributes:
        runs: by seed, the first one first.
        seconds: of each training, the start of its process included.
        settled: whether more seeds could change nothing.
        ended: what rules it out, so that it is trained no more; empty where nothing does.
    """

    precision: TrainPrecision
    fp32_modules: tuple[str, ...] = ()
    runs: list[SeedRun] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    settled: bool = False
    ended: str = ""


Train = Callable[[Arm, int], SeedRun]


@dataclass
class Seeds:
    """The sequence of seeds.

    Args:
        first_seed: the others are those after it.
        budget_s: from now on.
        say: called with what is being done and the share of the budget that is spent.
    """

    train: Train
    baseline: Arm
    candidates: list[Arm]
    margins: Mapping[str, float]
    first_seed: int
    budget_s: float
    say: Callable[[str, float], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._end = self.clock() + self.budget_s

    def run(self) -> str:
        """Trains; the arms then have their runs.

        Returns:
            why it stopped.

        Raises:
            RefusedError: the baseline can't be trained, or its first seed ends with a metric that is not finite.
            TorchproofError, UserCodeError: as above, where it is the user's code.
        """
        for look in SEED_LOOKS:
            while len(self.baseline.runs) < look:
                if not self._active():
                    return "no candidate is left to train"
                if stopped := self._no_time(look) or self._train_seed():
                    return stopped
            if not self.margins:
                return "no margin was given, so there is nothing to decide"
            for arm in self._active():
                self._look(arm)
            if not self._active():
                return "it was settled"
        return f"{SEED_LOOKS[-1]} seeds are the most that are trained"

    def _active(self) -> list[Arm]:
        return [arm for arm in self.candidates if not arm.ended and not arm.settled]

    def _no_time(self, look: int) -> str:
        """Says so where the next look can't be reached: seeds that nobody looks at are not worth their time."""
        left = self._end - self.clock()
        num_done = len(self.baseline.runs)
        if left <= 0:
            return "the budget was spent"
        if num_done < 2:  # the first one may have met cold caches
            return ""
        needed = (look - num_done) * sum(min(arm.seconds) for arm in (self.baseline, *self._active()))
        if needed <= left:
            return ""
        return (
            f"the next look, at {look} seeds, would have taken {units.seconds(needed)} more, and the budget had "
            f"{units.seconds(left)} left"
        )

    def _train_seed(self) -> str:
        """One seed in all precisions, another one first each time; why it ended early, or nothing."""
        number = len(self.baseline.runs)
        arms = [self.baseline, *self._active()]
        found: dict[int, SeedRun] = {}
        for position in range(len(arms)):
            index = (position + number) % len(arms)
            arm, seed = arms[index], self.first_seed + number
            start = self.clock()
            self.say(f"{arm.precision}, seed {number + 1}", min(1.0, 1 - (self._end - start) / self.budget_s))
            try:
                found[index] = self.train(arm, seed)
            except TrialError as exc:
                if exc.kind == "timed out":
                    return "the budget was spent"
                self._fails(arm, seed, exc)
            except (TorchproofError, UserCodeError) as exc:
                self._fails(arm, seed, exc)
            else:
                arm.seconds.append(self.clock() - start)
                if arm is self.baseline and not number:
                    self._check(found[index])
        for index, run in found.items():
            arms[index].runs.append(run)
        for index in range(1, len(arms)):
            if index in found:
                arms[index].ended = _broken(found[index], found[0])
        return ""

    def _check(self, first: SeedRun) -> None:
        for metric in self.margins:
            if first.metrics.get(metric) is None:
                raise RefusedError(
                    f"{metric} is not finite after training in 32-true with seed {first.seed}: nothing can be compared "
                    "with it",
                    help="look at the loss and at metrics(): a mean over nothing, a division by 0, a log of 0",
                )

    def _fails(self, arm: Arm, seed: int, exc: Exception) -> None:
        if arm is not self.baseline:
            arm.ended = f"seed {seed} can't be trained: {exc}"
        elif isinstance(exc, TrialError):
            raise RefusedError(
                f"the recipe can't be trained in {arm.precision} with seed {seed}: {exc}",
                help="make torchproof train run first; it says more",
            ) from None
        else:
            raise exc

    def _look(self, arm: Arm) -> None:
        """Ends the arm where all metrics that are judged are settled, or where one of them rules it out."""
        settled = []
        for metric, margin in self.margins.items():
            better = spread(metric, self.baseline.runs).better
            done, rules_out = compare(metric, self.baseline.runs, arm.runs, margin, better).settled
            if rules_out:
                arm.ended = f"{metric} is different by more than its margin"
                return
            settled.append(done)
        arm.settled = all(settled)


def _broken(run: SeedRun, baseline: SeedRun) -> str:
    """What rules the candidate out at once, without a second seed."""
    lost = [name for name, value in baseline.metrics.items() if value is not None and run.metrics.get(name) is None]
    if run.scaler and run.scaler.num_skipped == run.num_steps >= MIN_STEPS:
        return f"the scaler skipped all {run.num_steps} steps of seed {run.seed}"
    if lost:
        return f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not finite with seed {run.seed}"
    return ""
