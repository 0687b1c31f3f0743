"""What ``check`` prints."""

from torchproof.render import findings
from torchproof.types import CheckReport


def text(report: CheckReport, width: int) -> str:
    """What was looked at, what holds, and the findings."""
    traffic = report.traffic
    sizes = ", ".join(f"{dim} {values[0]} to {values[-1]}" for dim, values in traffic.sizes.items())
    lines = [
        f"{report.target.reference}: {traffic.num_requests} requests from {traffic.source}"
        + (f" ({sizes})" if sizes else ""),
        f"  batching  {'safe' if report.batching else 'not used'}: a row's answer "
        f"{'is' if report.batching else 'is not proven'} independent of its batch ({report.precision})",
    ]
    if traffic.sizes:
        lines.append(
            f"  padding   {'safe' if report.padding else 'not used'}: padded and unpadded answers "
            f"{'agree' if report.padding else 'are not proven to agree'} ({report.precision})"
        )
    if not report.findings:
        return "\n".join([*lines, "", "no findings", ""])
    return "\n".join([*lines, "", findings.text(report.findings, width).rstrip(), ""])
