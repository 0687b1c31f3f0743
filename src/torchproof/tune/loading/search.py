"""The search for a DataLoader's settings: costs, capacity, predictions, real training, choice."""

import time
from collections.abc import Callable

import msgspec

from torchproof.machine.cores import measure_usable_cores, num_cores
from torchproof.machine.memory import available_memory, shared_memory
from torchproof.machine.threads import thread_environment
from torchproof.render import units
from torchproof.rules.registry import judge
from torchproof.tune.loading.arms import contenders, rank, threads_of
from torchproof.tune.loading.confirm import OPEN_TIMEOUT_S, Confirmed, confirm
from torchproof.tune.loading.predict import spread
from torchproof.tune.loading.process import LoaderProcess
from torchproof.types import Comparison, Finding, Observation, Target
from torchproof.types.doctor import UsableCores
from torchproof.types.loading import (
    LoadingArm,
    LoadingCosts,
    LoadingProof,
    PickleSeen,
    SharedMemorySeen,
    WorkerMemorySeen,
)

Progress = Callable[[str, float], None]  # what is being done, and the share of the budget that is spent

CAPACITY_S = 0.3  # for each number of processes
MEMORY_SHARE = 0.8  # of the available memory, that workers may take
VARIES = 1.5  # the slowest batch by the median one, from which on the order may hold others up
MIN_OUT_OF_ORDER_S = 5.0  # what is left of the budget, for that comparison


def choose_loading(target: Target, *, budget_s: float, progress: Progress) -> LoadingProof:
    """The DataLoader's settings that train this recipe fastest on this machine, as it is now.

    What samples, collate, a worker and the step cost is measured apart. From that and from the cores that are really
    free, each setting's throughput is predicted. The two best and ``num_workers=0`` with one thread then train for
    real, in turns. A setting with more workers has to be better; undecided keeps the simpler one.

    Args:
        budget_s: wall seconds; the least that a comparison needs is taken anyway.

    Raises:
        TargetError: the recipe, its data (empty, without a length) or what its methods return.
        UserCodeError: the user's code raised; a sample that raises is named by its index.
        RefusedError: not even the simplest setting trains.
    """
    search = _Search(target, budget_s, progress)
    search.probe()
    search.rank()
    search.confirm()
    return search.proof()


class _Search:
    """One run; its methods are the steps, in order."""

    def __init__(self, target: Target, budget_s: float, progress: Progress) -> None:
        self.target = target
        self.budget_s = budget_s
        self.start = time.monotonic()
        self._progress = progress
        self.num_cores = num_cores()
        self.shared_memory = shared_memory()

    def spent_s(self) -> float:
        return time.monotonic() - self.start

    def progress(self, text: str) -> None:
        self._progress(text, min(1.0, self.spent_s() / self.budget_s))

    def probe(self) -> None:
        """Costs and capacity."""
        self.progress("measuring samples, collate, a worker and the step")
        with LoaderProcess(
            "torchproof.tune.loading.probe:Probe", environment=thread_environment(self.num_cores)
        ) as process:
            found = process.call("run", timeout_s=OPEN_TIMEOUT_S, target=msgspec.to_builtins(self.target))
        self.costs = msgspec.convert(found["costs"], LoadingCosts)
        self.pickled = msgspec.convert(found["pickled"], PickleSeen)
        self.memory = msgspec.convert(found["memory"], WorkerMemorySeen | None)
        self.progress("measuring the cores that are free")
        self.capacity = measure_capacity(self.num_cores)

    def rank(self) -> None:
        """Predictions."""
        self.arms = rank(
            self.costs,
            self.capacity,
            self.num_cores,
            self.shared_memory,
            int(available_memory() * MEMORY_SHARE),
        )

    def confirm(self) -> None:
        """Real training with the best, and what the order of batches costs."""
        tried = [(arm, threads_of(arm, self.costs)) for arm in contenders(self.arms)]
        self.progress("training with " + "; ".join(arm.label for arm, _ in tried))
        out_of_order_s = MIN_OUT_OF_ORDER_S if self.varies else 0.0
        self.confirmed = confirm(
            self.target,
            tried,
            batch_size=self.costs.batch_size,
            budget_s=self.budget_s - self.spent_s() - out_of_order_s,
        )
        self.chosen = self.confirmed.arms[self.confirmed.best]
        self.out_of_order = self._out_of_order()

    @property
    def varies(self) -> bool:
        return spread(self.costs) > VARIES

    def _out_of_order(self) -> Comparison | None:
        left_s = self.budget_s - self.spent_s()
        if not self.varies or self.chosen.loading.num_workers < 2 or left_s < MIN_OUT_OF_ORDER_S / 2:
            return None
        self.progress(f"training with {self.chosen.label}, in order and not")
        threads = threads_of(self.chosen, self.costs)
        done = confirm(
            self.target,
            [(self.chosen, threads), (self.chosen, threads)],
            batch_size=self.costs.batch_size,
            budget_s=left_s,
            in_order=(True, False),
        )
        if not done.comparisons:
            return None
        return msgspec.structs.replace(done.comparisons[0], candidate=f"{self.chosen.label}, in_order=False")

    def proof(self) -> LoadingProof:
        """What was found."""
        told = {arm.label: arm for arm in (*self.confirmed.arms, *self.confirmed.lost)}
        arms = tuple(told.get(arm.label, arm) for arm in self.arms)
        return LoadingProof(
            target=self.target,
            chosen=self.chosen.loading,
            reason=reason(self.confirmed),
            costs=self.costs,
            capacity=self.capacity,
            arms=arms,
            comparisons=self.confirmed.comparisons,
            out_of_order=self.out_of_order,
            shared_memory=self.shared_memory,
            findings=self.findings(),
            search_s=self.spent_s(),
        )

    def findings(self) -> tuple[Finding, ...]:
        """Only what concerns the choice: a worker's memory where there are workers, and what kept the best one away."""
        seen: list[Observation] = [self.pickled]
        if self.memory is not None and self.chosen.loading.num_workers:
            seen.append(self.memory)
        if self.shared_memory is not None:
            wanted = wanted_arm(self.arms, self.chosen)
            seen.append(
                SharedMemorySeen(
                    target=self.target.reference,
                    num_workers=wanted.loading.num_workers,
                    prefetch_factor=wanted.loading.prefetch_factor,
                    batch_bytes=self.costs.batch_bytes,
                    size_bytes=self.shared_memory.size_bytes,
                    free_bytes=self.shared_memory.free_bytes,
                )
            )
        return tuple(finding for observation in seen for finding in judge(observation))


def measure_capacity(cores: int) -> tuple[UsableCores, ...]:
    """What 1, 2, 4, ... busy processes get, up to twice the cores; one core where no process can be started."""
    numbers = sorted({1 << power for power in range((2 * cores).bit_length())} | {cores})
    measured = [measure_usable_cores(CAPACITY_S, number) for number in numbers if number <= 2 * cores]
    known = tuple(entry for entry in measured if entry is not None)
    return known or (UsableCores(samples=(), estimate=1.0, low=1.0, high=1.0, num_processes=1),)


def wanted_arm(arms: tuple[LoadingArm, ...], chosen: LoadingArm) -> LoadingArm:
    """The setting that is predicted to be best whether it can be used or not; the chosen one where it isn't refused."""
    return arms[0] if arms[0].refusal else chosen


def reason(confirmed: Confirmed) -> str:
    """Why this one was chosen, in one line."""
    if not confirmed.comparisons:
        if len(confirmed.arms) == 1:
            return "no other setting could be used"
        return "not compared: 8 blocks of each setting would take more than the budget; the simplest is kept"
    control, chosen = confirmed.arms[0], confirmed.arms[confirmed.best]
    if confirmed.best:
        won = next(c for c in confirmed.comparisons if (c.baseline, c.candidate) == (control.label, chosen.label))
        return f"{units.ratio(won.ratio, won.low, won.high)} the speed of {control.label}"
    verdicts = {comparison.verdict for comparison in confirmed.comparisons}
    if "undecided" in verdicts:
        return "no other setting was shown to be faster in the time; undecided keeps the simpler one"
    return "none of those tried is faster"
