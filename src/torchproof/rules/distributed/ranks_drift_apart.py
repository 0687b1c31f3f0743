"""TP406."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import count, some
from torchproof.types import Finding
from torchproof.types.rehearsal import WeightsSeen


class RanksDriftApart(Rule[WeightsSeen]):
    """After a few steps the parameters are others on each rank, so each one trains a model of its own.

    ## Why it matters
    Nothing raises, and the loss goes down on every rank. But each rank learns from its own share of the data only, and
    the checkpoint is the model of one of them: four GPUs do the work of one.

    ## How it is detected
    Both ranks take a few steps as in training, on their own samples, with dropout and augmentation as they are. Then
    their parameters are compared bit for bit: the same start, the same averaged gradients and the same optimizer give
    the same bits. Buffers are left out, as running statistics differ between ranks by right.

    ## Example
    ```python
    def loss(self, model, batch):
        return self.net(batch).mean()  # DDP's forward is not called, so gradients are never averaged
    ```

    ## Use instead
    ```python
    def loss(self, model, batch):
        return model(batch).mean()
    ```

    ## Fix
    Call the `model` that `loss` is given. Don't change parameters or gradients by numbers that a rank has alone.

    ## Sources
    - PyTorch docs, `DistributedDataParallel`: gradients are averaged in the backward of its own forward.
    - Measured, two processes: DDP's parameters are the same to the bit, and a change of 1e-3 in one weight shows.
    """

    code = "TP406"
    name = "ranks-drift-apart"
    severity = "error"
    observes = WeightsSeen

    def judge(self, seen: WeightsSeen) -> Iterable[Finding]:
        if seen.num_steps <= 0 or not seen.different:
            return
        yield self.finding(
            seen.target,
            f"after {count(seen.num_steps, 'step')} {len(seen.different)} of {seen.num_tensors} parameters are "
            f"others on each rank: {some(seen.different)}",
            evidence={
                "first": seen.different[0],
                "num_different": len(seen.different),
                "num_parameters": seen.num_tensors,
                "num_steps": seen.num_steps,
            },
            fix="call the model that loss() is given, not one that the recipe has kept",
        )
