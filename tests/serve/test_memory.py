"""A look at the process's own memory tells what it keeps, and costs next to nothing."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from torchproof.serve import memory
from torchproof.serve.memory import sample

MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test counts the shared pages anew, and asks again whose malloc it is."""
    monkeypatch.setattr(memory, "_shared", memory._Shared(0, 0.0, 0))
    memory._mallinfo.cache_clear()
    yield
    memory._mallinfo.cache_clear()


class FakeProcess:
    """What psutil says, in MiB; counts how often it is asked for what is shared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rss, self.uss, self.clock, self.takes_s, self.num_full = 100, 30, 1000.0, 0.0, 0
        monkeypatch.setattr(memory.psutil, "Process", lambda: self)
        monkeypatch.setattr(memory.time, "monotonic", lambda: self.clock)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.rss * MIB)

    def memory_full_info(self) -> SimpleNamespace:
        self.num_full += 1
        self.clock += self.takes_s
        return SimpleNamespace(rss=self.rss * MIB, uss=self.uss * MIB)

    def look(self) -> tuple[int, int]:
        look = sample(0)
        return look.rss_bytes // MIB, look.private_bytes // MIB


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    return FakeProcess(monkeypatch)


def test_a_look_at_this_process() -> None:
    look = sample(7)
    assert look.num_requests == 7
    assert 0 < look.private_bytes <= look.rss_bytes
    assert look.rss_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert look.device_allocated_bytes is None
    assert look.at_s <= sample(8).at_s


@pytest.mark.skipif(memory._mallinfo() is None, reason="malloc is not glibc's")
def test_what_is_kept_is_in_use_and_what_is_freed_is_not() -> None:
    gc.collect()  # not while it is measured
    before = sample(0).in_use_bytes
    assert before is not None
    kept = [bytearray(100_000) for _ in range(200)]
    mapped = bytearray(50 * MIB)  # above the threshold of mmap
    during = sample(0).in_use_bytes
    assert during is not None
    assert during - before == pytest.approx(200 * 100_000 + 50 * MIB, rel=0.05)
    del kept, mapped
    after = sample(0).in_use_bytes
    assert after is not None
    assert after - before < MIB


@pytest.mark.skipif(memory._mallinfo() is None, reason="malloc is not glibc's")
def test_what_malloc_holds_between_blocks_in_use_is_free() -> None:
    gc.collect()
    blocks = [bytearray(20_000) for _ in range(1000)]
    before = sample(0).free_bytes
    kept = blocks[::10]
    del blocks
    after = sample(0).free_bytes
    assert before is not None
    assert after is not None
    assert after - before > 800 * 20_000
    assert len(kept) == 100


@pytest.mark.parametrize("allocator", ["jemalloc", "musl", None])
def test_another_malloc_says_nothing(allocator: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc's own function is still there beside a preloaded allocator, and would say that nothing is in use."""
    monkeypatch.setattr(memory, "malloc_in_use", lambda: allocator)
    look = sample(0)
    assert (look.in_use_bytes, look.free_bytes) == (None, None)


def test_a_glibc_before_2_33_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "malloc_in_use", lambda: "glibc")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert sample(0).in_use_bytes is None


def test_a_kernel_that_cannot_tell_what_is_shared(process: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "memory_full_info", process.memory_info)
    assert process.look() == (100, 100)


def test_shared_pages_are_counted_for_a_thousandth_of_the_time(process: FakeProcess) -> None:
    """24 ms of the replica's time buy 24 s; what is added until then is the replica's own."""
    process.takes_s = 0.024
    assert process.look() == (100, 30)
    process.clock += 23.9
    process.rss, process.uss = 150, 999
    assert process.look() == (150, 80)
    assert process.num_full == 1
    process.clock += 0.2
    process.uss = 85
    assert process.look() == (150, 85)
    assert process.num_full == 2


def test_less_than_what_was_shared_is_not_negative(process: FakeProcess) -> None:
    process.takes_s = 1.0
    process.look()
    process.rss = 50
    assert process.look() == (50, 0)


def test_a_forked_process_counts_for_itself(process: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.takes_s = 1.0
    process.look()
    monkeypatch.setattr(memory.os, "getpid", lambda: -1)
    process.uss = 2
    assert process.look() == (100, 2)


def test_cuda_is_asked_only_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 8, "num_ooms": 1}
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_stats=lambda: stats)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    look = sample(0)
    assert (look.device_allocated_bytes, look.device_reserved_bytes, look.num_device_ooms) == (5, 8, 1)
    cuda.is_initialized = lambda: False
    look = sample(0)
    assert (look.device_allocated_bytes, look.device_reserved_bytes, look.num_device_ooms) == (None, None, None)


def test_looking_loads_no_torch() -> None:
    script = "import sys; from torchproof.serve.memory import sample; sample(0); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
