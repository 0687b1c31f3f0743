"""What ``train --rehearse`` says at the end."""

import textwrap

from torchproof.render import findings
from torchproof.types.rehearsal import RehearsalReport

_LABEL = 16
_VERDICT = 11


def text(report: RehearsalReport, width: int) -> str:
    """What was looked at in a line each, and the findings."""
    lines = [f"{report.target.reference}: rehearsed on {report.world_size} ranks in {report.seconds:.0f} s"]
    indent = " " * (2 + _LABEL + _VERDICT)
    for checked in report.checked:
        label = f"  {checked.name:<{_LABEL}}{checked.verdict:<{_VERDICT}}"
        detail = " ".join(checked.detail.split())
        lines += textwrap.wrap(
            label + detail, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join([*lines, "", findings.text(report.findings, width)])
