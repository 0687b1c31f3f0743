"""What ``tune`` prints: one row for each candidate, then what was chosen and why each faster one lost."""

import textwrap

from torchproof.render import units
from torchproof.types import Proof, Trial

MAX_REASON = 200  # characters of an error in a table; the stored proof has all of it


def text(proof: Proof, output: str, width: int) -> str:
    """The whole report.

    Args:
        output: the bundle's folder, as the user wrote it.
        width: columns to wrap at.
    """
    parts = [
        _subject(proof),
        table(proof, width),
        _chosen(proof, width),
        f"wrote {output}  ({proof.golden.num_rows} golden rows, {proof.golden.precision} reference; "
        f"search took {units.seconds(proof.search_s)})\n"
        f"next: torchproof serve {output}",
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
    if sum(widths) + 2 * (len(widths) - 1) > width:  # too narrow: leave out what the choice depends on least
        keep = [0, 1, 2, 4]
        rows = [tuple(row[i] for i in keep) for row in rows]
        widths = [widths[i] for i in keep]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for trial in rest:
        line = f"{trial.candidate.label}: {trial.outcome}: {trial.reason[:MAX_REASON]}"
        lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
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
    """As many nines as it has, and one digit more: 0.99987 says more than 1.000."""
    return (
        "1"
        if value >= 1 - 1e-7
        else f"{value:.7f}"[: 4 + max(0, len(f"{value:.7f}") - len(f"{value:.7f}".lstrip("0.9")) - 2)]
    )


def _chosen(proof: Proof, width: int) -> str:
    lines = []
    gain = proof.speedup
    if gain is not None:
        lines.append(
            f"{gain.candidate}: {units.ratio(gain.ratio, gain.low, gain.high)} the speed of {gain.baseline}, "
            f"as it is served today ({gain.verdict})"
        )
    for decision in proof.plan.decisions:
        line = f"{decision.knob}: {decision.value}   {decision.reason}"
        lines += textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for lost in decision.rejected:
            line = f"not {lost.value}: {lost.reason[:MAX_REASON]}"
            lines += textwrap.wrap(
                line,
                width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
