"""The stored results of the commands."""

from typing import Literal

from torchproof.types.environment import Environment
from torchproof.types.finding import Finding
from torchproof.types.limits import Limits, Tolerance
from torchproof.types.measurement import Comparison
from torchproof.types.plan import Plan
from torchproof.types.record import Record
from torchproof.types.signature import Signature
from torchproof.types.target import Target
from torchproof.types.traffic import Traffic
from torchproof.types.trial import Trial

SCHEMA = 1  # raise it when a key of Proof changes its name, type or meaning


class CheckReport(Record):
    """What ``check`` found.

    Attributes:
        precision: of the probes for batching and padding: ``float64`` where the model runs in it.
        batching: whether a row's output is independent of its batch.
        padding: whether padded and unpadded inputs agree.
    """

    target: Target
    signature: Signature
    traffic: Traffic
    precision: str
    batching: bool
    padding: bool
    findings: tuple[Finding, ...]


class GoldenSummary(Record):
    """The golden set: rows, and the precision in which the eager model made the reference outputs."""

    num_rows: int
    precision: Literal["float64", "float32"]


class Proof(Record):
    """``proof.json``: the plan with all its evidence.

    Attributes:
        schema: version of this shape.
        created: UTC, ISO 8601.
        batching, padding: what ``check`` proved about the model.
        baseline: label of the eager model as people serve it.
        reference: label of the trial that the ratios of all trials are against.
        speedup: the chosen plan against the baseline, in turns; None when the baseline could not be measured.
        search_s: wall seconds of the whole search.
    """

    schema: int
    torchproof: str
    created: str
    target: Target
    signature: Signature
    traffic: Traffic
    environment: Environment
    limits: Limits
    tolerance: Tolerance
    golden: GoldenSummary
    batching: bool
    padding: bool
    baseline: str
    reference: str
    speedup: Comparison | None
    plan: Plan
    trials: tuple[Trial, ...]
    findings: tuple[Finding, ...]
    search_s: float
