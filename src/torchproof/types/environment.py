"""Where a measurement was taken."""

from torchproof.types.record import Record


class Environment(Record):
    """The facts of a machine and its software that change a timing, a memory figure or an answer.

    Attributes:
        cpu_flags: instruction sets that compiled artifacts depend on, in the kernel's spelling (``avx512_bf16``).
        num_cores: cores that this process may run on (affinity).
        cpu_quota: the cgroup's limit in cores; None when there is none.
        usable_cores: how much parallel work the machine did when it was measured; None when it was not.
        memory_bytes: what the process may use: the cgroup's limit or the machine's memory.
        versions: installed version of each package that matters, such as ``{"torch": "2.13.0+cpu"}``.
        variables: the environment variables that steer threads and allocators, where set.
    """

    platform: str
    python: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    num_cores: int
    cpu_quota: float | None
    usable_cores: float | None
    memory_bytes: int
    versions: dict[str, str]
    variables: dict[str, str]
