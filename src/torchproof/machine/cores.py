"""Cores: how many this process may run on, how many are physical, and how much parallel work they really do.

``os.cpu_count()`` is not capacity: a machine that said 2 did the work of 0.33 to 1.34 cores at different hours, with
other programs and other virtual machines beside it.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from torchproof.machine.cgroup import cpu_quota, read_text
from torchproof.types.doctor import UsableCores

_NUM_ROUNDS = 6  # the range of 6 samples holds their median with 1 - 2 x 0.5**6 = 97% confidence
_LEAD_S = 0.01  # from the schedule's hand-over to its first window: every process has read it by then
_GAP_S = 0.002  # between two windows, so that one that ends late does not touch the next

# Counts loops inside each window. It sleeps in between, and leaves out a loop that ends after the window's end.
_BUSY_PROCESS = """
import sys, time
clock, sleep = time.monotonic, time.sleep
print("ready", flush=True)
for window in sys.stdin.readline().split(";"):
    start, end = map(float, window.split(","))
    sleep(max(0.0, start - clock()))
    done, fastest, before = 0, 1e9, clock()
    while True:
        for _ in range(4000):
            pass
        now = clock()
        if now > end:
            break
        done, fastest, before = done + 1, min(fastest, now - before), now
    print(done, fastest)
"""


def num_cores() -> int:
    """Cores that this process may run on: its affinity, or all of them where the system knows none."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_ids() -> tuple[int, ...]:
    """The kernel's numbers of the cores that this process may run on, ascending."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(num_cores()))


def smt_siblings(root: Path = Path("/"), cores: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], ...] | None:
    """The allowed cores grouped by the physical core that they share; None when the kernel does not say.

    Args:
        cores: the kernel's numbers; by default those that this process may run on.
    """
    allowed = core_ids() if cores is None else cores
    groups = set()
    for core in allowed:
        text = read_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if not text:
            return None
        groups.add(tuple(sibling for sibling in _parse_list(text) if sibling in allowed))
    return tuple(sorted(groups))


def measure_usable_cores(duration_s: float = 0.3, num_processes: int | None = None) -> UsableCores | None:
    """Parallel work that the machine does now, in units of one core that works undisturbed.

    As many single-core processes as there are cores run side by side, and one alone, in short interleaved rounds. The
    work of all is divided by what one does alone when nothing interrupts it (its fastest loop), so a neighbour that
    takes half of every core, a hypervisor that steals time and two SMT siblings that share a core all show. It is
    the capacity at this moment, not a property of the machine: measure again when it matters.

    A round is never counted as more than the cores there are or the cgroup's quota: more is timing noise, or a quota
    whose period (usually 0.1 s) the rounds were too short to meet.

    Args:
        duration_s: seconds of measurement, without the start of the processes (10 to 50 ms each).
        num_processes: by default one for each core that this process may run on.

    Returns:
        None when the processes can't be started (a limit on processes or memory).
    """
    count = num_cores() if num_processes is None else num_processes
    window_s = max(0.004, duration_s / (2 * _NUM_ROUNDS) - _GAP_S)
    try:
        with contextlib.ExitStack() as stack:
            processes = []
            for _ in range(count):
                processes.append(stack.enter_context(_start()))
                stack.callback(processes[-1].kill)
            outputs = _run(processes, window_s)
    except (OSError, subprocess.SubprocessError):
        return None
    if outputs is None:
        return None
    limit = min(float(min(count, num_cores())), cpu_quota() or float("inf"))
    return judge_rounds(outputs, window_s, limit)


def judge_rounds(outputs: list[list[tuple[int, float]]], window_s: float, limit: float) -> UsableCores | None:
    """Usable cores from what the processes counted.

    Args:
        outputs: for each process, ``(loops done, seconds of its fastest loop)`` in every window that it worked in. The
            first process works in 12 windows, alone in every second one; the others in the six that all share.
        window_s: seconds that a window lasts.
        limit: no round counts as more.

    Returns:
        None when no loop ended inside a window.
    """
    alone = [outputs[0][2 * i + (i % 2)] for i in range(_NUM_ROUNDS)]
    shared = [outputs[0][2 * i + 1 - (i % 2)] for i in range(_NUM_ROUNDS)]
    loop_s = min((fastest for done, fastest in alone if done), default=None)
    if loop_s is None:
        return None
    samples = []
    for i in range(_NUM_ROUNDS):
        done = shared[i][0] + sum(output[i][0] for output in outputs[1:])
        samples.append(min(limit, done * loop_s / window_s))
    return UsableCores(
        samples=tuple(samples),
        estimate=statistics.median(samples),
        low=min(samples),
        high=max(samples),
        num_processes=len(outputs),
    )


def _schedules(count: int, window_s: float) -> list[str]:
    """Each process's windows. Alone first in even rounds and last in odd ones, so that a drift cancels."""
    start = time.monotonic() + _LEAD_S + 0.0005 * count
    starts = [start + i * (window_s + _GAP_S) for i in range(2 * _NUM_ROUNDS)]
    windows = [f"{begin!r},{begin + window_s!r}" for begin in starts]
    shared = [windows[2 * i + 1 - (i % 2)] for i in range(_NUM_ROUNDS)]
    return [";".join(windows)] + [";".join(shared)] * (count - 1)


def _start() -> subprocess.Popen[str]:
    # -I -S: no site-packages and no user settings; it starts in 10 ms and holds 8 MiB.
    command = [sys.executable, "-I", "-S", "-c", _BUSY_PROCESS]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _run(processes: list[subprocess.Popen[str]], window_s: float) -> list[list[tuple[int, float]]] | None:
    """What each process counted, as ``judge_rounds`` takes it; None when one ended early."""
    for process in processes:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            return None
    for process, schedule in zip(processes, _schedules(len(processes), window_s), strict=True):
        if process.stdin is not None:
            process.stdin.write(schedule + "\n")
            process.stdin.flush()
    outputs = []
    for process in processes:
        # 60 s: far beyond any schedule; a process that is starved for so long has no capacity to measure.
        stdout, _ = process.communicate(timeout=60)
        if process.returncode != 0:
            return None
        pairs = (line.split() for line in stdout.splitlines())
        outputs.append([(int(done), float(fastest)) for done, fastest in pairs])
    return outputs


def _parse_list(text: str) -> list[int]:
    """The kernel's list of cores: ``0-3,8`` is 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores
