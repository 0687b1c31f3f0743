"""What deserves attention on a machine, judged from a report's plain values; silent about what they don't prove."""

import math
from collections.abc import Iterator

from torchproof.types.doctor import Advice, DoctorReport

# Measured on two cores beside a busy neighbour: 1.34 usable cores of 2 (0.67) cost a process with default threads 10
# to 20 times its throughput. Above 0.75 the gap may be lower clocks with all cores busy, or two SMT siblings.
_CROWDED = 0.75

_DEFAULT_SHM_BYTES = 64 << 20  # the /dev/shm that Docker and Kubernetes give a container unless told otherwise


def advise(report: DoctorReport) -> tuple[Advice, ...]:
    """Every sentence that ``report`` proves, most harmful first. Ignores the advice that it already carries."""
    return (
        *_torch_broken(report),
        *_too_many_threads(report),
        *_spinning(report),
        *_no_compiler(report),
        *_small_shm(report),
        *_two_allocator_settings(report),
    )


def _torch_broken(report: DoctorReport) -> Iterator[Advice]:
    if report.torch is None or not report.torch.error:
        return
    if report.environment.variables.get("TORCH_LOGS") == "":
        yield Advice(
            name="torch-logs-empty",
            message=f"TORCH_LOGS is set but empty, and `import torch` breaks on that: {report.torch.error}",
            fix="unset TORCH_LOGS",
        )
    else:
        yield Advice(
            name="torch-does-not-import",
            message=f"torch is installed but can't be imported: {report.torch.error}",
            fix="run `python -c 'import torch'` for the whole traceback, then reinstall torch",
        )


def _too_many_threads(report: DoctorReport) -> Iterator[Advice]:
    threads = report.torch.num_threads if report.torch else None
    if not threads or threads == 1:
        return
    quota = report.environment.cpu_quota
    usable = report.usable_cores
    if quota is not None and threads > math.ceil(quota):
        yield Advice(
            name="more-threads-than-quota",
            message=f"torch starts {threads} threads, and the cgroup allows the CPU time of {quota:.2g} cores: when it "
            "is used up, all threads stop until the next period (usually 0.1 s)",
            fix=f"set OMP_NUM_THREADS={max(1, math.floor(quota))}, or let `torchproof tune` measure the thread count",
        )
    elif usable is not None and usable.high < _CROWDED * threads:
        yield Advice(
            name="more-threads-than-usable-cores",
            message=f"torch starts {threads} threads, and the machine does the work of {usable.estimate:.2g} cores "
            f"now (between {usable.low:.2g} and {usable.high:.2g}): every parallel step waits for the slowest thread",
            fix=f"set OMP_NUM_THREADS={max(1, math.floor(usable.estimate))}, or let `torchproof tune` measure the "
            "thread count",
        )


def _spinning(report: DoctorReport) -> Iterator[Advice]:
    torch, usable, variables = report.torch, report.usable_cores, report.environment.variables
    if torch is None or usable is None or not torch.openmp or not torch.num_threads or torch.num_threads == 1:
        return
    if variables.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        return
    # Physical cores: two SMT siblings do the work of 1.2 to 1.3 cores with no neighbour at all.
    cores = report.num_physical_cores or report.environment.num_cores
    offered = min(float(cores), report.environment.cpu_quota or float("inf"))
    if usable.high < _CROWDED * offered:
        yield Advice(
            name="openmp-spins-beside-a-neighbour",
            message=f"{torch.openmp} spins while its threads wait for each other, and something else takes "
            f"{offered - usable.estimate:.2g} of the {offered:g} cores: spinning threads then hold the core that the "
            "late one needs, and throughput collapses",
            fix="set OMP_WAIT_POLICY=passive before Python starts",
        )


def _no_compiler(report: DoctorReport) -> Iterator[Advice]:
    if report.torch is None:
        return
    if report.cxx is None:
        yield Advice(
            name="no-cxx-compiler",
            message="there is no C++ compiler (torch looks for $CXX, then g++): torch.compile and AOTInductor can't "
            "build code for the CPU",
            fix="install g++ (Debian, Ubuntu: apt-get install g++), or tune on a machine that has it",
        )
    elif report.python_header is None:
        yield Advice(
            name="no-python-header",
            message="Python.h is missing: torch.compile and AOTInductor can't build code for the CPU",
            fix="install Python's headers (Debian, Ubuntu: apt-get install python3-dev)",
        )


def _small_shm(report: DoctorReport) -> Iterator[Advice]:
    if report.shm is not None and 0 < report.shm.size_bytes <= _DEFAULT_SHM_BYTES:
        yield Advice(
            name="small-shared-memory",
            message=f"/dev/shm has {report.shm.size_bytes >> 20} MiB, a container's default: DataLoader workers hand "
            "their batches over in it, and die with a bus error when it is full",
            fix="start the container with --shm-size=2g or --ipc=host (Kubernetes: an emptyDir with medium: Memory "
            "mounted at /dev/shm)",
        )


def _two_allocator_settings(report: DoctorReport) -> Iterator[Advice]:
    variables = report.environment.variables
    old, new = variables.get("PYTORCH_CUDA_ALLOC_CONF"), variables.get("PYTORCH_ALLOC_CONF")
    if old is not None and new is not None and old != new:
        # torch 2.13: AllocatorConfig.h reads the new name first, CUDAAllocatorConfig.h the old one.
        yield Advice(
            name="two-allocator-settings",
            message="PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set and differ: parts of torch read the "
            "one first and parts the other",
            fix="keep PYTORCH_ALLOC_CONF and unset PYTORCH_CUDA_ALLOC_CONF",
        )
