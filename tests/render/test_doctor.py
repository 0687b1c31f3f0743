"""The report fits 80 columns whatever it holds, and says unknown where it knows nothing."""

import msgspec

from torchproof.render import doctor
from torchproof.types import Environment
from torchproof.types.doctor import Advice, DoctorReport, Extra, SharedMemory, TorchSettings, UsableCores

FULL = DoctorReport(
    torchproof="0.1.0",
    environment=Environment(
        platform="Linux-6.1-x86_64-with-glibc2.36",
        python="3.11.7",
        cpu_model="AMD EPYC 9654 96-Core Processor",
        cpu_flags=("avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "amx_tile"),
        num_cores=4,
        cpu_quota=1.5,
        usable_cores=1.31,
        memory_bytes=8 << 30,
        versions={
            "torch": "2.13.0+cpu",
            "numpy": "2.4.6",
            "onnx": "1.23.2",
            "onnxruntime": "1.32.0",
            "uvicorn": "0.54",
        },
        variables={"OMP_NUM_THREADS": "4", "TORCH_LOGS": ""},
    ),
    num_physical_cores=2,
    usable_cores=UsableCores(samples=(1.31,), estimate=1.31, low=1.2, high=1.345, num_processes=4),
    memory_limit_bytes=8 << 30,
    available_bytes=5 << 30,
    shm=SharedMemory(size_bytes=64 << 20, free_bytes=60 << 20),
    malloc="jemalloc",
    cxx="/usr/bin/g++",
    python_header=None,
    extras=(
        Extra(name="hf", missing=(), install=""),
        Extra(name="onnx", missing=("onnxscript",), install="pip install 'torchproof[onnx]'"),
    ),
    torch=TorchSettings(num_threads=4, num_interop_threads=2, openmp="libgomp.so.1"),
    advice=(Advice(name="a", message="torch starts 4 threads, and " + "so on " * 30, fix="set OMP_NUM_THREADS=1"),),
)


def test_full_report() -> None:
    out = doctor.text(FULL)
    assert all(len(line) <= 80 for line in out.splitlines())
    for part in (
        "cores      4 by affinity, 2 physical (SMT), cgroup quota 1.50",
        "usable     1.31 [1.20, 1.34] cores of work by 4 busy processes",
        "memory     8.0 GiB, 5.0 GiB available, the cgroup's limit",
        "/dev/shm   64.0 MiB, 60.0 MiB free",
        "compiler   /usr/bin/g++, no Python.h",
        "torch      2.13.0+cpu, 4 intra-op and 2 inter-op threads, libgomp.so.1",
        "onnx lacks onnxscript: pip install 'torchproof[onnx]'",
        "variables  OMP_NUM_THREADS=4\n           TORCH_LOGS=\n",
        "  fix: set OMP_NUM_THREADS=1\n",
    ):
        assert part in out


def test_unknowns() -> None:
    environment = msgspec.structs.replace(
        FULL.environment, cpu_model="", cpu_flags=(), cpu_quota=None, versions={}, variables={}
    )
    report = msgspec.structs.replace(
        FULL,
        environment=environment,
        num_physical_cores=None,
        usable_cores=None,
        memory_limit_bytes=None,
        available_bytes=None,
        shm=None,
        malloc=None,
        cxx=None,
        torch=None,
        extras=(),
        advice=(),
    )
    out = doctor.text(report)
    assert "malloc     unknown" in out
    assert "cpu        unknown" in out
    assert "usable     unknown" in out
    assert "/dev/shm   none" in out
    assert "torch      not installed" in out
    assert "nothing here needs attention" in out
    assert "None" not in out


def test_a_torch_that_breaks_is_a_line() -> None:
    report = msgspec.structs.replace(FULL, torch=TorchSettings(error="AttributeError: no levels"))
    assert "torch      2.13.0+cpu, can't be imported: AttributeError: no levels" in doctor.text(report)
