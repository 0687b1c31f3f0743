"""TP102."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import answers_differ
from torchproof.rules.wording import of_largest
from torchproof.types import Finding, ModesSeen


class RandomInEvalMode(Rule[ModesSeen]):
    """Equal requests get different answers in eval mode, and the model draws random numbers.

    ## Why it matters
    `eval()` switches modules off, not functions: `torch.nn.functional.dropout` has `training=True` as its default
    and keeps dropping. Every answer carries noise, and no candidate can be compared with a reference.

    ## How it is detected
    The same request is run several times in eval mode and inference mode. The rule reports answers that differ by
    more than rounding while a forward moved the state of torch's random number generator. Random numbers that do
    not reach the answer are not reported.

    ## Example
    ```python
    def forward(self, x):
        return F.dropout(self.linear(x), 0.1)
    ```

    ## Use instead
    ```python
    def forward(self, x):
        return F.dropout(self.linear(x), 0.1, training=self.training)
    ```

    ## Fix
    Pass `training=self.training`, or use the module `nn.Dropout`. Where sampling is the purpose, return the
    distribution from the model and sample in `decode`, with a generator seeded by the request.

    ## Sources
    - PyTorch docs, `torch.nn.functional.dropout`: `training` is True by default.
    - Threshold 1e-5, relative to the largest output. Measured: rounding alone gives 1e-7 to 1e-6 in float32.
    """

    code = "TP102"
    name = "random-in-eval-mode"
    severity = "error"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        if seen.uses_rng and answers_differ(seen.repeat_diff, seen):
            yield self.finding(
                seen.target,
                f"draws random numbers in eval mode: equal requests differ by {of_largest(seen.repeat_diff)}",
                evidence={"repeat_diff": seen.repeat_diff, "uses_rng": seen.uses_rng},
                fix="pass training=self.training to F.dropout; move sampling out of the model",
            )
