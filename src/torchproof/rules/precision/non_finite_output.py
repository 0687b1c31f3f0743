"""TP601."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import Finding, ModesSeen


class NonFiniteOutput(Rule[ModesSeen]):
    """An output holds NaN or infinite values for one of the sampled requests.

    ## Why it matters
    NaN reaches the client as an answer or breaks its JSON, and no candidate can be compared with it: NaN differs
    from NaN. Where the cause is an overflow, float16 reaches it sooner.

    ## How it is detected
    The smallest, the median and the largest of the sampled requests are run in eval mode and inference mode, and
    their outputs are searched for NaN and infinity. Large but finite values are not reported.

    ## Example
    ```python
    def forward(self, x):
        return self.linear(x).softmax(-1).log()
    ```

    ## Use instead
    ```python
    def forward(self, x):
        return self.linear(x).log_softmax(-1)
    ```

    ## Fix
    Find the first operation that leaves the finite range: `log` of 0, division by 0, `exp` of a large value, a
    softmax over a row that is masked out as a whole. Use the stable form, or clamp its input. Where infinity is
    meant (a mask), keep it inside the model.

    ## Sources
    - PyTorch docs, "Numerical accuracy", section "Extremal values".
    - float16 ends at 65504; bfloat16 and float32 end at 3.4e38 (`torch.finfo`).
    """

    code = "TP601"
    name = "non-finite-output"
    severity = "error"
    observes = ModesSeen

    def judge(self, seen: ModesSeen) -> Iterable[Finding]:
        if seen.non_finite_outputs:
            yield self.finding(
                seen.target,
                f"NaN or infinite values in {some(seen.non_finite_outputs)}, among "
                f"{count(seen.num_samples, 'sampled request')}",
                evidence={"outputs": ", ".join(seen.non_finite_outputs), "num_samples": seen.num_samples},
                fix="find the first operation that leaves the finite range, and use its stable form",
            )
