"""TP401."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import Finding
from torchproof.types.rehearsal import GradientsSeen


class UnusedParameters(Rule[GradientsSeen]):
    """A parameter that requires a gradient gets none from `loss`, which ends DDP at its second step.

    ## Why it matters
    DDP waits for the gradient of every parameter, as it doesn't know which ones a batch uses. One that gets none,
    even in a single step on a single rank, ends the run at the step after: "Expected to have finished reduction in
    the prior iteration". On one process nothing is to be seen: the parameter just never learns.

    ## How it is detected
    `loss` and `backward` run on a few batches on each rank, and the parameters whose `grad` is still None are
    named. One that is used in some of them is reported, too: DDP needs each of them in each step. Parameters with
    `requires_grad=False` are no part of it.

    ## Example
    ```python
    def forward(self, x):
        return self.decoder(self.encoder(x))  # self.pooler is there, and nobody calls it
    ```

    ## Use instead
    ```python
    def __init__(self):
        self.pooler.requires_grad_(False)  # or no pooler at all
    ```

    ## Fix
    Remove the parameter, freeze it with `requires_grad_(False)`, or use it. Where only some batches use it, add
    `0.0 * parameter.sum()` to the loss, so that its gradient is zero instead of none.

    ## Sources
    - PyTorch docs, `DistributedDataParallel`, `find_unused_parameters`.
    - PyTorch issue 43259 and 57473: the run ends at its second step.
    - Measured, torch 2.13, gloo, two processes: the error came at step 2.
    """

    code = "TP401"
    name = "unused-parameters"
    severity = "error"
    observes = GradientsSeen

    def judge(self, seen: GradientsSeen) -> Iterable[Finding]:
        missing = [name for name, times in seen.missing.items() if times > 0]
        if not missing:
            return
        sometimes = [name for name in missing if seen.missing[name] < seen.num_batches]
        never = [name for name in missing if name not in sometimes]
        parts = [f"no batch uses {some(never)}"] if never else []
        if sometimes:
            parts.append(f"only some of {seen.num_batches} batches use {some(sometimes)}")
        yield self.finding(
            seen.target,
            f"loss() leaves {count(len(missing), 'parameter')} of {seen.num_parameters} without a gradient, and DDP "
            f"stops at the step after: {'; '.join(parts)}",
            evidence={
                "parameters": ", ".join(missing),
                "num_unused": len(missing),
                "num_parameters": seen.num_parameters,
                "num_batches": seen.num_batches,
            },
            fix="remove them, freeze them with requires_grad_(False), or add 0.0 * parameter.sum() to the loss",
        )
