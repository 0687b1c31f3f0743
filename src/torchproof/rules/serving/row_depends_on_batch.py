"""TP701."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import exceeds
from torchproof.rules.wording import of_largest, ratio
from torchproof.types import BatchSeen, Finding


class RowDependsOnBatch(Rule[BatchSeen]):
    """A request's answer changes with the other requests in its batch.

    ## Why it matters
    A server that batches puts strangers' requests together. Where rows influence one another, an answer depends on
    who else asked in the same millisecond, and one client's data shows in another's answer. torchproof then serves
    one request at a time; a server that doesn't check would batch.

    ## How it is detected
    One row is run alone and as part of a batch, in float64 where the model runs in it, so that rounding can't hide
    or fake the effect. The rule reports a difference above what rounding explains in that precision.

    ## Example
    ```python
    def forward(self, x):
        return self.linear(x).softmax(0)
    ```

    ## Use instead
    ```python
    def forward(self, x):
        return self.linear(x).softmax(-1)
    ```

    ## Fix
    Look for a reduction or a softmax over dim 0, and for batch norm with `track_running_stats=False`, which has no
    stored statistics and uses the batch's in eval mode too.

    ## Sources
    - PyTorch docs, "Numerical accuracy", section "Batched computations or slice computations": a batch may round
      differently, hence a threshold above 0.
    - PyTorch docs, `torch.nn.BatchNorm2d`: `track_running_stats`.
    - Measured in float64: 1e-15 of the largest output for independent rows; 0.17 for untracked batch norm and 0.93
      for a softmax over the batch.
    """

    code = "TP701"
    name = "row-depends-on-batch"
    severity = "warning"
    observes = BatchSeen

    def judge(self, seen: BatchSeen) -> Iterable[Finding]:
        if not seen.error and exceeds(seen.row_diff, seen.threshold):
            yield self.finding(
                seen.target,
                f"a row of {seen.output} alone and in a batch of {seen.batch_size} differs by "
                f"{of_largest(seen.row_diff)}; rounding explains {ratio(seen.threshold)} in {seen.precision}",
                evidence={
                    "row_diff": seen.row_diff,
                    "threshold": seen.threshold,
                    "batch_size": seen.batch_size,
                    "output": seen.output,
                    "precision": seen.precision,
                },
                fix="remove what mixes rows: a reduction over dim 0, batch norm without running statistics",
            )
