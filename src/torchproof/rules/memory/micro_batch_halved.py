"""TP202."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count
from torchproof.types import Finding, TrainSeen


class MicroBatchHalved(Rule[TrainSeen]):
    """A training step ran out of memory, and was done in smaller parts.

    ## Why it matters
    The run is right: as many samples make a step as before, their gradients are added up over more forwards. But each
    time the ranks were started again from the last checkpoint, and a device that is full to the brim runs out of memory
    again when sizes vary.

    ## How it is detected
    A rank raised `torch.OutOfMemoryError`, or the CPU's allocator failed. The micro-batch of all ranks was halved, and
    the accumulation raised so that the effective batch stays the same. Reported with the size that was asked for and
    the one that the run ended with.

    ## Example
    ```python
    class Large(tp.Recipe):
        batch_size = 512  # forwarded at once by one process
    ```

    ## Use instead
    ```python
    class Large(tp.Recipe):
        batch_size = 512  # torchproof train ... --micro-batch-size 64: eight forwards to a step
    ```

    ## Fix
    Give the size that worked with `--micro-batch-size`, so that the next run starts with it. For a larger one: FSDP
    over more processes, activation checkpointing or bf16-mixed.

    ## Sources
    - PyTorch docs, "CUDA semantics", section "Memory management".
    - Measured, a loss that is a mean over samples, float32 on a CPU: the curves of 14 steps of 16 samples, forwarded at
      once, 5 at a time and one at a time, agree to 2e-7, as each part is weighted by its share of the samples.
    """

    code = "TP202"
    name = "micro-batch-halved"
    severity = "warning"
    observes = TrainSeen

    def judge(self, seen: TrainSeen) -> Iterable[Finding]:
        if seen.micro_batch_size < seen.micro_batch_asked:
            yield self.finding(
                seen.target,
                f"forwarding {count(seen.micro_batch_asked, 'sample')} at once did not fit in memory; the run went on "
                f"with {seen.micro_batch_size}, and still {seen.batch_size} to a step",
                evidence={
                    "micro_batch_asked": seen.micro_batch_asked,
                    "micro_batch_size": seen.micro_batch_size,
                    "batch_size": seen.batch_size,
                    "world_size": seen.world_size,
                },
                fix=f"start with --micro-batch-size {seen.micro_batch_size}",
            )
