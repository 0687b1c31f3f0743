"""Tells computing from waiting for a disk, and both from waiting for a core."""

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from torchproof.types.loading import Cost

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def cost_of(action: Callable[[], object]) -> Cost:
    """What one call takes."""
    switches = resource.getrusage(_THREAD).ru_nvcsw
    delay_s = _run_delay_s()
    thread_s, cpu_s, begin = time.thread_time(), time.process_time(), time.perf_counter()
    action()
    wall_s = time.perf_counter() - begin
    cpu_s = time.process_time() - cpu_s
    thread_s = time.thread_time() - thread_s
    slept = resource.getrusage(_THREAD).ru_nvcsw > switches  # else it waited for a core, or a hypervisor took time
    wait_s = max(0.0, wall_s - thread_s - (_run_delay_s() - delay_s)) if slept else 0.0
    return Cost(cpu_s=cpu_s, wait_s=wait_s, wall_s=wall_s)


def repeated(action: Callable[[], object], *, budget_s: float, least: int, most: int = 200) -> list[Cost]:
    """What calls take, one after the other; the first one, which warms up, is left out."""
    action()
    end = time.perf_counter() + budget_s
    costs: list[Cost] = []
    while len(costs) < most and (len(costs) < least or time.perf_counter() < end):
        costs.append(cost_of(action))
    return costs


def typical(costs: Sequence[Cost]) -> Cost:
    """The median of each part."""
    return Cost(
        cpu_s=statistics.median(cost.cpu_s for cost in costs),
        wait_s=statistics.median(cost.wait_s for cost in costs),
        wall_s=statistics.median(cost.wall_s for cost in costs),
    )


def process_cpu_s(pid: int) -> float:
    """CPU time that another process's threads have had; to the nanosecond where the kernel tells, else to 10 ms."""
    with contextlib.suppress(OSError, ValueError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _run_delay_s() -> float:
    """How long this thread has been ready and had no core; 0 where the kernel doesn't tell."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        fields = os.read(descriptor, 100).split()
    finally:
        os.close(descriptor)
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
