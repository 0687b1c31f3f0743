"""What a rule reports."""

from typing import Literal

from torchproof.types.record import Record

Severity = Literal["error", "warning", "info"]


class Finding(Record):
    """One rule that the evidence proves broken.

    Attributes:
        code: catalogue code, such as ``TP101``.
        name: the rule's name, such as ``train-mode-in-effect``.
        where: what it was found in: the target, a candidate, a file.
        message: what is wrong, with the value that shows it.
        evidence: the numbers that prove it, by name.
        fix: what cures it.
    """

    code: str
    name: str
    severity: Severity
    where: str
    message: str
    evidence: dict[str, float | int | str | bool]
    fix: str
