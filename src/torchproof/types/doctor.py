"""What ``torchproof doctor`` saw of a machine."""

from torchproof.types.environment import Environment
from torchproof.types.record import Record


class UsableCores(Record):
    """Parallel work that the machine did, in units of one core that works undisturbed.

    Attributes:
        samples: one value for each round, in order.
        estimate: the median of the rounds.
        low, high: the smallest and the largest round: with six rounds or more, a 95% confidence interval of the median.
        num_processes: busy processes that ran side by side.
    """

    samples: tuple[float, ...]
    estimate: float
    low: float
    high: float
    num_processes: int


class SharedMemory(Record):
    """``/dev/shm``, bytes."""

    size_bytes: int
    free_bytes: int


class Extra(Record):
    """One extra of the package.

    Attributes:
        missing: its packages that are not installed; empty when the extra is complete.
        install: the command that installs it.
    """

    name: str
    missing: tuple[str, ...]
    install: str


class TorchSettings(Record):
    """What torch says of itself in a fresh process with this environment.

    Attributes:
        error: why torch could not be imported: the first line of the real error; empty when it could.
        num_threads: intra-op threads.
        num_interop_threads: inter-op threads.
        openmp: file name of the OpenMP library that torch loaded; empty when there is none or it is unknown.
    """

    error: str = ""
    num_threads: int | None = None
    num_interop_threads: int | None = None
    openmp: str = ""


class Advice(Record):
    """One thing about this machine that deserves attention.

    Attributes:
        name: what is wrong, in kebab case.
        message: what was seen, and why it matters.
        fix: what to do.
    """

    name: str
    message: str
    fix: str


class DoctorReport(Record):
    """The machine, its software and what deserves attention; None where it is unknown.

    Attributes:
        num_physical_cores: physical cores behind the cores that this process may run on.
        usable_cores: measured when the report was made.
        memory_limit_bytes: the cgroup's limit; None when there is none.
        available_bytes: memory that can be had now without swapping.
        malloc: the C library's allocator or the one preloaded in its place.
        cxx: path of the C++ compiler that ``torch.compile`` would call.
        python_header: path of ``Python.h``.
        torch: None when torch is not installed.
    """

    torchproof: str
    environment: Environment
    num_physical_cores: int | None
    usable_cores: UsableCores | None
    memory_limit_bytes: int | None
    available_bytes: int | None
    shm: SharedMemory | None
    malloc: str | None
    cxx: str | None
    python_header: str | None
    extras: tuple[Extra, ...]
    torch: TorchSettings | None
    advice: tuple[Advice, ...]
