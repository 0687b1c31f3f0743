"""What ``torchproof serve`` says when it is ready."""

from torchproof.types.candidate import Choice
from torchproof.types.finding import Finding
from torchproof.types.observation import GoldenSeen
from torchproof.types.record import Record


class Serving(Record):
    """What is served, and where.

    Attributes:
        target: as the user wrote it when the plan was made.
        bundle: the bundle's folder; None for a target without one.
        choice: the plan's choice that runs.
        golden: replays of the golden set at this start; empty without a bundle.
        findings: of this start.
        url: without a slash at its end; ``/docs`` below it is the documentation.
    """

    target: str
    bundle: str | None
    choice: Choice
    golden: tuple[GoldenSeen, ...]
    findings: tuple[Finding, ...]
    url: str
