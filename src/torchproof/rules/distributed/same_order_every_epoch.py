"""TP402."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.repeats import ignores_index
from torchproof.types import Finding
from torchproof.types.rehearsal import DrawsSeen


class SameOrderEveryEpoch(Rule[DrawsSeen]):
    """What the dataset gives follows the number of the call and not the index, so every epoch has the same order.

    ## Why it matters
    torchproof shuffles by indices and shares them out to the ranks. A dataset that ignores its index, such as an
    iterator behind `__getitem__`, undoes both: each epoch has the same order, and all ranks and DataLoader workers
    read the same samples, so that two GPUs do the work of one. The loss looks well all the time.

    ## How it is detected
    Two DataLoader workers read some samples, and in a second epoch as many under other indices. The rule reports
    samples that vary, and are the same in both epochs at all places although the index is another one. The global
    random generators are reset before each sample. Equal samples under different indices, and a dataset that permutes
    its indices, are no finding.

    ## Example
    ```python
    def __getitem__(self, index):
        return next(self.lines)
    ```

    ## Use instead
    ```python
    def __getitem__(self, index):
        return self.read_line(self.offsets[index])
    ```

    ## Fix
    Return the sample of the index. Where the data can only be read in its order, write down once where each
    sample begins.

    ## Sources
    - PyTorch docs, `torch.utils.data.Dataset`: `__getitem__` fetches the sample for a given key.
    - PyTorch issue 31771: the same order in every epoch.
    - Threshold 1e-6: the probability that as many samples are equal by chance, from how often two of them are.
    """

    code = "TP402"
    name = "same-order-every-epoch"
    severity = "error"
    observes = DrawsSeen

    def judge(self, seen: DrawsSeen) -> Iterable[Finding]:
        draws = seen.other_index
        if not ignores_index(draws):
            return
        yield self.finding(
            seen.target,
            "train_data() ignores the index, so that every epoch has the same order and ranks see the same samples: "
            f"{draws.num_equal_epochs} of {draws.num_pairs} samples came again in the next epoch under another index",
            evidence={
                "num_pairs": draws.num_pairs,
                "num_equal_epochs": draws.num_equal_epochs,
                "num_equal_workers": draws.num_equal_workers,
                "num_values": draws.num_values,
            },
            fix="make __getitem__ return the sample of its index",
        )
