"""TP104."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import answers_differ
from torchproof.rules.wording import of_largest, some
from torchproof.types import Finding, ModesSeen


class BuffersMutatedByForward(Rule[ModesSeen]):
    """A forward changes the model's buffers in eval mode.

    ## Why it matters
    A buffer that requests change makes an answer depend on the requests before it, and on which replica gave it.
    It is lost at a restart, and an exported model may freeze it at its first value. A counter alone is harmless to
    the answer, so it is a warning; where equal requests were seen to differ it is an error.

    ## How it is detected
    All buffers are compared before and after forwards in eval mode and inference mode. Buffers that change only in
    training mode (batch norm's running statistics) belong to TP101. A cache that only the first forward makes, or
    enlarges for a larger request, is not reported.

    ## Example
    ```python
    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)
    ```

    ## Use instead
    ```python
    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)
    ```

    ## Fix
    Change the buffer only while `self.training` is True. Carry a cache through the model's inputs and outputs, and
    count requests outside the model.

    ## Sources
    - PyTorch docs, `torch.nn.Module.register_buffer`: buffers are part of the module's state.
    - Measured: a running mean updated in eval mode moved the answer to an equal request by 0.18 to 0.31 of the
      largest output within 4 requests.
    """

    code = "TP104"
    name = "buffers-mutated-by-forward"
    severity = "warning"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        if not seen.mutated_buffers:
            return
        shown = not seen.uses_rng and answers_differ(seen.repeat_diff, seen)
        effect = (
            f"equal requests differ by {of_largest(seen.repeat_diff)}"
            if shown
            else "an answer can depend on the requests before it"
        )
        yield self.finding(
            seen.target,
            f"each forward changes {some(seen.mutated_buffers)} in eval mode; {effect}",
            evidence={
                "buffers": ", ".join(seen.mutated_buffers),
                "num_buffers": len(seen.mutated_buffers),
                "repeat_diff": seen.repeat_diff,
            },
            fix="change the buffers only while self.training is True",
            severity="error" if shown else None,
        )
