"""What a replica says about its own memory: resident, malloc's and the GPU's."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import psutil

from torchproof.machine.memory import malloc_in_use
from torchproof.types.serving import MemorySample

# Share of the time that may go into asking which pages are shared: the kernel walks them all (measured: 2.9 ms where
# 272 MiB are resident, 24 ms where 2.3 GiB are), and the replica answers nobody meanwhile.
MAX_SHARE = 1e-3


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``: the sums over all arenas, each a ``size_t``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class _Shared(NamedTuple):
    """Bytes of ``pid`` that other processes have too, good until the monotonic clock says ``until``."""

    pid: int
    until: float
    num_bytes: int


_shared = _Shared(0, 0.0, 0)


def sample(num_requests: int) -> MemorySample:
    """The memory of this process, now. Takes 0.1 ms, and a few ms when shared pages are counted anew.

    Args:
        num_requests: answered by this replica so far.
    """
    rss_bytes, private_bytes = _resident()
    in_use_bytes, free_bytes = _malloc()
    allocated, reserved, num_ooms = _device()
    return MemorySample(
        at_s=time.monotonic(),
        num_requests=num_requests,
        rss_bytes=rss_bytes,
        private_bytes=private_bytes,
        in_use_bytes=in_use_bytes,
        free_bytes=free_bytes,
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        num_device_ooms=num_ooms,
    )


def _resident() -> tuple[int, int]:
    """Resident bytes, and those of them that no other process has."""
    global _shared
    process = psutil.Process()
    start = time.monotonic()
    if start < _shared.until and _shared.pid == os.getpid():
        # what a process adds is its own, so what it shares is as it was
        rss = int(process.memory_info().rss)
        return rss, max(0, rss - _shared.num_bytes)
    memory = process.memory_full_info()
    end = time.monotonic()
    rss = int(memory.rss)
    private = min(rss, int(getattr(memory, "uss", rss)))  # no uss where the kernel can't tell
    _shared = _Shared(os.getpid(), end + (end - start) / MAX_SHARE, rss - private)
    return rss, private


def _malloc() -> tuple[int | None, int | None]:
    """Bytes that malloc has handed out, and bytes that it holds free."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None, None
    info = mallinfo()
    return info.uordblks + info.hblkhd, info.fordblks


@cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    """glibc's ``mallinfo2``, which 2.33 brought. None where another malloc serves: glibc's would say 0 then."""
    if sys.platform != "linux" or malloc_in_use() != "glibc":
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return None
    function.argtypes = []
    function.restype = _MallocInfo
    return function  # type: ignore[no-any-return]


def _device() -> tuple[int | None, int | None, int | None]:
    """Allocated and reserved bytes of the current GPU, and out-of-memory errors; only where CUDA is in use already."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None, None
    stats = torch.cuda.memory_stats()
    return (
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("num_ooms", 0),
    )
