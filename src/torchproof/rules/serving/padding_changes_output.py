"""TP702."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.thresholds import exceeds
from torchproof.rules.wording import of_largest, ratio
from torchproof.types import Finding, PaddingSeen


class PaddingChangesOutput(Rule[PaddingSeen]):
    """A request's answer changes when its input is padded.

    ## Why it matters
    Requests of different sizes share a batch only after padding. Where padding reaches the answer, it depends on
    the longest request that happened to arrive with it. torchproof then batches equal sizes only.

    ## How it is detected
    One request is run as it is, and with a variable dim padded with the input's pad value, in float64 where the
    model runs in it. The part of the outputs that belongs to the request is compared. The rule reports a
    difference above what rounding explains in that precision.

    ## Example
    ```python
    def forward(self, ids):
        return self.linear(self.embed(ids).mean(1))
    ```

    ## Use instead
    ```python
    def forward(self, ids, mask):
        kept = mask.unsqueeze(-1)
        return self.linear((self.embed(ids) * kept).sum(1) / kept.sum(1))
    ```

    ## Fix
    Give the model a mask and use it in every operation that sees a whole row: pooling, attention, convolution,
    normalisation over the variable dim. Pack sequences for recurrent layers. Give the mask a pad value of 0.

    ## Sources
    - PyTorch docs, `torch.nn.utils.rnn.pack_padded_sequence`; `torch.nn.MultiheadAttention`: `key_padding_mask`.
    - Measured in float64, a length of 7 padded to 16: 0.48 of the largest output for a plain mean, 0 for a masked
      one.
    """

    code = "TP702"
    name = "padding-changes-output"
    severity = "warning"
    observes = PaddingSeen

    def judge(self, seen: PaddingSeen) -> Iterable[Finding]:
        if not seen.error and exceeds(seen.pad_diff, seen.threshold):
            yield self.finding(
                seen.target,
                f"padding {seen.dim} from {seen.size} to {seen.padded_size} moves {seen.output} by "
                f"{of_largest(seen.pad_diff)}; rounding explains {ratio(seen.threshold)} "
                f"in {seen.precision}",
                evidence={
                    "pad_diff": seen.pad_diff,
                    "threshold": seen.threshold,
                    "dim": seen.dim,
                    "size": seen.size,
                    "padded_size": seen.padded_size,
                    "output": seen.output,
                    "precision": seen.precision,
                },
                fix="mask the padding in pooling, attention and normalisation",
            )
