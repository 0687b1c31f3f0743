"""Predicts the throughput of a setting from what its parts cost. Plain numbers in and out; measures nothing.

Accurate enough to rank settings, not to forecast: the best ones have to be confirmed.
"""

from collections.abc import Sequence

from torchproof.types.doctor import UsableCores
from torchproof.types.loading import Cost, LoadingCosts
from torchproof.types.training import Loading

# How sharply the slower of two limits decides. Where they are equal the result is 0.89 of either, because workers that
# fill all cores wait for one another.
SHARPNESS = 6
MIN_BATCHES = 128  # that are simulated
MIN_TIMES = 0.5  # several processes do half the work of one, at the least: less is noise


def num_threads(loading: Loading, costs: LoadingCosts) -> int:
    """Intra-op threads of the training process; 0 in the settings stands for the default."""
    return loading.num_threads or costs.threads[-1].num_threads


def predict(costs: LoadingCosts, capacity: Sequence[UsableCores], loading: Loading) -> float:
    """Samples per second over the whole run, the start of its workers included.

    Args:
        capacity: what some numbers of busy processes got, by that number ascending.
    """
    num_batches = -(-costs.num_samples // costs.batch_size)
    epoch_s = num_batches * batch_s(costs, capacity, loading)
    num_starts = 1 if loading.persistent_workers else costs.num_epochs
    start_s = num_starts * loading.num_workers * (costs.worker.start_s if costs.worker else 0.0)
    return costs.num_epochs * costs.num_samples / (costs.num_epochs * epoch_s + start_s)


def batch_s(costs: LoadingCosts, capacity: Sequence[UsableCores], loading: Loading) -> float:
    """Seconds from one batch to the next, once the workers run."""
    threads = num_threads(loading, costs)
    mine = next(entry for entry in costs.threads if entry.num_threads == threads)
    share = core_share(costs)
    saved_s = _saved_s(costs, loading)
    if not loading.num_workers:
        return _elapsed([average(mine.loads), mine.collate, mine.step], threads, share) - saved_s
    assert costs.worker is not None
    alone = costs.threads[0]  # a worker has one intra-op thread
    send, receive = (
        Cost(cpu_s=cpu_s, wait_s=0.0, wall_s=cpu_s) for cpu_s in (costs.worker.send_cpu_s, costs.worker.receive_cpu_s)
    )
    loads_s = [_elapsed([load, alone.collate, send], 1, share) for load in alone.loads]
    train_s = _elapsed([receive, mine.step], threads, share) - saved_s
    flow_s = simulate(loads_s, train_s, loading.num_workers, loading.prefetch_factor)
    cpu_s = sum(cost.cpu_s for cost in (average(alone.loads), alone.collate, send, receive, mine.step))
    # All cores, as each process was given its own above; where they are shared with others, more processes get more.
    num_processes = max(loading.num_workers + threads, capacity[-1].num_processes // 2)
    cores_s = cpu_s / (share * times_one(capacity, num_processes))
    return float((flow_s**SHARPNESS + cores_s**SHARPNESS) ** (1 / SHARPNESS))


def simulate(loads_s: Sequence[float], train_s: float, num_workers: int, prefetch_factor: int) -> float:
    """Mean seconds from one batch to the next of a DataLoader with workers that don't disturb one another.

    Batches go round the workers, each of which works one off after the other; the training process takes them in their
    order, and for each that it takes the next one is handed out: ``num_workers * prefetch_factor`` are on their way.

    Args:
        loads_s: what a worker takes for a batch, one after the other, and from the beginning again.
        train_s: what the training process takes for a batch.
    """
    on_the_way = num_workers * prefetch_factor
    begin = 2 * on_the_way
    end = begin + on_the_way * -(-MIN_BATCHES // on_the_way)  # whole rounds: workers that are all alike bring bursts
    free = [0.0] * num_workers
    taken: list[float] = []
    trained = 0.0
    for number in range(end + 1):
        handed_out = taken[number - on_the_way] if number >= on_the_way else 0.0
        worker = number % num_workers
        free[worker] = max(free[worker], handed_out) + loads_s[number % len(loads_s)]
        taken.append(max(free[worker], trained))
        trained = taken[-1] + train_s
    return (taken[end] - taken[begin]) / (end - begin)


def core_share(costs: LoadingCosts) -> float:
    """The part of a core that one process had, when it was ready to compute and the costs were measured."""
    alone = costs.threads[0]
    parts = (*alone.loads, alone.collate, alone.step)
    ready_s = sum(cost.wall_s - cost.wait_s for cost in parts)
    return min(1.0, sum(cost.cpu_s for cost in parts) / ready_s) if ready_s > 0 else 1.0


def times_one(capacity: Sequence[UsableCores], num_processes: int) -> float:
    """How many times the work of one busy process so many do together: between two measured numbers on the line that
    joins them, beyond the last one as much as that.

    A ratio, because the CPU time of costs is longer too where a hypervisor takes some of it or two cores are one.
    """
    one = below = capacity[0]
    for above in capacity:
        if above.num_processes >= num_processes:
            span = above.num_processes - below.num_processes
            part = (num_processes - below.num_processes) / span if span else 0.0
            work = _work(below) + part * (_work(above) - _work(below))
            break
        below = above
    else:
        work = _work(below)
    return max(work / _work(one), MIN_TIMES) if _work(one) > 0 else 1.0


def _work(entry: UsableCores) -> float:
    """The mean of the rounds. Beside many others a process has a core for all of a round or for none of it: the median
    of such rounds said 0.0 cores for 2 and 4 processes, where one had 0.2."""
    return sum(entry.samples) / len(entry.samples) if entry.samples else entry.estimate


def shared_memory_bytes(loading: Loading, batch_bytes: int) -> int:
    """What batches on their way take at most: each worker's, and the one that is trained on.

    Measured peaks of 3.1, 5.0, 9.0, 9.0 and 3.0 batches where this says 3, 5, 9, 9 and 3.
    """
    return (loading.num_workers * loading.prefetch_factor + 1) * batch_bytes if loading.num_workers else 0


def mostly_waits(costs: LoadingCosts) -> bool:
    """Whether samples wait for a disk or a network longer than they compute."""
    load = average(costs.threads[0].loads)
    return load.wait_s > load.cpu_s


def spread(costs: LoadingCosts) -> float:
    """The slowest batch by the median one: what in-order batches may wait for."""
    walls = sorted(load.cpu_s + load.wait_s for load in costs.threads[0].loads)
    return walls[-1] / max(walls[len(walls) // 2], 1e-9)


def average(costs: Sequence[Cost]) -> Cost:
    """The mean of each part."""
    return Cost(
        cpu_s=sum(cost.cpu_s for cost in costs) / len(costs),
        wait_s=sum(cost.wait_s for cost in costs) / len(costs),
        wall_s=sum(cost.wall_s for cost in costs) / len(costs),
    )


def _elapsed(costs: Sequence[Cost], threads: int, share: float) -> float:
    """Wall seconds of one process that does this.

    CPU time of one thread is measured more exactly than its wall time; that of several says little of how long they
    took together. A process that waits, and so uses less than its share of a core, gets it when it wants it.

    Args:
        share: of a core, that a process gets which never waits.
    """
    if threads > 1:
        return sum(cost.wall_s for cost in costs)
    cpu_s = sum(cost.cpu_s for cost in costs)
    return max(cpu_s + sum(cost.wait_s for cost in costs), cpu_s / share)


def _saved_s(costs: LoadingCosts, loading: Loading) -> float:
    """What pinned memory saves of a batch's way to the device; the step was measured from pageable memory."""
    if costs.transfer is None or not loading.pin_memory:
        return 0.0
    pin_s = 0.0 if loading.num_workers else costs.transfer.pin_s  # a thread of its own pins what workers bring
    return costs.transfer.pageable_s - costs.transfer.pinned_s - pin_s
