"""What a search is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchproof.runtimes import RUNTIMES
from torchproof.types import Limits, Target, Tolerance

# A trial that says nothing for so long is ended.
TRIAL_TIMEOUT_S = 60.0

Progress = Callable[[str, float], None]  # what is being done, and the share of the budget that is spent


@dataclass(frozen=True)
class TuneRequest:
    """One search.

    Attributes:
        output: the bundle's folder.
        traffic: a JSON Lines file whose requests take the place of ``samples()``.
        budget_s: wall seconds for the search; what it doesn't reach is reported as not reached.
        runtimes: the table of runtimes to try, ``module:Class`` by name.
        trial_timeout_s: seconds without an answer after which a trial is ended.
    """

    target: Target
    output: Path
    traffic: Path | None = None
    budget_s: float = 120.0
    limits: Limits = field(default_factory=Limits)
    tolerance: Tolerance = field(default_factory=Tolerance)
    runtimes: Mapping[str, str] = field(default_factory=lambda: RUNTIMES)
    trial_timeout_s: float = TRIAL_TIMEOUT_S
