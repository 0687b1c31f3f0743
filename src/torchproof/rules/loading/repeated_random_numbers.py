"""TP504."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.repeats import ignores_index, repeats
from torchproof.types import Finding
from torchproof.types.rehearsal import DrawsSeen


class RepeatedRandomNumbers(Rule[DrawsSeen]):
    """The dataset draws the same random numbers in every DataLoader worker and rank, or again in each epoch.

    ## Why it matters
    Augmentation is there to make samples that the model hasn't seen. A generator that the dataset holds is copied into
    each worker with its state: with eight workers there is an eighth of the variety, and in the next epoch the same
    again. Nothing raises; the model is just worse.

    ## How it is detected
    Two DataLoader workers read the same index again and again, in two epochs. The global generators of Python, numpy
    and torch are reset before each sample, so that only what else is random changes it. The rule reports samples
    that change from call to call and are the same in both workers, or in both epochs. A dataset without random
    numbers, one that uses the global generators, and one that seeds its own in each worker are no finding.

    ## Example
    ```python
    class Noisy(Dataset):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __getitem__(self, index):
            return self.x[index] + self.rng.normal(size=8)
    ```

    ## Use instead
    ```python
    class Noisy(Dataset):
        def __getitem__(self, index):
            return self.x[index] + torch.randn(8)
    ```

    ## Fix
    Draw from the global generators: torchproof seeds them for each micro-batch from the recipe's seed, the epoch and
    the samples, on any number of workers and ranks.

    ## Sources
    - PyTorch docs, "Randomness in multi-process data loading".
    - Measured, two workers and 16 samples: a `default_rng`, `torch.Generator` or `random.Random` as an attribute gave
      8 of 16 twice, and 16 of 16 again in the next epoch; the global generators 0.
    - Threshold 1e-6: the probability that as many samples are equal by chance, from how often two of them are.
    """

    code = "TP504"
    name = "repeated-random-numbers"
    severity = "warning"
    observes = DrawsSeen

    def judge(self, seen: DrawsSeen) -> Iterable[Finding]:
        draws = seen.same_index
        if ignores_index(seen.other_index):
            return
        if repeats(draws.num_equal_workers, draws):
            where = f"in both DataLoader workers, {draws.num_equal_workers} of {draws.num_pairs} times"
        elif repeats(draws.num_equal_epochs, draws):
            where = f"again in each epoch, {draws.num_equal_epochs} of {draws.num_pairs} times, unless workers persist"
        else:
            return
        yield self.finding(
            seen.target,
            f"what changes in train_data()'s samples from call to call is the same {where}: the dataset has a "
            "generator, or other state, of its own",
            evidence={
                "num_pairs": draws.num_pairs,
                "num_equal_workers": draws.num_equal_workers,
                "num_equal_epochs": draws.num_equal_epochs,
                "num_values": draws.num_values,
            },
            fix="draw from the global generators of Python, numpy or torch, which are seeded for each micro-batch",
        )
