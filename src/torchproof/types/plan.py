"""Decisions and their reasons."""

from torchproof.types.candidate import Choice
from torchproof.types.record import Record


class Rejected(Record):
    """A value that lost, and why, with the number."""

    value: str
    reason: str


class Decision(Record):
    """One knob, the value chosen and what it was chosen over."""

    knob: str
    value: str
    reason: str
    rejected: tuple[Rejected, ...] = ()


class Plan(Record):
    """What ``serve`` obeys.

    Attributes:
        chosen: served first.
        runners_up: in the order in which they are fallen back to.
        holds_while: facts of the environment under which the plan stands, by name.
    """

    chosen: Choice
    runners_up: tuple[Choice, ...]
    decisions: tuple[Decision, ...]
    holds_while: dict[str, str]
