"""TP404."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import Finding
from torchproof.types.rehearsal import LengthsSeen


class LengthsDifferByRank(Rule[LengthsSeen]):
    """A dataset has another length on each rank, so one rank takes more steps and waits for ever.

    ## Why it matters
    Each step waits for the gradients of all ranks. The rank with more samples waits for one that has ended its
    epoch, until the time-out. The message then names neither the dataset nor the lengths.

    ## How it is detected
    Each rank calls `train_data` and `eval_data`, and the lengths are compared before ranks wait for one another.

    ## Example
    ```python
    def train_data(self):
        return Lines(self.lines[int(os.environ["RANK"]) :: 2])  # 5 lines: 3 on one rank and 2 on the other
    ```

    ## Use instead
    ```python
    def train_data(self):
        return Lines(self.lines)
    ```

    ## Fix
    Return the whole dataset on every rank: torchproof shares out its indices, and no rank runs out. Where samples are
    filtered or split at random, do it with a seeded generator.

    ## Sources
    - PyTorch issue 38174 and 141069: uneven inputs; in the second 1800 s until the time-out.
    - Measured, two processes with 4 and 3 batches: both ended at the time-out, and no message named a cause.
    """

    code = "TP404"
    name = "lengths-differ-by-rank"
    severity = "error"
    observes = LengthsSeen

    def judge(self, seen: LengthsSeen) -> Iterable[Finding]:
        if len(set(seen.lengths)) < 2:
            return
        each = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(seen.lengths))
        yield self.finding(
            seen.target,
            f"{seen.data}() has another length on each rank, so that one waits for ever: {each}",
            evidence={"data": seen.data, "min_length": min(seen.lengths), "max_length": max(seen.lengths)},
            fix="return the same, whole dataset on every rank; torchproof shares it out",
        )
