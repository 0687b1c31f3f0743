"""TP704."""

from collections.abc import Iterable

from torchproof.rules.base import Rule, of_candidate
from torchproof.rules.wording import count
from torchproof.types import Finding, GoldenSeen

MIN_DIGITS = 3
MAX_DIGITS = 17  # all that a float has


class GoldenMismatch(Rule[GoldenSeen]):
    """A candidate's outputs are further from the golden set than the tolerance allows.

    ## Why it matters
    The golden set is what the model answers in eager mode, in the highest precision it runs in. A candidate outside
    the tolerance gives other answers than the model that was trained and evaluated. A fast wrong answer isn't
    served.

    ## How it is detected
    Every input of the golden set is run through the artifact that is to be served, on the machine that serves it,
    and every row is compared with the stored outputs. The rule reports the output that is furthest off.

    ## Example
    ```python
    served = quantize(model)
    ```

    ## Use instead
    ```python
    quantized = quantize(model)
    worst = F.cosine_similarity(quantized(golden_inputs), golden_outputs).min()
    served = quantized if worst >= 0.999 else model
    ```

    ## Fix
    Serve the next choice of the plan. Where the plan was made on another machine, run `torchproof tune` on this
    one: other instruction sets and other versions round differently. Widen the tolerance only after the
    application's own metric was measured at that distance.

    ## Sources
    - Measured, int8 with default settings on a sentence embedding model, 300 sentences: smallest cosine 0.865 and
      the same nearest neighbour for 68% of them; bfloat16 0.9999 and 99%.
    - PyTorch docs, "Numerical accuracy".
    """

    code = "TP704"
    name = "golden-mismatch"
    severity = "error"
    observes = GoldenSeen

    def judge(self, seen: GoldenSeen) -> Iterable[Finding]:
        if seen.within:
            return
        side = "at least" if seen.metric == "cos" else "at most"
        yield self.finding(
            of_candidate(seen.target, seen.candidate),
            f"{seen.output} differs from the golden set: {seen.metric} is {_apart(seen.error, seen.bound)} and has "
            f"to be {side} {seen.bound:.15g}; worst of {count(seen.num_rows, 'row')} at batch size {seen.batch_size}",
            evidence={
                "output": seen.output,
                "metric": seen.metric,
                "error": seen.error,
                "bound": seen.bound,
                "num_rows": seen.num_rows,
                "batch_size": seen.batch_size,
            },
            fix="serve another choice of the plan, or run torchproof tune on this machine",
        )


def _apart(error: float, bound: float) -> str:
    """``error`` with as many digits as it takes to see that it is not ``bound``: 0.9989 is 0.999 with three."""
    for digits in range(MIN_DIGITS, MAX_DIGITS):
        text = f"{error:.{digits}g}"
        if float(text) != bound:
            return text
    return f"{error:.{MAX_DIGITS}g}"
