"""TP201."""

import math
from collections.abc import Iterable

from torchproof.rules.base import Rule, of_candidate
from torchproof.types import Finding, Growth, MemorySeen

# 100 MB in a million requests, a day of 12 a second. Less outlives no deployment.
MIN_BYTES_PER_REQUEST = 100
# In all. Memory comes in steps: a huge page of the kernel has 2 MiB, an arena of Python 1 MiB. A few are no growth.
MIN_GROWTH_BYTES = 8 * 2**20
MIN_SAMPLES = 48  # two to each of the 24 blocks
# After 2,500 that warmed up. oneDNN keeps 1,024 kernels, one or a few for each size; a cache of that many is full.
MIN_REQUESTS = 7_500
# The slope of the second half by the first's. A cache that fills exponentially is below it once the life is 0.6 times
# as long as the cache's constant; a leak varies by less where its bounds are above 0.
STILL_GROWING = 0.8
DAY_S = 24 * 3600

# What each kind says of the growth, and what cures it.
KINDS = {
    "kept": (
        "what malloc has handed out grows, so something keeps what requests made: a list, a cache that isn't full",
        "keep .item() or a detached copy, give caches a size, and pad inputs to a few sizes",
    ),
    "held": (
        "what is in use stays, and what malloc holds free grows: its arenas are fragmented",
        "set MALLOC_ARENA_MAX=2 or preload jemalloc, and restart; pad inputs to a few sizes",
    ),
    "mapped": (
        "malloc's part stays as it is, so it is small Python objects or memory that a library maps itself",
        "look for a list or dict that each request adds to; sys.getallocatedblocks() counts Python's objects",
    ),
    "unknown": (
        "whether something keeps it or malloc holds it free can't be told here",
        "look for a list, a dict or a cache without a limit that each request adds to",
    ),
    "device-kept": (
        "tensors on the device are kept",
        "keep .item() or a copy on the CPU, give caches a size, and drop exceptions that hold frames",
    ),
    "device-held": (
        "what is allocated stays, and what the caching allocator reserves grows: it is fragmented",
        "set PYTORCH_ALLOC_CONF=expandable_segments:True, or pad inputs to a few sizes",
    ),
}


class ReplicaMemoryGrows(Rule[MemorySeen]):
    """A replica's memory grows with the requests that it answers, and doesn't slow down.

    ## Why it matters
    The replica ends when the machine or the cgroup has no memory left, with the requests that it was answering. That
    comes after hours or days, when nobody looks, and each restart hides it for as long again.

    ## How it is detected
    The memory of a replica is looked at between forwards, with the number of requests it has answered, and judged
    from 10,000 requests on. The first quarter is left out as warm-up; of the rest, the lowest values of 24 blocks are
    judged by the median slope of all pairs and its interval, which assumes nothing about the noise. The slope has to
    be above 100 bytes for each request, above 0 in each half by itself, and in the second half at least 0.8 of the
    first: a cache that fills up slows down. What malloc has in use, what it holds free and what is resident tell
    the kinds apart. Two judgments in a row, the second over a quarter more requests, have to find it.

    ## Example
    ```python
    def decode(self, outputs, request):
        self.total = self.total + outputs["loss"]  # a tensor of each request, or its graph, lives on
        self.seen[request["text"]] = outputs
        return outputs
    ```

    ## Use instead
    ```python
    def decode(self, outputs, request):
        self.total += outputs["loss"].item()
        return outputs
    ```

    ## Fix
    Where blocks in use grow, keep `.item()` in place of tensors, bound caches, and drop caught exceptions: they hold
    the frames that they passed through. Where it grows with each new size, pad inputs to a few sizes: kernels are
    cached for each one. Where free memory grows, take `MALLOC_ARENA_MAX=2`, `MALLOC_MMAP_THRESHOLD_=131072` or
    jemalloc. On a device whose reserved memory grows, take `expandable_segments:True`. A cache that is still far
    from full can't be told from one without a limit: where it has one, this goes away by itself.

    ## Sources
    - Measured, MiB resident over 200 to 400 requests: outputs kept with their graph 299 to 1,294; bfloat16 encoder
      with 249 sizes 242 to 869, of which 553 more in use; 16 threads 245 to 521, of which 239 more held free, and
      310 with one arena.
    - Threshold: 100 bytes for each request are 100 MB in a million requests, a day of 12 a second. What takes
      longer to matter is outlived by the next deployment.
    - PyTorch docs, "CUDA semantics", section "Optimizing memory usage with PYTORCH_ALLOC_CONF".
    """

    code = "TP201"
    name = "replica-memory-grows"
    severity = "warning"
    observes = MemorySeen

    def judge(self, seen: MemorySeen) -> Iterable[Finding]:
        for kind, growth in _kinds(seen):
            cause, cure = KINDS[kind]
            where = "the memory on the device" if kind.startswith("device") else "memory"
            per_day = growth.slope * seen.num_requests / seen.seconds * DAY_S
            yield self.finding(
                of_candidate(seen.target, f"replica {seen.replica}"),
                f"{where} grows by {_mib(growth.slope * 1000)} MiB [{_mib(growth.low * 1000)}, "
                f"{_mib(growth.high * 1000)}] for each 1,000 requests, over {seen.num_requests:,} of them and "
                f"without slowing down, {_mib(per_day)} MiB a day at this rate; {cause}",
                evidence={
                    "kind": kind,
                    "bytes_per_request": growth.slope,
                    "low": growth.low,
                    "high": growth.high,
                    "first_half": growth.first,
                    "second_half": growth.second,
                    "num_requests": seen.num_requests,
                    "num_samples": seen.num_samples,
                    "seconds": seen.seconds,
                    "num_device_ooms": seen.num_device_ooms,
                },
                fix=cure,
            )


def _kinds(seen: MemorySeen) -> Iterable[tuple[str, Growth]]:
    """The kind of growth in the process and the one on the device, where there is one."""

    def grows(growth: Growth | None) -> bool:
        return (
            growth is not None
            and growth.low > MIN_BYTES_PER_REQUEST
            and growth.slope * seen.num_requests > MIN_GROWTH_BYTES
            and growth.first_low > 0
            and growth.second_low > 0
            and growth.second >= STILL_GROWING * growth.first
        )

    if seen.num_samples < MIN_SAMPLES or seen.num_requests < MIN_REQUESTS or not seen.seconds > 0:
        return
    if seen.in_use is not None and grows(seen.in_use):
        yield "kept", seen.in_use
    # Private alone: forked processes stop sharing pages, which ends when none is left. Resident alone: pages of files.
    elif grows(seen.private) and grows(seen.resident):
        least = min(seen.private, seen.resident, key=lambda growth: growth.slope)
        yield _kind(seen, least, held=grows(seen.free)), least
    if seen.device_allocated is not None and grows(seen.device_allocated):
        yield "device-kept", seen.device_allocated
    elif seen.device_reserved is not None and grows(seen.device_reserved):
        yield "device-held", seen.device_reserved


def _kind(seen: MemorySeen, growth: Growth, *, held: bool) -> str:
    """Where malloc hasn't handed it out: whether it holds it, or has nothing to do with it. At least half tells."""
    if seen.in_use is None or seen.free is None:
        return "unknown"
    if held and seen.free.slope > growth.slope / 2:
        return "held"
    return "mapped" if seen.in_use.high + seen.free.high < growth.slope / 2 else "unknown"


def _mib(num_bytes: float) -> str:
    """``0.095``, ``1.98``, ``1,240``: at least two digits, and all that stand before the point."""
    value = num_bytes / 2**20
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.2g}"
