"""Memory: what the process may use, what is free, ``/dev/shm``, the allocator, and the peak of a process tree."""

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


class TreePeak:
    """The highest resident memory seen of a process and all its descendants.

    Call ``sample`` as often as is useful; for a process without children the peak is exact whatever the number of
    calls, as long as one falls near its end: the kernel keeps each process's own high-water mark (``VmHWM``). For a
    tree it is the largest sum seen; pages that processes share are counted in each of them.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid = pid
        self._root = root
        self.peak_bytes = 0

    def sample(self) -> int:
        """Look once; returns the peak so far, bytes. A process that has ended changes nothing."""
        total = 0
        for pid in _tree(self._pid):
            status = _status(self._root, pid)
            total += status.get("VmRSS", 0)
            self.peak_bytes = max(self.peak_bytes, status.get("VmHWM", 0))
        self.peak_bytes = max(self.peak_bytes, total)
        return self.peak_bytes


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def _status(root: Path, pid: int) -> dict[str, int]:
    """``VmRSS`` and ``VmHWM`` in bytes; empty for a process that has ended."""
    text = read_text(root / "proc" / str(pid) / "status")
    if text is not None:
        fields = (line.split() for line in text.splitlines())
        return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[0] in ("VmRSS:", "VmHWM:")}
    try:
        return {"VmRSS": int(psutil.Process(pid).memory_info().rss)}
    except psutil.Error:
        return {}


def _meminfo(root: Path, key: str) -> int | None:
    """A line of ``/proc/meminfo`` in bytes (the kernel writes KiB)."""
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == f"{key}:":
            return int(fields[1]) * 1024
    return None
