"""TP703."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import BatchSeen, Finding


class CannotBeBatched(Rule[BatchSeen]):
    """The model raises an error when it is given more than one row.

    ## Why it matters
    Requests run one at a time. The answers are right, and under load the throughput that a batch would bring is not
    there. It is worth a change only where the traffic needs it.

    ## How it is detected
    Several rows of equal size are stacked along a new first dim and run as one forward. The rule reports the first
    line of the error that this raised.

    ## Example
    ```python
    def forward(self, x):
        return self.linear(x.view(1, 16))
    ```

    ## Use instead
    ```python
    def forward(self, x):
        return self.linear(x.flatten(1))
    ```

    ## Fix
    Keep the first dim free: `flatten(1)` or `view(x.shape[0], -1)` in place of a written-out size, tensor
    operations in place of `.item()` and `if` on a value. A saved model with a batch size of 1 has to be exported
    again with that dim dynamic.

    ## Sources
    - PyTorch docs, `torch.export.export`: `dynamic_shapes`.
    """

    code = "TP703"
    name = "cannot-be-batched"
    severity = "info"
    observes = BatchSeen

    def judge(self, seen: BatchSeen) -> Iterable[Finding]:
        if seen.error:
            yield self.finding(
                seen.target,
                f"takes no batch of {seen.batch_size}, so requests run one at a time: {seen.error}",
                evidence={"batch_size": seen.batch_size, "error": seen.error},
                fix="keep the first dim free in forward",
            )
