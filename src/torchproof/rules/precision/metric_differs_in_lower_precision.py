"""TP604."""

from collections.abc import Iterable

from torchproof.rules.base import Rule, of_candidate
from torchproof.rules.wording import count
from torchproof.types import Finding, MetricSeen
from torchproof.types.precision import Difference


class MetricDiffersInLowerPrecision(Rule[MetricSeen]):
    """A model trained in a lower precision ends with another metric than one trained in float32.

    ## Why it matters
    The loss curve of a lower precision looks the same, and the final metric is what the model is used for. A shift of
    half a percent can't be seen in one run, as seeds differ by more than that.

    ## How it is detected
    Both are trained from the same seeds, so that weights, order and dropout are the same, and the differences of
    equal seeds are judged after 6, 12, 24 and 48 of them. The interval of the mean difference is corrected for the
    four looks. It has to exclude 0 and must not lie within the margin that was given before. A difference for the
    better is not reported, where training shows which way that is. A metric that isn't finite where that of 32-true
    is counts as different with the first seed.

    ## Example
    ```python
    ok = abs(metric(train("16-mixed", seed=0)) - metric(train("32-true", seed=0))) < 0.005
    ```

    ## Use instead
    ```python
    differences = [metric(train("16-mixed", seed)) - metric(train("32-true", seed)) for seed in range(24)]
    low, high = t_interval(differences, confidence=1 - 0.05 / num_looks)
    ok = -0.005 < low and high < 0.005
    ```

    ## Fix
    Train in 32-true, or in bf16-mixed where only 16-mixed differs. Where the scaler skips many steps, train for as
    many more. Keep modules with large values in float32 (`--fp32-module`), and measure again.

    ## Sources
    - Measured, a small CNN on handwritten digits, margin 0.005: five seeds showed an accuracy of 16-mixed that passed
      as equivalent, +0.0011; fifteen showed +0.0047 [+0.0013, +0.0082].
    - Threshold: four looks of 1.25% each keep all of them together at 5% (Bonferroni).
    """

    code = "TP604"
    name = "metric-differs-in-lower-precision"
    severity = "warning"
    observes = MetricSeen

    def judge(self, seen: MetricSeen) -> Iterable[Finding]:
        if seen.num_non_finite:
            shown = f"is not finite with {count(seen.num_non_finite, 'seed')}, where that of 32-true is"
        elif seen.difference is not None and _matters(seen.difference, seen):
            found = seen.difference
            shown = (
                f"differs from 32-true by {found.mean:+#.2g} [{found.low:+#.2g}, {found.high:+#.2g}] over "
                f"{count(seen.num_seeds, 'seed')}; the margin is {seen.margin:g}"
            )
        else:
            return
        evidence: dict[str, float | int | str | bool] = {
            "metric": seen.metric,
            "better": seen.better,
            "margin": seen.margin,
            "num_seeds": seen.num_seeds,
            "num_non_finite": seen.num_non_finite,
        }
        if seen.baseline_mean is not None:
            evidence["baseline_mean"] = seen.baseline_mean
        if seen.difference is not None:
            evidence |= {"difference": seen.difference.mean, "low": seen.difference.low, "high": seen.difference.high}
        yield self.finding(
            of_candidate(seen.target, seen.candidate),
            f"{seen.metric} {shown}",
            evidence=evidence,
            fix="train in 32-true" if seen.candidate == "bf16-mixed" else "train in bf16-mixed or 32-true",
            severity="error" if seen.num_non_finite else None,
        )


def _matters(difference: Difference, seen: MetricSeen) -> bool:
    """Proven, not within the margin, and not for the better."""
    low, high = difference.low, difference.high
    if low > -seen.margin and high < seen.margin:
        return False
    return (low > 0 and seen.better != "higher") or (high < 0 and seen.better != "lower")
