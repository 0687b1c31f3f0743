"""What ``tune`` prints: one row for each candidate, then what was chosen and why each faster one lost."""

import math
import textwrap

from torchproof.render import units
from torchproof.types import Proof, Trial

MAX_REASON = 200  # characters of an error in a table; the stored proof has all of it
# Columns of the table; where it gets too wide, what the choice depends on least is left out.
COLUMNS = ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 4), (0, 1, 4))


# Source of the claim: two threads on two cores, up to 47 times slower beside one busy process.
WORSE = (
    "its idle threads spin, which was faster just now and collapses beside a busy neighbour; the plan's idle threads "
    "sleep, and other waiting is not searched yet"
)


def text(proof: Proof, output: str, width: int) -> str:
    """The whole report.

    Args:
        output: the bundle's folder, as the user wrote it.
        width: columns to wrap at.
    """
    parts = [
        _wrap(_subject(proof), width),
        table(proof, width),
        _chosen(proof, width),
        _wrap(
            f"wrote {output}  ({proof.golden.num_rows} golden rows, {proof.golden.precision} reference; "
            f"search took {units.seconds(proof.search_s)})",
            width,
        )
        + f"\nnext: torchproof serve {output}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _subject(proof: Proof) -> str:
    sizes = ", ".join(
        f"{dim} {values[0]} to {values[-1]}, median {values[len(values) // 2]}"
        for dim, values in proof.traffic.sizes.items()
    )
    traffic = f"{proof.traffic.num_requests} requests from {proof.traffic.source}" + (f" ({sizes})" if sizes else "")
    batching = "rows may share a batch" if proof.batching else "one request at a time"
    padding = {True: ", padding is safe", False: ", no padding" if proof.traffic.sizes else ""}[proof.padding]
    return f"{proof.target.reference}: {traffic}; {batching}{padding}"


def table(proof: Proof, width: int) -> str:
    """One line for each trial that was measured, and below it those that were not, with the reason."""
    header = ("candidate", f"against {proof.reference}", "p50", "req/s at batch", "error", "start", "memory")
    rows: list[tuple[str, ...]] = [header]
    rest = []
    for trial in proof.trials:
        if trial.outcome == "measured":
            rows.append(_row(trial, proof))
        else:
            rest.append(trial)
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    fitting = (keep for keep in COLUMNS if sum(widths[i] + 2 for i in keep) - 2 <= width)
    keep = next(fitting, COLUMNS[-1])
    lines = ["  ".join(row[i].ljust(widths[i]) for i in keep).rstrip() for row in rows]
    lines += [_wrap(f"{t.candidate.label}: {t.outcome}: {t.reason[:MAX_REASON]}", width) for t in rest]
    return "\n".join(lines)


def _row(trial: Trial, proof: Proof) -> tuple[str, ...]:
    label = trial.candidate.label
    c = trial.comparison
    best = max(trial.throughput, key=lambda p: p.rps.estimate, default=None)
    golden = trial.golden
    return (
        f"{label} (baseline)" if label == proof.baseline else label,
        units.ratio(c.ratio, c.low, c.high) if c is not None else "1",
        units.seconds(trial.latency.estimate) if trial.latency is not None else "",
        f"{units.rate(best.rps.estimate).removesuffix(' req/s')} at {best.batch_size}" if best is not None else "",
        "" if golden is None else "not finite" if golden.cos is None else f"cos {_cos(golden.cos)}",
        units.seconds(trial.cold_start_s) if trial.cold_start_s is not None else "",
        units.size(trial.peak_memory_bytes) if trial.peak_memory_bytes is not None else "",
    )


def _cos(value: float) -> str:
    """Two digits after its nines, never rounded up: 0.99987 says more than 1.000, and 0.9989 is below 0.999."""
    if value >= 1 - 1e-7:
        return "1"
    places = min(7, max(0, math.floor(-math.log10(1 - value) + 1e-9)) + 2)
    return f"{math.floor(value * 10**places + 1e-6) / 10**places:.{places}f}"


def _chosen(proof: Proof, width: int) -> str:
    lines = []
    gain = proof.speedup
    if gain is not None:
        ratio = units.ratio(gain.ratio, gain.low, gain.high)
        line = f"{gain.candidate}: {ratio} the speed of {gain.baseline}, as it is served today ({gain.verdict})"
        lines.append(_wrap(line, width))
        if gain.verdict == "worse":
            lines.append(_wrap(WORSE, width, "  "))
    else:
        lines.append(f"not compared with {proof.baseline}: one of the two ended in the middle")
    for decision in proof.plan.decisions:
        lines.append(_wrap(f"{decision.knob}: {decision.value}   {decision.reason}", width))
        lines += [_wrap(f"not {r.value}: {r.reason[:MAX_REASON]}", width, "  ") for r in decision.rejected]
    return "\n".join(lines)


def _wrap(line: str, width: int, indent: str = "") -> str:
    """Wrapped at spaces, so that a path stays in one piece."""
    hanging = indent + "  "
    return textwrap.fill(
        line, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
