"""TP502."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.types import Finding
from torchproof.types.loading import WorkerMemorySeen

# 8 MiB for each worker and 100,000 objects: what Python and torch themselves copy is below it, as are small lists.
MIN_COPIED_BYTES = 8 * 2**20
MIN_OBJECTS = 100_000


class DatasetCopiedByWorkers(Rule[WorkerMemorySeen]):
    """Each worker copies the dataset's Python objects as it reads them.

    ## Why it matters
    Workers start with all memory shared with the training process. Reading an element of a list counts a reference to
    it, which is written next to the object, and a page that is written to is copied. During the first epoch the
    memory of each worker grows by the size of the lists: with 8 workers there are 9 copies.

    ## How it is detected
    A real worker reads samples. Then the kernel is asked of each memory page that holds an object of the dataset's
    lists, tuples, dicts and sets whether the worker still shares it (`/proc/PID/pagemap`). Reported from 8 MiB of
    copies on. Nothing else counts: not a cache that a worker fills, and no list that samples never look at. Resident
    memory (RSS) can't tell a copy from a share. Nothing is reported where too few samples could be read to tell, or
    where workers are not forked.

    ## Example
    ```python
    class Images(Dataset):
        def __init__(self, folder):
            self.paths = [str(path) for path in folder.iterdir()]  # a million objects
    ```

    ## Use instead
    ```python
    class Images(Dataset):
        def __init__(self, folder):
            self.paths = np.array([str(path) for path in folder.iterdir()])  # one object
    ```

    ## Fix
    Keep what belongs to samples in numpy arrays or tensors: strings as an array of a fixed width, records as one
    buffer of pickled bytes with an array of offsets.

    ## Sources
    - PyTorch issue 13246: memory of workers that grows over the first epoch.
    - Measured over the first epoch, MiB that only a worker has: a list of 1 M `str` 56 to 89, of 0.5 M `dict` 56 to 72;
      the same as one numpy array 11 to 14. RSS was 205 to 309 MiB for all of them.
    - Threshold: 8 MiB for each worker, from 100,000 objects on; less is no reason to change a dataset.
    """

    code = "TP502"
    name = "dataset-copied-by-workers"
    severity = "warning"
    observes = WorkerMemorySeen

    def judge(self, seen: WorkerMemorySeen) -> Iterable[Finding]:
        if seen.num_objects >= MIN_OBJECTS and seen.copied_bytes >= MIN_COPIED_BYTES:
            yield self.finding(
                seen.target,
                f"the dataset holds {seen.num_objects:,} Python objects or more, and each worker copies them as it "
                f"reads: {_mib(seen.copied_bytes)} of {_mib(seen.object_bytes)} MiB after {seen.num_read:,} samples",
                evidence={
                    "num_objects": seen.num_objects,
                    "object_bytes": seen.object_bytes,
                    "copied_bytes": seen.copied_bytes,
                    "uss_bytes": seen.uss_bytes,
                    "num_samples": seen.num_samples,
                    "num_read": seen.num_read,
                },
                fix="keep them in numpy arrays or tensors, which are one object each",
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
