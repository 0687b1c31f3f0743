"""Findings as text, the worst first."""

import math
import textwrap
from collections.abc import Sequence

from torchproof.types import Finding

_ORDER = {"error": 0, "warning": 1, "info": 2}
_INDENT = "  "


def text(findings: Sequence[Finding], width: int = 80) -> str:
    """All findings, wrapped at ``width`` columns, with an empty line between two; ``no findings`` where there is none.

    Errors come before warnings and those before hints; equal ones by code and place.
    """
    if not findings:
        return "no findings\n"
    ordered = sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.code, finding.where))
    return "\n".join(_one(finding, width) for finding in ordered)


def _one(finding: Finding, width: int) -> str:
    head = f"{finding.code} {finding.severity}  {finding.name}  {finding.where}"
    lines = [head] if len(head) <= width else [head.removesuffix("  " + finding.where), _INDENT + finding.where]
    lines += _wrapped(finding.message, width, _INDENT)
    if finding.evidence:
        lines += _joined([f"{key}={_value(value)}" for key, value in finding.evidence.items()], width)
    lines += _wrapped(f"fix: {finding.fix}", width, _INDENT, more=" " * len("fix: "))
    lines.append(f"{_INDENT}why: torchproof explain {finding.code}")
    return "\n".join(lines) + "\n"


def _wrapped(message: str, width: int, indent: str, more: str = "") -> list[str]:
    """Wrapped at words only, so that a path or a name stays in one piece; the message's own line breaks are kept."""
    lines: list[str] = []
    for part in message.splitlines():
        first = indent + more if lines else indent
        lines += textwrap.wrap(
            part,
            width,
            initial_indent=first,
            subsequent_indent=indent + more,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _joined(pairs: Sequence[str], width: int) -> list[str]:
    """The pairs in as few lines as fit; a pair is never broken."""
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += "  " + pair
        else:
            lines.append(_INDENT + pair)
    return lines


def _value(value: float | int | str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if value and not any(letter.isspace() for letter in value) else f'"{" ".join(value.split())}"'
    return str(value)
