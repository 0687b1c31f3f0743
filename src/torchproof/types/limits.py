"""What the user asks of a plan."""

from typing import Literal

from torchproof.types.record import Record


class Limits(Record):
    """Upper limits; None where the user set none.

    Attributes:
        p99_s: 99th percentile of one request's time in the model, seconds.
        max_memory_bytes: peak resident memory of one serving process.
        max_cold_start_s: from the start of a process to its first answer, seconds.
    """

    p99_s: float | None = None
    max_memory_bytes: int | None = None
    max_cold_start_s: float | None = None


class Tolerance(Record):
    """How far a candidate's outputs may be from the golden set's.

    Attributes:
        metric: ``cos`` is the smallest cosine over the rows, lowered where the length differs (see
            ``golden.compare``); ``max_abs`` and ``max_rel`` are largest differences, ``max_rel`` relative to the
            row's largest value.
        bound: lower bound for ``cos``, upper bound for the others.
    """

    metric: Literal["cos", "max_abs", "max_rel"] = "cos"
    bound: float = 0.999
