"""TP501."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count
from torchproof.types import Finding
from torchproof.types.loading import SharedMemorySeen


class SharedMemoryTooSmall(Rule[SharedMemorySeen]):
    """`/dev/shm` can't hold the batches that workers have on their way.

    ## Why it matters
    Workers hand batches over in shared memory. A container has 64 MiB of it by default, whatever the machine has. Where
    it is full, training ends in the middle of an epoch: `unable to allocate shared memory(shm)`, or a bus error in a
    worker.

    ## How it is detected
    The bytes of a real batch are counted, in whole pages for each tensor. Each worker has `prefetch_factor` batches on
    their way, and one more is trained on: `(num_workers * prefetch_factor + 1) * batch bytes` has to be free. Reported
    for the setting that should be fastest; `tune` never chooses one that doesn't fit.

    ## Example
    ```python
    loader = DataLoader(images, batch_size=64, num_workers=8, prefetch_factor=4)  # 33 batches of 37 MiB
    ```

    ## Use instead
    ```python
    loader = DataLoader(images, batch_size=64, num_workers=2, prefetch_factor=2)  # 5 batches of 37 MiB
    ```

    ## Fix
    Give the container more: `docker run --shm-size=8g`, or in Kubernetes an `emptyDir` of medium `Memory` at
    `/dev/shm`. Else take fewer workers, a smaller `prefetch_factor`, or send smaller samples: `uint8` images that the
    training process converts take a quarter of `float32` ones.

    ## Sources
    - PyTorch issue 5040: bus errors of workers in containers.
    - Measured on torch 2.13: peaks of 3.1, 5.0, 9.0, 9.0 and 3.0 batches where the formula says 3, 5, 9, 9 and 3. With
      64 MiB of `/dev/shm` a need of 40 MiB passed, 80 and 120 MiB ended with the error above.
    """

    code = "TP501"
    name = "shared-memory-too-small"
    severity = "warning"
    observes = SharedMemorySeen

    def judge(self, seen: SharedMemorySeen) -> Iterable[Finding]:
        num_batches = seen.num_workers * seen.prefetch_factor + 1 if seen.num_workers else 0
        needed = num_batches * seen.batch_bytes
        if needed > seen.free_bytes:
            yield self.finding(
                seen.target,
                f"the fastest setting should be {count(seen.num_workers, 'worker')} with prefetch_factor "
                f"{seen.prefetch_factor}, but its {num_batches} batches need {_mib(needed)} MiB of /dev/shm; "
                f"{_mib(seen.free_bytes)} MiB are free",
                evidence={
                    "num_workers": seen.num_workers,
                    "prefetch_factor": seen.prefetch_factor,
                    "batch_bytes": seen.batch_bytes,
                    "needed_bytes": needed,
                    "free_bytes": seen.free_bytes,
                    "size_bytes": seen.size_bytes,
                },
                fix=f"make /dev/shm larger: docker run --shm-size={-(-needed * 2 // 2**30)}g, and measure again",
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
