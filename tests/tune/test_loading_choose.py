"""Which settings fit, which are tried, and which one planted blocks choose."""

import threading
from typing import Self

import msgspec
import pytest

from torchproof.errors import RefusedError, TrialError, UserCodeError
from torchproof.tune.loading.arms import candidates, choose, contenders, rank, settled
from torchproof.tune.loading.confirm import Confirmed, Contestant, block_steps, confirm, open_all, take_turns
from torchproof.tune.loading.search import reason, wanted_arm
from torchproof.types import Target
from torchproof.types.doctor import SharedMemory, UsableCores
from torchproof.types.loading import Cost, LoadingArm, LoadingCosts, ThreadCosts, WorkerCosts
from torchproof.types.training import Loading

NOISE = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
WILD = [0.5, 2.0, 0.6, 1.8, 0.7, 1.5, 1.0, 1.1]


def arm(num_workers: int, predicted: float = 0.0, *, num_threads: int = 1, refusal: str = "") -> LoadingArm:
    loading = Loading(num_threads=num_threads, num_workers=num_workers)
    return LoadingArm(loading=loading, predicted=predicted, refusal=refusal)


def blocks(seconds: float, noise: list[float] = NOISE) -> list[float]:
    return [seconds * factor for factor in noise]


def costs(
    load_s: float = 0.02, wait_s: float = 0.0, *, batch_bytes: int = 1 << 20, worker: bool = True
) -> LoadingCosts:
    load = Cost(cpu_s=load_s, wait_s=wait_s, wall_s=load_s + wait_s)
    little = Cost(cpu_s=1e-4, wait_s=0.0, wall_s=1e-4)
    step = Cost(cpu_s=0.001, wait_s=0.0, wall_s=0.001)
    return LoadingCosts(
        batch_size=8,
        num_samples=8000,
        num_epochs=3,
        device="cpu",
        batch_bytes=batch_bytes,
        threads=tuple(ThreadCosts(num_threads=n, loads=(load,), collate=little, step=step) for n in (1, 2)),
        worker=WorkerCosts(send_cpu_s=1e-4, receive_cpu_s=1e-4, start_s=0.01, uss_bytes=10 << 20) if worker else None,
        worker_error="" if worker else "TypeError: cannot pickle",
    )


FREE = tuple(
    UsableCores(samples=(), estimate=float(number), low=1.0, high=8.0, num_processes=number) for number in (1, 2, 4, 8)
)
PLENTY = 1 << 40
DEADLINE_S = 90.0


# What there is


def test_workers_are_doubled_up_to_what_the_cores_could_use() -> None:
    counts = sorted({loading.num_workers for loading in candidates(costs(), 4)})
    assert counts == [0, 1, 2, 4, 8]


def test_samples_that_wait_are_tried_with_more_workers() -> None:
    counts = sorted({loading.num_workers for loading in candidates(costs(0.001, 0.05), 4)})
    assert counts == [0, 1, 2, 4, 8, 16]


def test_without_a_worker_that_runs_there_are_no_workers() -> None:
    assert {loading.num_workers for loading in candidates(costs(worker=False), 4)} == {0}


def test_the_control_has_no_worker_and_one_thread() -> None:
    first, *_ = candidates(costs(), 4)
    assert (first.num_workers, first.num_threads) == (0, 1)


# What fits


def test_what_does_not_fit_into_shared_memory_is_refused() -> None:
    """2 workers need 5 batches of 10 MiB, 4 workers 9: 64 MiB hold the first only."""
    arms = rank(costs(batch_bytes=10 << 20), FREE, 4, SharedMemory(size_bytes=64 << 20, free_bytes=64 << 20), PLENTY)
    refused = {a.loading.num_workers for a in arms if a.refusal}
    assert refused == {4, 8}
    assert next(a for a in arms if a.loading.num_workers == 4).refusal == (
        "its batches need 90 MiB of /dev/shm, 64 MiB are free"
    )
    assert max(a.loading.num_workers for a in contenders(arms)) == 2
    assert wanted_arm(arms, arms[-1]).loading.num_workers in refused


def test_a_need_that_just_fits_is_not_refused() -> None:
    exact = SharedMemory(size_bytes=64 << 20, free_bytes=5 * (10 << 20))
    arms = rank(costs(batch_bytes=10 << 20), FREE, 4, exact, PLENTY)
    assert {a.loading.num_workers for a in arms if a.refusal} == {4, 8}
    less = msgspec.structs.replace(exact, free_bytes=exact.free_bytes - 1)
    arms = rank(costs(batch_bytes=10 << 20), FREE, 4, less, PLENTY)
    assert {a.loading.num_workers for a in arms if a.refusal} == {2, 4, 8}


def test_workers_that_do_not_fit_into_memory_are_refused() -> None:
    arms = rank(costs(), FREE, 4, None, 25 << 20)  # 10 MiB each
    assert {a.loading.num_workers for a in arms if a.refusal} == {4, 8}
    assert "its workers need 40 MiB of memory, 25 MiB are available" in {a.refusal for a in arms}


# What is tried


def test_the_control_and_the_two_best_are_tried() -> None:
    tried = contenders([arm(4, 90.0), arm(2, 80.0), arm(1, 70.0), arm(0, 60.0)])
    assert [a.loading.num_workers for a in tried] == [0, 2, 4]


def test_the_control_is_tried_once() -> None:
    assert [a.loading.num_workers for a in contenders([arm(0, 90.0), arm(1, 70.0), arm(2, 60.0)])] == [0, 1]


def test_threads_that_bring_nothing_are_not_tried() -> None:
    arms = [arm(2, 92.0, num_threads=0), arm(2, 90.0), arm(4, 80.0), arm(0, 60.0)]
    assert [a.label for a in contenders(arms)] == ["0 workers, 1 thread", "2 workers, 1 thread", "4 workers, 1 thread"]
    arms[0] = arm(2, 99.0, num_threads=0)
    assert [a.label for a in contenders(arms)][1:] == ["2 workers, 1 thread", "2 workers, default threads"]


def test_what_is_refused_is_not_tried() -> None:
    tried = contenders([arm(4, 90.0, refusal="too large"), arm(2, 80.0), arm(1, 70.0), arm(0, 60.0)])
    assert [a.loading.num_workers for a in tried] == [0, 1, 2]


# What is chosen

THREE = [arm(0, 60.0), arm(2, 90.0), arm(4, 80.0)]


def test_real_training_may_turn_the_prediction_round() -> None:
    best, comparisons = choose(THREE, [blocks(1.0), blocks(0.8), blocks(0.5)])
    assert THREE[best].loading.num_workers == 4
    assert [c.verdict for c in comparisons] == ["better", "better", "better"]
    assert (comparisons[2].baseline, comparisons[2].candidate) == ("2 workers, 1 thread", "4 workers, 1 thread")


def test_more_workers_that_are_no_faster_are_not_chosen() -> None:
    best, comparisons = choose(THREE, [blocks(1.0), blocks(0.5), blocks(0.495)])
    assert THREE[best].loading.num_workers == 2
    assert comparisons[-1].verdict in ("equivalent", "undecided")


def test_undecided_keeps_the_simpler() -> None:
    best, comparisons = choose(THREE, [blocks(1.0), blocks(1.0, WILD), blocks(1.0, WILD[::-1])])
    assert best == 0
    assert {c.verdict for c in comparisons} == {"undecided"}
    assert not settled(comparisons)
    assert "undecided keeps the simpler" in reason(Confirmed(THREE, best=best, comparisons=comparisons))


def test_undecided_between_two_that_are_better_keeps_fewer_workers() -> None:
    best, _ = choose(THREE, [blocks(9.0), blocks(1.0, WILD), blocks(1.0, WILD[::-1])])
    assert THREE[best].loading.num_workers == 2


def test_what_is_better_than_the_control_is_chosen_beside_one_that_is_not() -> None:
    best, comparisons = choose(THREE, [blocks(1.0), blocks(1.0, WILD), blocks(0.5)])
    assert THREE[best].loading.num_workers == 4
    assert len(comparisons) == 2
    assert (
        reason(Confirmed(THREE, best=best, comparisons=comparisons))
        == "2.000x [2.000, 2.000] the speed of 0 workers, 1 thread"
    )


def test_slower_is_not_chosen() -> None:
    best, comparisons = choose(THREE, [blocks(0.5), blocks(1.0), blocks(1.0)])
    assert best == 0
    assert settled(comparisons)
    assert reason(Confirmed(THREE, best=best, comparisons=comparisons)) == "none of those tried is faster"


def test_what_was_not_compared_is_said_to_be_so() -> None:
    assert reason(Confirmed(THREE)).startswith("not compared")
    assert reason(Confirmed(THREE[:1])) == "no other setting could be used"


# Turns


def test_each_round_turns_the_order_round() -> None:
    order: list[int] = []

    def take(number: int, num_steps: int) -> float:
        order.append(number)
        return (1.0, 0.5)[number] * num_steps

    taken = take_turns(take, THREE[:2], steps=[3, 8], budget_s=1e9)
    assert order == [0, 1, 1, 0] * 4
    assert taken == [[1.0] * 8, [0.5] * 8]  # of a step


def test_the_budget_ends_it_but_not_before_eight_rounds() -> None:
    now = 0.0

    def take(number: int, num_steps: int) -> float:
        nonlocal now
        now += 1.0
        return WILD[int(now) % 8]

    assert len(take_turns(take, THREE[:2], steps=[1, 1], budget_s=3.0, clock=lambda: now)[0]) == 8
    now = 0.0
    assert len(take_turns(take, THREE[:2], steps=[1, 1], budget_s=20.0, clock=lambda: now)[0]) == 10


@pytest.mark.parametrize(
    ("step_s", "budget_s", "steps"),
    [
        (0.01, 48.0, [100, 100, 100]),
        (0.01, 1e-3, []),
        (0.01, 4.8, [20, 20, 20]),
        (0.03, 4.8, [7, 8, 8]),  # whole rounds of 2 and of 4 workers
        (5.0, 150.0, [1, 2, 4]),
        (5.0, 100.0, []),
    ],
)
def test_blocks_fit_the_budget_and_are_whole_rounds_of_workers(
    step_s: float, budget_s: float, steps: list[int]
) -> None:
    assert block_steps([step_s] * 3, THREE, budget_s) == steps


def test_blocks_take_as_long_whatever_a_step_takes() -> None:
    """A block of the slowest one's few steps would only empty the queues of the others."""
    assert block_steps([0.4, 0.1, 0.05], THREE, 48.0) == [3, 10, 20]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_that_bring_their_batches_together_make_no_noise(num_workers: int) -> None:
    """A second for each round of workers, nothing for the batches that came with it: a step takes one part of it."""
    arms = [arm(0), arm(num_workers)]
    taken_steps = 0

    def take(number: int, num_steps: int) -> float:
        nonlocal taken_steps
        if number == 0:
            return 1.0 * num_steps
        waits = [step for step in range(taken_steps, taken_steps + num_steps) if step % num_workers == 0]
        taken_steps += num_steps
        return 1.0 * len(waits)

    steps = block_steps([1.0, 1.0 / num_workers], arms, 100.0)
    _, bursts = take_turns(take, arms, steps=steps, budget_s=1e9)
    assert bursts == [1.0 / num_workers] * 8


# What ends in its turn


class Planted(Contestant):
    """Trains nothing; ``ends_after`` blocks of some settings, by their number of workers, it ends."""

    ends_after: dict[int, int]
    hangs: frozenset[int] = frozenset()
    raises: BaseException | None = None

    def __init__(self, target: object, arm: LoadingArm, num_threads: int, **options: object) -> None:
        self.arm, self.num_blocks, self.killed = arm, 0, threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None: ...

    def open(self) -> float | TrialError:
        if self.arm.loading.num_workers in self.hangs:  # in its first call, as a dataset that takes an hour to open
            raised = self.killed.wait(DEADLINE_S)
            return TrialError("crashed", "killed by SIGKILL" if raised else "nobody ended it")
        if self.raises:
            raise self.raises
        return 0.1

    def kill(self) -> None:
        self.killed.set()

    def run(self, num_steps: int) -> float:
        self.num_blocks += 1
        if self.num_blocks > self.ends_after.get(self.arm.loading.num_workers, 1000):
            raise TrialError("failed", "unable to allocate shared memory(shm)")
        return num_steps / (1 + self.arm.loading.num_workers)


def confirmed(monkeypatch: pytest.MonkeyPatch, ends_after: dict[int, int]) -> Confirmed:
    monkeypatch.setattr(Planted, "ends_after", ends_after, raising=False)
    monkeypatch.setattr("torchproof.tune.loading.confirm.Contestant", Planted)
    return confirm(
        Target(reference="app.py:Fit", kind="python"), [(arm, 1) for arm in THREE], batch_size=8, budget_s=9.0
    )


def test_a_setting_that_ends_in_its_turn_is_lost_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done = confirmed(monkeypatch, {4: 3})
    assert [a.loading.num_workers for a in done.arms] == [0, 2]
    assert [(a.loading.num_workers, a.refusal) for a in done.lost] == [
        (4, "failed: unable to allocate shared memory(shm)")
    ]
    assert done.arms[done.best].loading.num_workers == 2
    assert [len(a.measured) for a in done.arms] == [8, 8]


def test_where_all_but_the_simplest_end_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    done = confirmed(monkeypatch, {4: 3, 2: 1})
    assert [a.loading.num_workers for a in done.arms] == [0]
    assert reason(done) == "no other setting could be used"


def test_where_the_simplest_ends_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match="can't be trained: unable to allocate"):
        confirmed(monkeypatch, {0: 2})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserCodeError("train_data()[3] raised IndexError", "")])
def test_what_ends_the_search_waits_for_none_that_is_still_opening(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(Planted, "hangs", frozenset({2, 4}))
    monkeypatch.setattr(Planted, "raises", error)
    planted = [Planted(None, arm, 1) for arm in THREE]
    with pytest.raises(type(error)):
        open_all(planted)
    assert all(contestant.killed.is_set() for contestant in planted)
