"""Where rounding ends and a real difference begins."""

import math

from torchproof.types import ModesSeen


def exceeds(diff: float, threshold: float) -> bool:
    """Whether ``diff`` is more than ``threshold``; NaN is, because the two sides cannot be said to agree."""
    return diff > threshold or math.isnan(diff)


def answers_differ(diff: float, seen: ModesSeen) -> bool:
    """Whether a difference between answers of ``seen`` is real.

    Where the served outputs themselves are not finite, a NaN or infinite difference says nothing: NaN - NaN is NaN.
    """
    if seen.non_finite_outputs and not math.isfinite(diff):
        return False
    return exceeds(diff, seen.threshold)
