"""TP405."""

from collections.abc import Iterable

from torchproof.rules.base import Rule
from torchproof.rules.wording import some
from torchproof.types import Finding
from torchproof.types.rehearsal import WeightsSeen


class WeightsDifferByRank(Rule[WeightsSeen]):
    """The model that `model()` returns has other weights on each rank.

    ## Why it matters
    The weights come from something else than the recipe's seed, so a run can't be repeated. DDP replaces them by
    those of rank 0 and hides it; FSDP keeps of each rank's weights the part that the rank holds, and trains a
    mixture that no `model()` has returned. Where names or shapes differ, ranks can't train together at all: an error.

    ## How it is detected
    Each rank calls `model()` with the global generators of Python, numpy and torch set by the recipe's seed.
    Parameters and buffers are compared bit for bit across ranks, before DDP sees the model.

    ## Example
    ```python
    def model(self):
        net = Net()
        rng = np.random.default_rng()  # from the system's entropy
        net.scale.data = torch.tensor(rng.normal(size=8))
        return net
    ```

    ## Use instead
    ```python
    def model(self):
        net = Net()
        nn.init.normal_(net.scale)  # torch's global generator follows the seed
        return net
    ```

    ## Fix
    Take random numbers in `model()` from the global generators, or from one with a fixed seed. Don't let the
    weights depend on the rank, the time or the order of a set.

    ## Sources
    - PyTorch docs, `DistributedDataParallel`: it broadcasts the state of rank 0 when it is made.
    - PyTorch docs, `fully_shard`: each rank keeps its shard of its own parameters.
    """

    code = "TP405"
    name = "weights-differ-by-rank"
    severity = "warning"
    observes = WeightsSeen

    def judge(self, seen: WeightsSeen) -> Iterable[Finding]:
        if seen.num_steps != 0 or not seen.different:
            return
        what, then = (
            ("other names or shapes", "so that they can't train together")
            if seen.shapes_differ
            else ("other weights", "which DDP replaces by those of rank 0, and FSDP would mix")
        )
        yield self.finding(
            seen.target,
            f"model() returns {what} on each rank, {then}: {some(seen.different)}",
            evidence={
                "first": seen.different[0],
                "num_different": len(seen.different),
                "num_tensors": seen.num_tensors,
                "shapes_differ": seen.shapes_differ,
            },
            fix="take random numbers in model() from the global generators, which follow the recipe's seed",
            severity="error" if seen.shapes_differ else None,
        )
