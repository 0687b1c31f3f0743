"""TP610."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import Finding, TrainSeen


class NonFiniteLoss(Rule[TrainSeen]):
    """A training run had losses, or ended with metrics, that are NaN or infinite.

    ## Why it matters
    In 32-true and bf16-mixed one NaN loss makes every weight NaN, and the rest of the run is for nothing. In 16-mixed
    the scaler skips the step where gradients overflowed; a loss that is not finite shows that the forward did.

    ## How it is detected
    The mean loss over the samples of each step, and the metrics of the last evaluation, are looked at. A run that was
    finite again at its last step is a warning, one that was not an error.

    ## Example
    ```python
    def loss(self, model, batch):
        x, y = batch
        return -(model(x).softmax(-1).log()[range(len(y)), y]).mean()
    ```

    ## Use instead
    ```python
    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y)
    ```

    ## Fix
    Look at the first of the steps: which samples, which operation. `torch.autograd.set_detect_anomaly(True)` names the
    operation of a NaN gradient. Use the stable form, a smaller learning rate, a warm-up, `max_grad_norm`; in 16-mixed
    an `--fp32-module` for the module that overflows.

    ## Sources
    - PyTorch docs, "Numerical accuracy", section "Extremal values".
    - float16 ends at 65504; bfloat16 and float32 end at 3.4e38 (`torch.finfo`).
    """

    code = "TP610"
    name = "non-finite-loss"
    severity = "error"
    observes = TrainSeen

    def judge(self, seen: TrainSeen) -> Iterable[Finding]:
        steps, metrics = seen.non_finite_steps, seen.non_finite_metrics
        evidence: dict[str, float | int | str | bool]
        evidence = {"steps": len(steps), "num_steps": seen.num_steps, "metrics": ", ".join(metrics)}
        if steps:
            at_the_end = steps[-1] == seen.num_steps
            yield self.finding(
                seen.target,
                f"the loss was not finite in {len(steps)} of {count(seen.num_steps, 'step')}, first in step {steps[0]}",
                evidence=evidence,
                fix="look at the samples and the operations of that step",
                severity="error" if at_the_end or metrics else "warning",
            )
        elif metrics:
            yield self.finding(
                seen.target,
                f"the last evaluation gave no finite {some(metrics)}, though every loss was finite",
                evidence=evidence,
                fix="look at metrics(): a mean over nothing, a division by 0, a log of 0",
            )
