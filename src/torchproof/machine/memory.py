"""Memory: what the process may use, what is free, ``/dev/shm`` and the allocator."""

import os
from pathlib import Path

import psutil

from torchproof.machine.cgroup import memory_headroom, memory_limit, read_text
from torchproof.types.doctor import SharedMemory

# Substrings of the file that each allocator is loaded from; a preloaded one comes before the C library's.
_PRELOADED = {"libjemalloc": "jemalloc", "libtcmalloc": "tcmalloc", "libmimalloc": "mimalloc"}
_C_LIBRARIES = {"ld-musl": "musl", "libc.musl": "musl", "libc.so": "glibc", "libc-2.": "glibc"}


def usable_memory(root: Path = Path("/")) -> int:
    """Memory that the process may use, bytes: the cgroup's limit or the machine's memory, the smaller."""
    physical = _meminfo(root, "MemTotal") or int(psutil.virtual_memory().total)
    return min(physical, memory_limit(root) or physical)


def available_memory(root: Path = Path("/")) -> int:
    """Memory that can be had now without swapping, bytes, inside the cgroup's limit."""
    available = _meminfo(root, "MemAvailable") or int(psutil.virtual_memory().available)
    headroom = memory_headroom(root)
    return available if headroom is None else min(available, headroom)


def shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | None:
    """Size and free bytes of the shared memory that DataLoader workers hand batches over in; None: there is none."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return SharedMemory(size_bytes=stat.f_blocks * stat.f_frsize, free_bytes=stat.f_bavail * stat.f_frsize)


def malloc_in_use(root: Path = Path("/"), pid: int | str = "self") -> str | None:
    """``glibc``, ``musl``, ``jemalloc``, ``tcmalloc`` or ``mimalloc``: what serves malloc in a process; None: unknown.

    An allocator that is mapped counts as in use: a preloaded library replaces malloc for the whole process.
    """
    files = {Path(name).name for name in mapped_files(root, pid)}
    for table in (_PRELOADED, _C_LIBRARIES):
        for prefix, name in table.items():
            if any(file.startswith(prefix) for file in files):
                return name
    return None


def mapped_files(root: Path = Path("/"), pid: int | str = "self") -> tuple[str, ...]:
    """Paths of the files that a process has mapped (its shared libraries among them), sorted."""
    lines = (read_text(root / "proc" / str(pid) / "maps") or "").splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    return tuple(sorted({field[5] for field in fields if len(field) == 6 and field[5].startswith("/")}))


def _meminfo(root: Path, key: str) -> int | None:
    """A line of ``/proc/meminfo`` in bytes (the kernel writes KiB)."""
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == f"{key}:":
            return int(fields[1]) * 1024
    return None
