"""TP105."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import answers_differ
from torchproof.rules.wording import of_largest
from torchproof.types import Finding, ModesSeen


class NondeterministicOutput(Rule[ModesSeen]):
    """Equal requests get different answers, without random numbers from torch and without changed buffers.

    ## Why it matters
    Something outside the model's declared state reaches the answer: a tensor kept in a plain attribute, numpy's
    random numbers, the clock, uninitialised memory or a race. A reference answer can't be compared with anything,
    and an incident can't be reproduced.

    ## How it is detected
    The same request is run several times in eval mode and inference mode. The rule reports answers that differ by
    more than rounding while torch's random number generator and all buffers stayed as they were. The other causes
    have their own rules, TP102 and TP104.

    ## Example
    ```python
    def forward(self, x):
        y = self.linear(x) if self.last is None else 0.9 * self.last + 0.1 * self.linear(x)
        self.last = y
        return y
    ```

    ## Use instead
    ```python
    def forward(self, x, last):
        return 0.9 * last + 0.1 * self.linear(x)
    ```

    ## Fix
    Pass state in as an input and out as an output. Fill memory from `torch.empty` before it is read. Where a kernel
    is the cause, `torch.use_deterministic_algorithms(True)` raises an error that names it.

    ## Sources
    - PyTorch docs, "Reproducibility"; `torch.use_deterministic_algorithms`.
    - Threshold 1e-5, relative to the largest output. Measured: rounding alone gives 1e-7 to 1e-6 in float32.
    """

    code = "TP105"
    name = "nondeterministic-output"
    severity = "error"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        if seen.uses_rng or seen.mutated_buffers or not answers_differ(seen.repeat_diff, seen):
            return
        yield self.finding(
            seen.target,
            f"equal requests differ by {of_largest(seen.repeat_diff)}, "
            "with no random numbers drawn from torch and no buffer changed",
            evidence={"repeat_diff": seen.repeat_diff, "uses_rng": False, "num_mutated_buffers": 0},
            fix="look for a tensor kept in an attribute, numpy's random numbers or memory read before it is written",
        )
