"""The predictor: hand-made costs in, the setting that should be fastest out."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.tune.loading.arms import contenders, rank
from torchproof.tune.loading.predict import (
    batch_s,
    core_share,
    predict,
    shared_memory_bytes,
    simulate,
    spread,
    times_one,
)
from torchproof.types.doctor import UsableCores
from torchproof.types.loading import Cost, LoadingCosts, ThreadCosts, TransferCosts, WorkerCosts
from torchproof.types.training import Loading

MS = 1e-3
PLENTY = 1 << 40


def cost(cpu_ms: float, wait_ms: float = 0.0, wall_ms: float | None = None) -> Cost:
    return Cost(cpu_s=cpu_ms * MS, wait_s=wait_ms * MS, wall_s=(cpu_ms + wait_ms if wall_ms is None else wall_ms) * MS)


def threads(load: Cost, step: Cost, number: int = 1) -> ThreadCosts:
    return ThreadCosts(num_threads=number, loads=(load,), collate=cost(0.1), step=step)


def costs(*measured: ThreadCosts, send_ms: float = 0.5, receive_ms: float = 0.5, **changes: Any) -> LoadingCosts:
    made = LoadingCosts(
        batch_size=32,
        num_samples=3200,
        num_epochs=10,
        device="cpu",
        batch_bytes=1 << 20,
        threads=measured,
        worker=WorkerCosts(send_cpu_s=send_ms * MS, receive_cpu_s=receive_ms * MS, start_s=0.02, uss_bytes=20 << 20),
    )
    return msgspec.structs.replace(made, **changes)


def capacity(*estimates: tuple[int, float]) -> tuple[UsableCores, ...]:
    return tuple(
        UsableCores(samples=(), estimate=estimate, low=estimate, high=estimate, num_processes=number)
        for number, estimate in estimates
    )


def idle(num_cores: int) -> tuple[UsableCores, ...]:
    """A machine that does nothing else."""
    numbers = [1 << power for power in range(8) if 1 << power <= 2 * num_cores]
    return capacity(*((number, float(min(number, num_cores))) for number in numbers))


ONE_FREE = capacity((1, 1.0), (2, 1.0), (4, 1.0))


def best(made: LoadingCosts, free: tuple[UsableCores, ...], num_cores: int) -> Loading:
    return rank(made, free, num_cores, None, PLENTY)[0].loading


def workers(made: LoadingCosts, free: tuple[UsableCores, ...], num_cores: int) -> int:
    return best(made, free, num_cores).num_workers


def test_samples_that_wait_get_more_workers_than_there_are_cores() -> None:
    assert workers(costs(threads(cost(1, 100), cost(2))), idle(2), 2) == 8


def test_samples_that_wait_are_overlapped_where_no_core_is_free() -> None:
    assert workers(costs(threads(cost(1, 100), cost(2))), ONE_FREE, 2) > 1


def test_tiny_samples_get_no_worker() -> None:
    """Sending a batch costs more than reading it, on any number of cores."""
    made = costs(threads(cost(0.2), cost(0.1)), send_ms=2, receive_ms=1)
    assert workers(made, idle(2), 2) == 0
    assert workers(made, idle(64), 64) == 0


def test_the_same_samples_get_workers_where_cores_are_free_and_none_where_they_are_not() -> None:
    made = costs(threads(cost(20), cost(20)))
    assert workers(made, ONE_FREE, 2) == 0
    assert workers(made, idle(2), 2) >= 1


def test_heavy_samples_get_as_many_workers_as_the_step_needs_and_no_more() -> None:
    made = costs(threads(cost(160), cost(0, 10)))
    assert workers(made, idle(64), 64) == 16
    tried = contenders(rank(made, idle(8), 8, None, PLENTY))
    assert [arm.loading.num_workers for arm in tried] == [0, 8, 16]  # real training tells the two apart


def test_a_step_that_gains_from_threads_gets_them() -> None:
    made = costs(threads(cost(0.2), cost(80)), threads(cost(0.2), cost(80, 0, 12), 8), send_ms=2, receive_ms=1)
    assert best(made, idle(8), 8) == Loading(num_threads=0, num_workers=0)


def test_a_step_that_loses_from_threads_gets_one() -> None:
    made = costs(threads(cost(0.2), cost(1)), threads(cost(0.2), cost(6, 0, 5), 8), send_ms=2, receive_ms=1)
    assert best(made, idle(8), 8).num_threads == 1


def test_a_run_of_few_batches_does_not_pay_for_starting_workers() -> None:
    heavy = threads(cost(20), cost(20))
    assert workers(costs(heavy), idle(4), 4) >= 1
    assert workers(costs(heavy, num_samples=32, num_epochs=1), idle(4), 4) == 0


def test_workers_that_do_not_persist_start_again_each_epoch() -> None:
    made = costs(threads(cost(20), cost(20)))
    with_workers = Loading(num_threads=1, num_workers=2)
    again = msgspec.structs.replace(with_workers, persistent_workers=False)
    epochs_s = [3200 * 10 / predict(made, idle(4), loading) for loading in (with_workers, again)]
    assert epochs_s[1] - epochs_s[0] == pytest.approx(9 * 2 * 0.02)


def test_without_workers_a_batch_takes_the_sum_of_its_parts() -> None:
    made = costs(threads(cost(3, 4), cost(5)))
    assert batch_s(made, idle(4), Loading(num_threads=1)) == pytest.approx(12.1 * MS)


def test_a_busy_machine_slows_what_computes() -> None:
    """Half of the time that it was ready the process had no core: half as fast, where it doesn't wait anyway."""
    made = costs(threads(cost(10, 0, 20), cost(10, 0, 20)))
    assert core_share(made) == pytest.approx(0.5, rel=0.01)
    assert batch_s(made, ONE_FREE, Loading(num_threads=1)) == pytest.approx(40 * MS, rel=0.01)


def test_what_a_hypervisor_takes_is_not_counted_twice() -> None:
    """CPU time is longer by what it takes: how several processes compare with one counts, and not with a core."""
    made = costs(threads(cost(20), cost(20)))
    whole, half = capacity((1, 1.0), (2, 2.0), (4, 2.0)), capacity((1, 0.5), (2, 1.0), (4, 1.0))
    for num_workers in (0, 1, 2):
        loading = Loading(num_threads=1, num_workers=num_workers)
        assert predict(made, whole, loading) == pytest.approx(predict(made, half, loading))


def test_capacity_is_read_between_and_beyond_what_was_measured() -> None:
    measured = capacity((1, 1.0), (2, 1.5), (4, 2.5))
    assert [times_one(measured, number) for number in (1, 2, 3, 4, 9)] == pytest.approx([1, 1.5, 2, 2.5, 2.5])
    assert times_one(capacity((1, 0.0)), 3) == 1.0


def test_pinned_memory_is_credited_to_what_pins() -> None:
    made = costs(threads(cost(1), cost(20)), transfer=TransferCosts(pageable_s=4 * MS, pinned_s=1 * MS, pin_s=2 * MS))
    plain, pinned = (batch_s(made, idle(4), Loading(num_threads=1, pin_memory=pin)) for pin in (False, True))
    assert plain - pinned == pytest.approx(1 * MS)  # it pins itself
    assert rank(made, idle(4), 4, None, PLENTY)[0].loading.pin_memory
    slow = msgspec.structs.replace(
        made, transfer=TransferCosts(pageable_s=4 * MS, pinned_s=1 * MS, pin_s=5 * MS), worker=None
    )
    assert not rank(slow, idle(4), 4, None, PLENTY)[0].loading.pin_memory


# The simulated loader


def test_a_slow_worker_sets_the_pace_and_so_does_a_slow_step() -> None:
    assert simulate([8.0], 1.0, 1, 2) == pytest.approx(8.0)
    assert simulate([8.0], 1.0, 4, 2) == pytest.approx(2.0)
    assert simulate([8.0], 5.0, 4, 2) == pytest.approx(5.0)


def test_prefetching_more_absorbs_slow_batches() -> None:
    """One batch in seven takes as long as nine: on average workers keep up, and a queue bridges the slow one."""
    uneven = [1.0] * 6 + [9.0]
    assert simulate(uneven, 1.1, 2, 8) < 0.85 * simulate(uneven, 1.1, 2, 2)
    assert simulate([2.0], 1.1, 2, 8) == pytest.approx(simulate([2.0], 1.1, 2, 2))


def test_a_larger_prefetch_factor_is_chosen_only_where_batches_vary() -> None:
    even = costs(threads(cost(0, 20), cost(0, 6)))
    parts = tuple(cost(0, wait) for wait in [10.0] * 6 + [90.0])
    uneven = costs(ThreadCosts(num_threads=1, loads=parts, collate=cost(0.1), step=cost(0, 6)))
    factors = [
        {arm.loading.num_workers: arm.loading.prefetch_factor for arm in rank(made, idle(4), 4, None, PLENTY)}[4]
        for made in (even, uneven)
    ]
    assert factors == [2, 4]
    assert spread(uneven) == pytest.approx(9.0)
    assert spread(even) == 1.0


@given(
    loads=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20),
    step=st.floats(0.0, 10.0),
    num_workers=st.integers(1, 16),
    prefetch_factor=st.integers(1, 4),
)
def test_a_loader_is_never_faster_than_its_parts(
    loads: list[float], step: float, num_workers: int, prefetch_factor: int
) -> None:
    pace = simulate(loads, step, num_workers, prefetch_factor)
    assert pace >= step * (1 - 1e-9)
    assert pace >= min(loads) / num_workers * 0.5
    assert pace <= max(loads) + step + 1e-9


# Shared memory


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "num_batches"), [(0, 2, 0), (1, 2, 3), (2, 2, 5), (4, 2, 9), (2, 4, 9)]
)
def test_batches_on_their_way(num_workers: int, prefetch_factor: int, num_batches: int) -> None:
    loading = Loading(num_workers=num_workers, prefetch_factor=prefetch_factor)
    assert shared_memory_bytes(loading, 1000) == 1000 * num_batches


def test_rounds_that_are_all_or_nothing_count_with_their_mean() -> None:
    """Their median is 0: beside many others a process has a core for a whole round, or not at all."""
    one = UsableCores(samples=(0.0, 0.0, 0.0, 0.0, 1.0, 1.0), estimate=0.0, low=0.0, high=1.0, num_processes=1)
    two = UsableCores(samples=(0.0, 0.0, 0.0, 1.0, 1.0, 2.0), estimate=0.5, low=0.0, high=2.0, num_processes=2)
    assert times_one((one, two), 2) == pytest.approx(2.0)
    assert times_one((one, two), 1) == 1.0
