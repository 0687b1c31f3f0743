"""Which settings there are, which of them fit, which of them real training confirms, and what its blocks say."""

from collections.abc import Sequence

import msgspec

from torchproof.stats import MARGIN, compare_paired
from torchproof.tune.loading.predict import mostly_waits, num_threads, predict, shared_memory_bytes
from torchproof.types import Comparison
from torchproof.types.doctor import SharedMemory, UsableCores
from torchproof.types.loading import LoadingArm, LoadingCosts
from torchproof.types.training import Loading

CONTROL = Loading(num_threads=1)  # no workers: nothing is simpler, and it is often the fastest
PREFETCH_FACTORS = (2, 4)  # PyTorch's default, and more for batches whose costs vary
# Workers for each core. Beside other programs more processes get more of the cores; those that wait need none.
PER_CORE, PER_CORE_WAITING = 2, 4
# Of two settings that are predicted to be so close, the one with fewer processes and threads is tried.
CLOSE = 0.01


def candidates(costs: LoadingCosts, num_cores: int) -> list[Loading]:
    """All settings, the simplest first: 0, 1, 2, 4, ... workers, each with one intra-op thread and with the default."""
    most = num_cores * (PER_CORE_WAITING if mostly_waits(costs) else PER_CORE) if costs.worker else 0
    counts = [0, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)]
    threads = [1, 0][: len(costs.threads)]  # 0: the default
    return [
        Loading(num_threads=number, num_workers=count, prefetch_factor=factor, pin_memory=_pins(costs, count))
        for count in counts
        for number in threads
        for factor in (PREFETCH_FACTORS if count else PREFETCH_FACTORS[:1])
    ]


def rank(
    costs: LoadingCosts,
    capacity: Sequence[UsableCores],
    num_cores: int,
    shared_memory: SharedMemory | None,
    available_bytes: int,
) -> tuple[LoadingArm, ...]:
    """Every setting with its prediction, the best first.

    For each number of workers and threads there is one: a larger prefetch_factor has to be worth more than the margin.
    """
    found: dict[tuple[int, int], LoadingArm] = {}
    for loading in candidates(costs, num_cores):
        arm = LoadingArm(
            loading=loading,
            predicted=predict(costs, capacity, loading),
            shared_memory_bytes=shared_memory_bytes(loading, costs.batch_bytes),
        )
        arm = msgspec.structs.replace(arm, refusal=refusal(arm, costs, shared_memory, available_bytes))
        key = loading.num_workers, loading.num_threads
        before = found.get(key)
        if before is None or (not arm.refusal and arm.predicted > before.predicted * (1 + MARGIN)):
            found[key] = arm
    simple_first = list(found.values())
    worth = {id(arm): arm.predicted / (1 + CLOSE) ** number for number, arm in enumerate(simple_first)}
    return tuple(sorted(simple_first, key=lambda arm: -worth[id(arm)]))


def refusal(arm: LoadingArm, costs: LoadingCosts, shared_memory: SharedMemory | None, available_bytes: int) -> str:
    """Why a setting can't be used on this machine; empty where it can."""
    if arm.loading.num_workers == 0:
        return ""
    if shared_memory is not None and arm.shared_memory_bytes > shared_memory.free_bytes:
        return (
            f"its batches need {_mib(arm.shared_memory_bytes)} MiB of /dev/shm, {_mib(shared_memory.free_bytes)} MiB "
            "are free"
        )
    needed = arm.loading.num_workers * (costs.worker.uss_bytes if costs.worker else 0)
    if needed > available_bytes:
        return f"its workers need {_mib(needed)} MiB of memory, {_mib(available_bytes)} MiB are available"
    return ""


def contenders(arms: Sequence[LoadingArm]) -> list[LoadingArm]:
    """What real training compares, the simplest first: the control and the two best.

    More threads that should bring nothing are left out: they would be measured against the same setting twice.
    """
    usable = [arm for arm in arms if not arm.refusal]
    control = next(arm for arm in usable if is_control(arm))
    alone = {arm.loading.num_workers: arm.predicted for arm in usable if arm.loading.num_threads == 1}
    worth = [
        arm
        for arm in usable
        if arm.loading.num_threads == 1 or arm.predicted > alone.get(arm.loading.num_workers, 0.0) * (1 + MARGIN)
    ]
    tried = {id(arm): arm for arm in (control, *worth[:2])}
    return sorted(tried.values(), key=lambda arm: simplicity(arm.loading))


def is_control(arm: LoadingArm) -> bool:
    """Whether it has no worker and the fewest threads."""
    return arm.loading.num_workers == 0 and arm.loading.num_threads == CONTROL.num_threads


def simplicity(loading: Loading) -> tuple[int, bool, int]:
    """Lower is simpler: fewer workers, then one thread, then fewer batches on their way."""
    return loading.num_workers, loading.num_threads != 1, loading.prefetch_factor


def choose(arms: Sequence[LoadingArm], blocks: Sequence[Sequence[float]]) -> tuple[int, tuple[Comparison, ...]]:
    """The setting that won, and the comparisons that say so.

    Whatever is not better than the simplest setting is out; of what is left, more workers or threads have to be better
    than fewer. Undecided keeps the simpler.

    Args:
        arms: the simplest first.
        blocks: seconds of a step in each block of each arm; the i-th ones were taken next to each other.
    """

    def compare(one: int, other: int) -> Comparison:
        return compare_paired(blocks[one], blocks[other], names=(arms[one].label, arms[other].label))

    comparisons = [compare(0, number) for number in range(1, len(arms))]
    better = [number for number, c in enumerate(comparisons, start=1) if c.verdict == "better"]
    if not better:
        return 0, tuple(comparisons)
    best, *others = better
    for other in others:
        comparisons.append(compare(best, other))
        if comparisons[-1].verdict == "better":
            best = other
    return best, tuple(comparisons)


def settled(comparisons: Sequence[Comparison]) -> bool:
    """Whether more blocks would change nothing."""
    return all(comparison.verdict != "undecided" for comparison in comparisons)


def threads_of(arm: LoadingArm, costs: LoadingCosts) -> int:
    """Intra-op threads of its training process."""
    return num_threads(arm.loading, costs)


def _pins(costs: LoadingCosts, num_workers: int) -> bool:
    """Whether pinned memory brings batches to the device faster, the pinning included where no worker's thread does it.

    PyTorch's loader ignores it where there is no CUDA.
    """
    if costs.transfer is None:
        return True
    pin_s = 0.0 if num_workers else costs.transfer.pin_s
    return costs.transfer.pinned_s + pin_s < costs.transfer.pageable_s


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
