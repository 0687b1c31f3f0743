"""Memory is the smaller of the machine's and the cgroup's; the allocator is read from what the process mapped."""

from pathlib import Path

import pytest

from torchproof.machine import memory

GIB = 1 << 30


def machine(root: Path, limit: str = "max", current: int = 0) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/memory.max").write_text(limit)
    (root / "sys/fs/cgroup/memory.current").write_text(str(current))
    return root


def test_without_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert (memory.usable_memory(root), memory.available_memory(root)) == (16 * GIB, 10 * GIB)


def test_a_limit_below_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, limit=str(4 * GIB), current=1 * GIB)
    assert (memory.usable_memory(root), memory.available_memory(root)) == (4 * GIB, 3 * GIB)


def test_a_limit_above_the_machine_gives_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, limit=str(64 * GIB), current=1 * GIB)
    assert (memory.usable_memory(root), memory.available_memory(root)) == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("libraries", "name"),
    [
        (["libc.so.6"], "glibc"),
        (["libc.so.6", "libjemalloc.so.2"], "jemalloc"),
        (["libc.so.6", "libtcmalloc_minimal.so.4"], "tcmalloc"),
        (["ld-musl-x86_64.so.1"], "musl"),
        (["libcuda.so.1", "libc10.so"], None),  # near misses of "libc"
    ],
)
def test_malloc(tmp_path: Path, libraries: list[str], name: str | None) -> None:
    root = machine(tmp_path)
    lines = [f"7f00-7f01 r-xp 00000000 08:01 123    /usr/lib/{library}\n" for library in libraries]
    (root / "proc/self/maps").write_text("".join([*lines, "7ffd-7ffe rw-p 00000000 00:00 0    [stack]\n"]))
    assert memory.malloc_in_use(root) == name


def test_unknown_stays_unknown(tmp_path: Path) -> None:
    assert memory.malloc_in_use(tmp_path) is None
    assert memory.shared_memory(tmp_path / "none") is None


def test_shared_memory_of_a_folder(tmp_path: Path) -> None:
    shm = memory.shared_memory(tmp_path)
    assert shm is not None
    assert 0 <= shm.free_bytes <= shm.size_bytes
