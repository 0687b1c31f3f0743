"""A request that has the machine to itself gets the number of threads that was faster lately, and never waits long."""

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch

from torchproof.machine.cores import core_ids
from torchproof.serve import lone
from torchproof.serve.lone import FIRST_RETRY, GIVE_UP, GRAIN, LAST_RETRY, NUM_TRIED, Threads
from torchproof.serve.threads import NUM_SPINS, lone_variables

COST_S = 0.01


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread is started here but where a test is about that; the number stays as it was."""
    monkeypatch.setattr(lone, "_start_threads", lambda num_threads, cores: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Machine:
    """Forwards take ``paces[number of threads]`` times their cost, on a clock that nothing else moves."""

    def __init__(self, paces: dict[int, float], num_cores: int = 2) -> None:
        self.paces = paces
        self.now = 0.0
        self.used: list[int] = []  # threads of each forward
        self.threads = Threads(1, range(num_cores), clock=lambda: self.now)

    def forward(self, cost_s: float = COST_S) -> int:
        num_threads = torch.get_num_threads()
        self.used.append(num_threads)
        self.now += cost_s * self.paces[num_threads]
        return len(self.used)

    def ask(self, number: int, *, lone: bool = True, cost_s: float = COST_S) -> list[int]:
        """Threads of so many forwards, one after the other."""
        for _ in range(number):
            assert self.threads.run(lambda: self.forward(cost_s), lone=lone, cost_s=cost_s) == len(self.used)
        return self.used[-number:]

    def learn(self) -> None:
        """All numbers have been tried once."""
        self.ask(NUM_TRIED * len(self.paces))


@pytest.mark.parametrize(
    ("paces", "num_cores", "best"),
    [
        ({1: 1.0, 2: 0.7}, 2, 2),
        ({1: 1.0, 2: 1.1}, 2, 1),
        ({1: 1.0, 2: 0.97}, 2, 1),  # the others' cores are left alone where next to nothing is gained
        ({1: 1.0, 2: 0.7, 4: 0.9}, 4, 2),
        ({1: 1.0, 2: 0.7, 4: 0.5, 6: 0.4}, 6, 6),
    ],
)
def test_the_faster_number_is_used(paces: dict[int, float], num_cores: int, best: int) -> None:
    machine = Machine(paces, num_cores)
    machine.learn()
    assert machine.ask(FIRST_RETRY) == [best] * FIRST_RETRY
    assert set(machine.used) == set(paces)


def test_other_requests_always_run_with_the_planned_number() -> None:
    """Even when more were just found faster, and what they take says nothing of a lone one."""
    machine = Machine({1: 1.0, 2: 0.5})
    assert machine.ask(NUM_TRIED * 4, lone=False) == [1] * NUM_TRIED * 4
    machine.learn()
    assert machine.ask(3) == [2] * 3
    assert machine.ask(3, lone=False) == [1] * 3
    assert machine.ask(1) == [2]


def test_sizes_are_judged_by_what_each_should_take() -> None:
    """The large requests happen to be tried with more threads; by their seconds those would be the slower ones."""
    machine = Machine({1: 1.0, 2: 0.7})
    for _ in range(NUM_TRIED):
        machine.ask(1, cost_s=10 * COST_S)
    assert machine.used == [2] * NUM_TRIED
    machine.ask(NUM_TRIED)
    assert machine.ask(FIRST_RETRY) == [2] * FIRST_RETRY


def test_one_slow_forward_decides_nothing() -> None:
    """Its like on a noisy machine is no reason to change."""
    machine = Machine({1: 1.0, 2: 0.7})
    machine.learn()
    machine.ask(4)
    machine.paces[2] = 20.0
    machine.ask(1)
    machine.paces[2] = 0.7
    assert machine.ask(6) == [2] * 6


def test_a_neighbour_that_comes_is_noticed_within_a_few_requests() -> None:
    machine = Machine({1: 1.0, 2: 0.7})
    machine.learn()
    machine.ask(FIRST_RETRY // 2)
    machine.paces[2] = 2.5
    assert machine.ask(4)[-1] == 1


def test_a_neighbour_that_goes_is_noticed_at_the_next_trial() -> None:
    machine = Machine({1: 1.0, 2: 1.9})
    machine.learn()
    assert set(machine.ask(FIRST_RETRY)) == {1}
    machine.paces[2] = 0.7
    assert set(machine.ask(NUM_TRIED)) == {2}
    assert set(machine.ask(FIRST_RETRY)) == {2}


def test_a_trial_that_goes_badly_is_given_up() -> None:
    """It costs one request at the start of the threads and one that shows it, not as many as a good one."""
    machine = Machine({1: 1.0, 2: GIVE_UP * 10})
    assert machine.ask(2 + NUM_TRIED + FIRST_RETRY) == [2] * 2 + [1] * (NUM_TRIED + FIRST_RETRY)
    assert machine.ask(2 + FIRST_RETRY) == [2] * 2 + [1] * FIRST_RETRY


def test_trials_that_change_nothing_become_rare() -> None:
    """After that many requests they are less than one in a hundred, and never cease."""
    machine = Machine({1: 1.0, 2: 1.5})
    machine.ask(4 * LAST_RETRY)
    assert machine.ask(2 * LAST_RETRY).count(2) in range(1, LAST_RETRY // 50)


def test_where_forwards_take_unlike_what_they_should_the_planned_number_stays() -> None:
    """The costs of the warm-up mean nothing then, so neither does a comparison by them."""
    machine = Machine({1: GIVE_UP * 3, 2: GIVE_UP * 2})
    assert machine.ask(4 + FIRST_RETRY) == [2] * 2 + [1] * (2 + FIRST_RETRY)
    assert machine.ask(LAST_RETRY).count(2) < LAST_RETRY // 50


def test_what_the_model_raises_is_raised_and_the_next_one_is_as_before() -> None:
    machine = Machine({1: 1.0, 2: 0.7})
    machine.learn()

    def fail() -> NoReturn:
        raise KeyError("no such word")

    with pytest.raises(KeyError, match="no such word"):
        machine.threads.run(fail, lone=True, cost_s=COST_S)
    assert machine.ask(3) == [2] * 3


def test_the_threads_are_started_when_their_number_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(lone, "_start_threads", lambda num_threads, cores: started.append((num_threads, tuple(cores))))
    machine = Machine({1: 1.0, 2: 0.7})
    machine.learn()
    assert started == [(2, (0, 1))]
    machine.ask(2, lone=False)
    machine.ask(2)
    assert started == [(2, (0, 1))] * 2


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(core_ids()) < 2, reason="needs two cores to choose from"
)
def test_new_threads_stay_off_the_replicas_own_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit where they may run when torch starts them; this thread may run where it did, whatever happens."""
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    first, *others = cores = core_ids()
    ones, seen = torch.ones, []

    def look(num: int) -> torch.Tensor:
        seen.append((num, os.sched_getaffinity(0)))
        return ones(num)

    monkeypatch.setattr(torch, "ones", look)
    try:
        os.sched_setaffinity(0, {first})
        lone._start_threads(2, cores)
        assert seen == [(2 * GRAIN, set(others))]
        lone._start_threads(2, [max(before) + 1])  # a core that is not there any more: all is as it was
        assert seen[1:] == [(2 * GRAIN, {first})]
        assert os.sched_getaffinity(0) == {first}
    finally:
        os.sched_setaffinity(0, before)


def test_idle_threads_look_for_work_before_they_sleep_unless_the_user_has_said_how() -> None:
    assert lone_variables({}) == {"GOMP_SPINCOUNT": NUM_SPINS}
    assert lone_variables({"OMP_WAIT_POLICY": "active"}) == {}
    assert lone_variables({"GOMP_SPINCOUNT": "5"}) == {}
