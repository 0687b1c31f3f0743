"""Usable cores are work in units of one undisturbed core: what was counted decides, and never more than there are."""

import os
from pathlib import Path

import pytest

from torchproof.machine import cores

LOOP_S = 1e-4
WINDOW_S = 0.02
FULL = 200  # loops in a window that nothing disturbs


def first(alone: int, shared: int) -> list[tuple[int, float]]:
    """The first process's twelve windows: alone, shared, shared, alone, alone, …"""
    return [(alone if position % 4 in (0, 3) else shared, LOOP_S) for position in range(12)]


def judge(outputs: list[list[tuple[int, float]]], limit: float = 2.0) -> float:
    result = cores.judge_rounds(outputs, WINDOW_S, limit)
    assert result is not None
    assert result.low <= result.estimate <= result.high
    return result.estimate


def test_two_free_cores() -> None:
    assert judge([first(FULL, FULL), [(FULL, LOOP_S)] * 6]) == pytest.approx(2.0)


def test_two_processes_on_one_core() -> None:
    assert judge([first(FULL, FULL // 2), [(FULL // 2, LOOP_S)] * 6]) == pytest.approx(1.0)


def test_a_machine_that_is_taken_even_when_one_works_alone() -> None:
    """The unit is the fastest loop, so a lone process that gets a third of a core does not pass for a whole one."""
    third = FULL // 3
    assert judge([first(third, third // 2), [(third // 2, LOOP_S)] * 6]) == pytest.approx(0.33, abs=0.01)


def test_smt_siblings() -> None:
    """Two processes on one physical core both run all the time, each at 60%."""
    slow = (FULL * 6 // 10, LOOP_S / 0.6)
    alone_and_shared = [(FULL, LOOP_S) if position % 4 in (0, 3) else slow for position in range(12)]
    assert judge([alone_and_shared, [slow] * 6]) == pytest.approx(1.2)


def test_more_than_the_limit_is_noise() -> None:
    assert judge([first(FULL, FULL + 9), [(FULL + 9, LOOP_S)] * 6], limit=1.5) == 1.5


def test_one_process_alone() -> None:
    assert judge([first(FULL, FULL)], limit=1.0) == pytest.approx(1.0)


def test_nothing_counted_is_unknown() -> None:
    assert cores.judge_rounds([[(0, 1e9)] * 12, [(0, 1e9)] * 6], WINDOW_S, 2.0) is None


def test_the_real_processes_answer() -> None:
    """End to end: six rounds, none above the cores there are, whatever the machine's load."""
    result = cores.measure_usable_cores(duration_s=0.1)
    assert result is not None
    assert len(result.samples) == 6
    assert 0 <= result.low <= result.estimate <= result.high <= cores.num_cores()
    assert result.num_processes == cores.num_cores()


def test_processes_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert cores.measure_usable_cores(duration_s=0.05) is None


def test_smt_groups(tmp_path: Path) -> None:
    for core, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 6: "6-7"}.items():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores.smt_siblings(tmp_path, cores=(0, 1, 4, 5)) == ((0, 4), (1, 5))
    assert cores.smt_siblings(tmp_path, cores=(0, 1, 6)) == ((0,), (1,), (6,))  # only the allowed ones
    assert cores.smt_siblings(tmp_path, cores=(0, 9)) is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_affinity_counts() -> None:
    assert cores.num_cores() == len(os.sched_getaffinity(0)) == len(cores.core_ids())
