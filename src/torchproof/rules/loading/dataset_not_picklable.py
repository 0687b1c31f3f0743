"""TP503."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import Finding
from torchproof.types.loading import PickleSeen


class DatasetNotPicklable(Rule[PickleSeen]):
    """The dataset can't be sent to a worker, because it can't be pickled.

    ## Why it matters
    With the start methods `spawn` and `forkserver` a worker begins as an empty process and gets the dataset by pickle.
    One that holds a lambda, a lock, an open file or a database connection ends the training at its first batch, and
    the machine where it was written, which forks, never shows it.

    ## How it is detected
    Where workers are started with another method than `fork`, the dataset and `collate` are pickled as a loader
    does, into nothing. With `fork` nothing is pickled, and nothing is reported.

    ## Example
    ```python
    class Rows(Dataset):
        def __init__(self, path):
            self.scale = lambda row: row / 255
    ```

    ## Use instead
    ```python
    def scale(row):
        return row / 255


    class Rows(Dataset):
        def __init__(self, path):
            self.scale = scale
    ```

    ## Fix
    Name functions at the top of a module in place of lambdas. Open files and connections in `__getitem__`, at the first
    call of each worker, and leave them out in `__getstate__`.

    ## Sources
    - PyTorch docs, `torch.utils.data`, section "Platform-specific behaviors".
    - PyTorch issue 139792: the start method of workers, and what has to be pickled.
    """

    code = "TP503"
    name = "dataset-not-picklable"
    severity = "warning"
    observes = PickleSeen

    def judge(self, seen: PickleSeen) -> Iterable[Finding]:
        if seen.error and seen.start_method != "fork":
            yield self.finding(
                seen.target,
                f"workers are started with {seen.start_method} here and need the dataset pickled, which raises "
                f"{seen.error}",
                evidence={"start_method": seen.start_method, "error": seen.error},
                fix="replace lambdas by functions of a module, and open files in __getitem__",
            )
