"""Limits that a container puts on a process: cgroup v1, v2 and the two mixed."""

from collections.abc import Iterator
from pathlib import Path

# v1 writes "no limit" as the largest page-aligned int64; anything near it is none (kernel: PAGE_COUNTER_MAX).
_NO_LIMIT_BYTES = 1 << 60


def read_text(path: Path) -> str | None:
    """The text of a small kernel file, stripped; None when it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU time that the cgroup allows, in cores (seconds of CPU per second); None when there is no limit.

    The smallest of the process's own group and its ancestors: limits are hierarchical.
    """
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Memory that the cgroup allows, bytes; None when there is no limit."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def memory_headroom(root: Path = Path("/")) -> int | None:
    """Memory left below the cgroup's limit, bytes; file cache that can be dropped counts as free. None: no limit."""
    headrooms = []
    for folder, limit in _memory_limits(root):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = read_text(folder / "memory.stat") or ""
        fields = dict(line.split()[:2] for line in stat.splitlines() if len(line.split()) >= 2)
        inactive = fields.get("total_inactive_file", fields.get("inactive_file", ""))
        cache = int(inactive) if inactive.isdigit() else 0
        headrooms.append(max(0, limit - max(0, used - cache)))
    return min(headrooms, default=None)


def _quota(folder: Path) -> float | None:
    v2 = (read_text(folder / "cpu.max") or "").split()
    if len(v2) == 2 and v2[0].isdigit() and int(v2[1]) > 0:
        return int(v2[0]) / int(v2[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is not None and period is not None and quota > 0 and period > 0:
        return quota / period
    return None


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            if limit is not None and 0 < limit < _NO_LIMIT_BYTES:
                yield folder, limit


def _number(path: Path) -> int | None:
    try:
        return int(read_text(path) or "")
    except ValueError:  # "max", or no such file
        return None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Every folder that may limit ``controller`` for this process, innermost first."""
    mounts = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            tops = [mounts, mounts / "unified"]  # v2 alone, or beside v1
        elif controller in controllers.split(","):
            tops = [mounts / controller, mounts / controllers]
        else:
            continue
        for top in tops:
            yield from _ancestors(top, path)


def _ancestors(top: Path, path: str) -> Iterator[Path]:
    """``top/path`` up to ``top``. Where the path is one from outside the container, ``top`` itself is the group."""
    parts = [part for part in path.split("/") if part]
    if ".." not in parts:
        for length in range(len(parts), 0, -1):
            yield top.joinpath(*parts[:length])
    yield top
