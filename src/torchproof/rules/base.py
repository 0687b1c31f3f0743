"""What every rule is: a code, a docstring that documents it, and a pure function from an observation to findings."""

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Generic, TypeVar

from torchproof.types import Finding, Record, Severity

Seen = TypeVar("Seen", bound=Record)

# Every rule's docstring has these sections, in this order, after its summary.
SECTIONS = ("Why it matters", "How it is detected", "Example", "Use instead", "Fix", "Sources")

PARTS = {
    1: "modes",
    2: "memory",
    3: "compile",
    4: "distributed",
    5: "loading",
    6: "precision",
    7: "inference and serving",
}


class Part(Record):
    """One of the seven parts of the catalogue."""

    number: int
    title: str


class RuleDoc(Record):
    """All that ``explain`` and the documentation say about a rule.

    Attributes:
        severity: the usual one; a rule may report a milder case as less.
        since: the torchproof version that brought the rule.
        summary: one line.
        sections: markdown by heading, in the order of ``SECTIONS``.
    """

    code: str
    name: str
    part: Part
    severity: Severity
    since: str
    summary: str
    sections: dict[str, str]


class Rule(Generic[Seen]):
    """Base of every rule. One subclass to a file; its docstring is its documentation.

    Attributes:
        code: ``TP`` and three digits, the first one the part; never reused.
        name: reads after "allow" and names the bad pattern.
        observes: the observation that ``judge`` takes.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    since: ClassVar[str] = "0.1.0"
    observes: ClassVar[type[Record]]

    def judge(self, seen: Seen) -> Iterable[Finding]:
        """The findings that ``seen`` proves; nothing where it is not sure. Pure: no torch, no clock, no I/O."""
        raise NotImplementedError

    @property
    def part(self) -> Part:
        """The part of the catalogue, from the code's first digit."""
        number = int(self.code[2])
        return Part(number=number, title=PARTS[number])

    def doc(self) -> RuleDoc:
        """The docstring, split into summary and sections."""
        head, *rest = re.split(r"^## (.+)$", inspect.getdoc(type(self)) or "", flags=re.MULTILINE)
        sections = {title: body.strip() for title, body in zip(rest[::2], rest[1::2], strict=True)}
        return RuleDoc(
            code=self.code,
            name=self.name,
            part=self.part,
            severity=self.severity,
            since=self.since,
            summary=head.strip(),
            sections=sections,
        )

    def finding(
        self,
        where: str,
        message: str,
        *,
        evidence: Mapping[str, float | int | str | bool],
        fix: str,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule.

        Args:
            where: the target, or ``of_candidate`` of it.
            evidence: the numbers that prove it. NaN and infinity, which JSON lacks, are stored as text.
            severity: where this case differs from the rule's own.
        """
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity or self.severity,
            where=where,
            message=message,
            evidence={key: _storable(value) for key, value in evidence.items()},
            fix=fix,
        )


def of_candidate(target: str, candidate: str) -> str:
    """Where something about one candidate was found: ``app.py:Net (onnxruntime, 1 thread)``."""
    return f"{target} ({candidate})" if candidate else target


def _storable(value: float | int | str | bool) -> float | int | str | bool:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
