"""Advice is given on what a report proves; the near misses stay silent."""

from typing import Any

import msgspec
import pytest

from torchproof.machine.advice import advise
from torchproof.types import Environment
from torchproof.types.doctor import DoctorReport, SharedMemory, TorchSettings, UsableCores

MIB = 1 << 20


def usable(estimate: float, high: float | None = None) -> UsableCores:
    high = estimate if high is None else high
    return UsableCores(samples=(estimate,) * 6, estimate=estimate, low=estimate, high=high, num_processes=8)


HEALTHY = DoctorReport(
    torchproof="0",
    environment=Environment(
        platform="Linux",
        python="3.11",
        cpu_model="cpu",
        cpu_flags=(),
        num_cores=8,
        cpu_quota=None,
        usable_cores=7.7,
        memory_bytes=1 << 34,
        versions={"torch": "2.13.0"},
        variables={},
    ),
    num_physical_cores=8,
    usable_cores=usable(7.7),
    memory_limit_bytes=None,
    available_bytes=1 << 33,
    shm=SharedMemory(size_bytes=1 << 33, free_bytes=1 << 33),
    malloc="glibc",
    cxx="/usr/bin/g++",
    python_header="/usr/include/Python.h",
    extras=(),
    torch=TorchSettings(num_threads=8, num_interop_threads=8, openmp="libgomp.so.1"),
    advice=(),
)
LOGS_ERROR = TorchSettings(error="AttributeError: 'dict' object has no attribute 'get_log_level_pairs'")


def report(quota: float | None = None, variables: dict[str, str] | None = None, **changes: Any) -> DoctorReport:
    environment = msgspec.structs.replace(HEALTHY.environment, cpu_quota=quota, variables=variables or {})
    return msgspec.structs.replace(HEALTHY, environment=environment, **changes)


def names(of: DoctorReport) -> list[str]:
    return [advice.name for advice in advise(of)]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (report(usable_cores=usable(3.1, 3.6)), ["more-threads-than-usable-cores", "openmp-spins-beside-a-neighbour"]),
        (
            report(usable_cores=usable(3.1, 3.6), variables={"OMP_WAIT_POLICY": "passive"}),
            ["more-threads-than-usable-cores"],
        ),
        (report(quota=2.0, usable_cores=usable(2.0)), ["more-threads-than-quota"]),
        (report(torch=LOGS_ERROR, variables={"TORCH_LOGS": ""}), ["torch-logs-empty"]),
        (report(torch=TorchSettings(error="OSError: libcudart.so.12")), ["torch-does-not-import"]),
        (report(shm=SharedMemory(size_bytes=64 * MIB, free_bytes=64 * MIB)), ["small-shared-memory"]),
        (report(cxx=None), ["no-cxx-compiler"]),
        (report(python_header=None), ["no-python-header"]),
        (
            report(variables={"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}),
            ["two-allocator-settings"],
        ),
    ],
)
def test_bad(bad: DoctorReport, expected: list[str]) -> None:
    assert names(bad) == expected


@pytest.mark.parametrize(
    "good",
    [
        HEALTHY,
        report(usable_cores=usable(6.0, 6.4)),  # clocks drop when all cores are busy
        report(usable_cores=usable(3.0, 7.0)),  # one bad round proves nothing
        report(usable_cores=None, quota=None),
        report(
            usable_cores=usable(1.0), torch=TorchSettings(num_threads=1, num_interop_threads=1, openmp="libgomp.so.1")
        ),
        # SMT: 16 threads of work on 8 physical cores, nobody beside
        report(usable_cores=usable(9.6), num_physical_cores=8),
        report(quota=7.5),  # eight threads on 7.5 cores
        report(variables={"TORCH_LOGS": ""}),  # this torch can live with it
        report(shm=SharedMemory(size_bytes=65 * MIB, free_bytes=0)),
        report(shm=None),
        report(torch=None, cxx=None, python_header=None),  # nothing here needs a compiler
        report(variables={"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        report(variables={"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}),
    ],
)
def test_near_misses(good: DoctorReport) -> None:
    assert names(good) == []


def test_every_advice_says_what_to_do() -> None:
    worst = report(
        usable_cores=usable(1.0),
        cxx=None,
        shm=SharedMemory(size_bytes=MIB, free_bytes=0),
        variables={"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "a:2"},
    )
    advice = advise(worst)
    assert len(advice) == 5
    assert all(item.message and item.fix and not item.message.endswith(".") for item in advice)
