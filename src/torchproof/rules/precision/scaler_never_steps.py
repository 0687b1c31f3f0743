"""TP603."""

from collections.abc import Iterable

from torchproof.rules.base import Rule, of_candidate
from torchproof.types import Finding, ScalerSeen

# From the scaler's first value, 65536, sixteen skips lead to 1, where gradients are as they are without a scaler.
# Twenty in a row divide it by a million: what still overflows is no matter of the scale.
MIN_STEPS = 20


class ScalerNeverSteps(Rule[ScalerSeen]):
    """The gradient scaler skips every step, so the model isn't trained any more.

    ## Why it matters
    Where gradients aren't finite, the scaler skips the step and halves its scale. That is meant to happen a few times
    at the start. Where no scale helps, it goes on for ever: the loss is printed, the scheduler goes on, the weights
    stay as they are, and torch says nothing.

    ## How it is detected
    The steps that the scaler skipped are counted by its scale, which is halved by a skip and by nothing else. The
    last 20 steps or more, in a row, have to be skipped. A scaler that skips its first steps and then steps is as it
    should be.

    ## Example
    ```python
    loss = (model(x) - y).pow(2).sum() / 0.0
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    ```

    ## Use instead
    ```python
    loss = (model(x) - y).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    ```

    ## Fix
    Train in bf16-mixed, which needs no scaler. Or find what isn't finite: TP602 names operations that are too large for
    float16. Where 32-true isn't finite either, it is no matter of the precision: look at the data and the loss.

    ## Sources
    - PyTorch docs, "Automatic Mixed Precision package", section "Gradient Scaling": a first scale of 65536, halved by
      each skip, doubled after 2,000 steps.
    - Measured, a loss divided by 0: 65536 to 0.002 in 25 steps, no weight changed and no warning; a loss times
      100,000, whose gradients do fit: 15 skips to 2, then 10 steps.
    - Threshold: 20 skips divide the scale by a million; 16 lead from the first scale to 1.
    """

    code = "TP603"
    name = "scaler-never-steps"
    severity = "error"
    observes = ScalerSeen

    def judge(self, seen: ScalerSeen) -> Iterable[Finding]:
        if seen.num_skipped_last < MIN_STEPS:
            return
        never = seen.num_skipped_last == seen.num_steps
        which = f"all {seen.num_steps:,} steps" if never else f"the last {seen.num_skipped_last:,} steps"
        yield self.finding(
            of_candidate(seen.target, seen.run),
            f"the scaler skipped {which}, and its scale went from {seen.first_scale:g} to {seen.last_scale:.2g}: "
            f"{'nothing was trained' if never else 'nothing is trained any more'}",
            evidence={
                "num_steps": seen.num_steps,
                "num_skipped": seen.num_skipped,
                "num_skipped_last": seen.num_skipped_last,
                "first_scale": seen.first_scale,
                "last_scale": seen.last_scale,
            },
            fix="train in bf16-mixed, or find what is not finite: it is no matter of the scale",
        )
