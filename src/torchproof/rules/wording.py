"""How values read in a message: significant digits only, a unit or a plain ratio."""

import math
from collections.abc import Sequence

MAX_NAMES = 3  # more names than this hide the message; the evidence has them all


def ratio(value: float) -> str:
    """Two significant digits: ``0.29``, ``8.6e-08``."""
    return f"{value:.2g}"


def of_largest(diff: float) -> str:
    """A relative difference: ``0.29 of the largest output``."""
    if not math.isfinite(diff):
        return f"{diff} (one of the two is not finite)"
    return f"{diff:#.2g} of the largest output"  # "1.0 of", not "1 of"


def seconds(value: float) -> str:
    """Two significant digits, in ms below one second: ``840 ms``, ``5.6 s``, ``130 s``."""
    if not math.isfinite(value):
        return f"{value} s"
    if abs(value) < 1:
        return f"{_two_digits(value * 1000)} ms"
    return f"{_two_digits(value)} s"


def count(number: int, noun: str) -> str:
    """``1 graph break``, ``2 graph breaks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Sequence[str]) -> str:
    """The names, or the first few and how many more: ``a, b, c and 2 more``."""
    shown = ", ".join(names[:MAX_NAMES])
    left = len(names) - MAX_NAMES
    return f"{shown} and {left} more" if left > 0 else shown


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):.0f}" if abs(value) >= 9.95 else f"{value:.2g}"
