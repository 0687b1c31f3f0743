"""TP403."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import Finding
from torchproof.types.rehearsal import SamplesSeen


class DataDiffersByRank(Rule[SamplesSeen]):
    """An index of the dataset is another sample on each rank, so ranks share some samples and never see others.

    ## Why it matters
    Ranks share out the indices of one dataset. Where each rank has shuffled or split its data in its own way, some
    samples are seen twice in an epoch and others never, a run can't be repeated, and samples of `eval_data` on
    one rank are trained on by another: the metrics look better than they are.

    ## How it is detected
    Each rank reads the same indices with the same random numbers, twice, and the content is compared across ranks.
    Only parts of a sample that are the same at the second reading count, so random augmentation is no finding. Neither
    are equal samples under different indices. Where some part that varies, such as the label, agrees at every index,
    and no rank has under one index what another has under another, it is a warning: the samples may be the same ones,
    with random numbers that each rank drew for itself once.

    ## Example
    ```python
    def train_data(self):
        files = list(set(self.files))  # in another order in each process
        random.shuffle(files)  # and Python's generator starts elsewhere in each process
        return Images(files)
    ```

    ## Use instead
    ```python
    def train_data(self):
        files = sorted(set(self.files))
        random.Random(self.seed).shuffle(files)
        return Images(files)
    ```

    ## Fix
    Sort what comes from a set or a folder, and shuffle and split with a generator that has a fixed seed. Don't take a
    rank's share in `train_data`: torchproof does that.

    ## Sources
    - PyTorch docs, `torch.utils.data.random_split` and its `generator`.
    - Measured, two processes: the generators of Python, numpy and torch start elsewhere in each one where no seed was
      set, and a set of strings has another order.
    """

    code = "TP403"
    name = "data-differs-by-rank"
    severity = "error"
    observes = SamplesSeen

    def judge(self, seen: SamplesSeen) -> Iterable[Finding]:
        if seen.num_different <= 0:
            return
        is_part = seen.num_agreeing_parts > 0 and seen.num_elsewhere <= 0
        elsewhere = f"; {seen.num_elsewhere} of them are there under another index" if seen.num_elsewhere > 0 else ""
        yield self.finding(
            seen.target,
            f"{seen.data}() is not the same on each rank: {seen.num_different} of {seen.num_comparable} indices give "
            f"{'another value in a part of the sample' if is_part else 'another sample'}, the first is {seen.index}"
            f"{elsewhere}",
            evidence={
                "data": seen.data,
                "num_different": seen.num_different,
                "num_comparable": seen.num_comparable,
                "num_agreeing_parts": seen.num_agreeing_parts,
                "num_elsewhere": seen.num_elsewhere,
                "index": seen.index,
            },
            fix="sort what comes from a set or a folder, and shuffle and split with a seeded generator",
            severity="warning" if is_part else None,
        )
