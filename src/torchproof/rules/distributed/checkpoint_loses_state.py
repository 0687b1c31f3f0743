"""TP407."""

import math
from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import ratio, some
from torchproof.types import Finding
from torchproof.types.rehearsal import ResumeSeen

# Of the largest change that the step makes. State that is lost shows in the tenths; rounding is left out before.
MIN_STEP_DIFF = 1e-3


class CheckpointLosesState(Rule[ResumeSeen]):
    """A run that goes on from a checkpoint takes another step than one that was not interrupted.

    ## Why it matters
    Long runs are interrupted: machines are taken away, processes run out of memory. State that no checkpoint holds
    starts again each time, without a word: a warm-up begins anew, an average forgets, a curve has a dent.

    ## How it is detected
    After a few steps a checkpoint is saved. Two processes go on for one step; two fresh ones load the checkpoint and
    take the same step on the same samples. The rule reports stored values that are others after loading, and
    parameters that are others after the step by more than rounding. The latter only where a second pair of fresh
    processes agrees with the first: a step that is random in itself proves nothing. State that changes no parameter,
    such as a counter for logging, is no finding.

    ## Example
    ```python
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()  # a plain attribute: in no state_dict
        return self.net(x - self.mean)
    ```

    ## Use instead
    ```python
    def __init__(self):
        self.register_buffer("mean", torch.zeros(()))  # and in forward: self.mean.copy_(...)
    ```

    ## Fix
    Keep state of a module in a buffer, that of an optimizer in `self.state[parameter]` or `param_groups`, that of a
    scheduler in what its `state_dict` returns. Where the recipe itself counts, derive the count from the optimizer's.

    ## Sources
    - PyTorch docs, `Module.register_buffer`, `Optimizer.state_dict`.
    - Threshold 1e-3 of the largest change of the step, where a difference is more than rounding (2**-20 of the
      parameter). Measured, AdamW, float32: without lost state the step is the same to the bit.
    """

    code = "TP407"
    name = "checkpoint-loses-state"
    severity = "error"
    observes = ResumeSeen

    def judge(self, seen: ResumeSeen) -> Iterable[Finding]:
        lost = f"; others after loading are {some(seen.attributes)}" if seen.attributes else ""
        if seen.changed:
            message = f"stored values are others after loading, {len(seen.changed)} of {seen.num_stored}: "
            message += some(seen.changed)
        elif loses_state(seen):
            message = f"the step after loading is another one: {seen.parameter} is off by "
            message += f"{ratio(seen.step_diff)} of the largest change of the step{lost}"
        else:
            return
        yield self.finding(
            seen.target,
            message,
            evidence={
                "num_changed": len(seen.changed),
                "num_stored": seen.num_stored,
                "step_diff": seen.step_diff,
                "parameter": seen.parameter,
                "attributes": ", ".join(seen.attributes),
            },
            fix="keep state in buffers, in the optimizer's state and in what the scheduler's state_dict returns",
        )


def loses_state(seen: ResumeSeen) -> bool:
    """Whether the step proves it: another one than without the checkpoint, and the same each time it is loaded."""
    return (
        seen.same_batch
        and math.isfinite(seen.step_diff)
        and seen.step_diff > MIN_STEP_DIFF
        and seen.again_diff is not None
        and seen.again_diff <= MIN_STEP_DIFF
    )
