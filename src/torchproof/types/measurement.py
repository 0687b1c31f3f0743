"""Numbers with their samples, and what may be said from them."""

from typing import Literal

from torchproof.types.record import Record

Unit = Literal["s", "bytes", "rps"]
Verdict = Literal["better", "worse", "equivalent", "undecided"]


class Measurement(Record):
    """One quantity, measured in this run.

    Attributes:
        samples: every value taken, in order.
        estimate: the statistic named by ``quantity``.
        low, high: its 95% confidence interval; None where the samples are too few to give one.
    """

    quantity: str
    unit: Unit
    samples: tuple[float, ...]
    estimate: float
    low: float | None = None
    high: float | None = None


class Comparison(Record):
    """A candidate against another, from interleaved pairs.

    Attributes:
        ratio: baseline time / candidate time, the median of the pairs; above 1 the candidate is faster.
        low, high: confidence interval of ``ratio``, corrected for the number of times it was looked at.
        num_pairs: pairs measured.
    """

    baseline: str
    candidate: str
    ratio: float
    low: float
    high: float
    num_pairs: int
    verdict: Verdict
