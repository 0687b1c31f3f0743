"""What ``tune`` prints of a DataLoader's settings: the costs, a line for each setting, and what was chosen."""

import textwrap

from torchproof.render import units
from torchproof.stats import median_interval
from torchproof.types import Comparison
from torchproof.types.loading import LoadingArm, LoadingCosts, LoadingProof, ThreadCosts

INDENT = " " * 10


def text(proof: LoadingProof, width: int = 80) -> str:
    """The whole report; findings are rendered by themselves.

    Args:
        width: columns to wrap at.
    """
    parts = [_costs(proof.costs, width), _table(proof), _chosen(proof, width)]
    return "\n\n".join(parts) + "\n"


def _costs(costs: LoadingCosts, width: int) -> str:
    """What a batch costs, part by part."""
    alone, *more = costs.threads
    num_loads = len(alone.loads)
    cpu_s, wait_s = (sum(getattr(load, name) for load in alone.loads) / num_loads for name in ("cpu_s", "wait_s"))
    lines = [
        f"a batch   {costs.batch_size} of {costs.num_samples:,} samples",
        f"samples   {units.seconds(cpu_s)} computing, {units.seconds(wait_s)} waiting",
        f"collate   {units.seconds(alone.collate.cpu_s)}",
        f"step      {_step(alone)}" + "".join(f"; {_step(entry)}" for entry in more) + f" ({costs.device})",
    ]
    if worker := costs.worker:
        lines.append(
            f"a worker  {units.seconds(worker.send_cpu_s)} to send {units.size(costs.batch_bytes)}, "
            f"{units.seconds(worker.receive_cpu_s)} to receive it; {units.seconds(worker.start_s)} to start; "
            f"{units.size(worker.uss_bytes)} of its own memory"
        )
    else:
        lines.append(f"a worker  none can be used: {costs.worker_error}")
    if transfer := costs.transfer:
        lines.append(
            f"transfer  {units.seconds(transfer.pageable_s)}, {units.seconds(transfer.pinned_s)} from pinned memory"
        )
    return "\n".join(_wrap(line, width) for line in lines)


def _step(entry: ThreadCosts) -> str:
    threads = "1 thread" if entry.num_threads == 1 else f"{entry.num_threads} threads"
    return f"{units.seconds(entry.step.wall_s)} with {threads}"


def _table(proof: LoadingProof) -> str:
    """One line for each setting."""
    rows = [("setting", "predicted", "measured samples/s", "/dev/shm")]
    rows += [
        (
            arm.label,
            units.number(arm.predicted, units.decimals(arm.predicted)),
            _measured(arm),
            units.size(arm.shared_memory_bytes) if arm.loading.num_workers else "",
        )
        for arm in proof.arms
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_wrap(f"not {arm.label}: {arm.refusal}", 80) for arm in proof.arms if arm.refusal]
    return "\n".join(lines)


def _measured(arm: LoadingArm) -> str:
    if not arm.measured:
        return ""
    middle, low, high = median_interval(arm.measured)
    if low is None or high is None:
        return units.number(middle, units.decimals(middle))
    places = units.decimals(middle, low, high)
    return f"{units.number(middle, places)} [{units.number(low, places)}, {units.number(high, places)}]"


def _chosen(proof: LoadingProof, width: int) -> str:
    chosen = next(arm for arm in proof.arms if arm.loading == proof.chosen)
    lines = [f"loading   {chosen.label}   {proof.reason}"]
    if proof.chosen.num_workers:
        lines.append(
            f"prefetch  {proof.chosen.prefetch_factor} batches for each worker: "
            f"{units.size(chosen.shared_memory_bytes)} of /dev/shm at most{_free(proof)}"
        )
        start_s = proof.chosen.num_workers * (proof.costs.worker.start_s if proof.costs.worker else 0.0)
        lines.append(f"workers   persist from epoch to epoch, which saves {units.seconds(start_s)} an epoch")
    if proof.costs.transfer is not None:
        lines.append(f"memory    {'pinned' if proof.chosen.pin_memory else 'not pinned'}")
    wrapped = [_wrap(line, width) for line in lines]
    wrapped += [_wrap(_comparison(c), width, INDENT) for c in proof.comparisons]
    if proof.out_of_order is not None:
        wrapped.append(
            _wrap(f"{_comparison(proof.out_of_order)}; not chosen: a run could not go on bit for bit", width, INDENT)
        )
    wrapped.append(f"the search took {units.seconds(proof.search_s)}")
    return "\n".join(wrapped)


def _free(proof: LoadingProof) -> str:
    return f"; {units.size(proof.shared_memory.free_bytes)} are free" if proof.shared_memory else ""


def _comparison(comparison: Comparison) -> str:
    ratio = units.ratio(comparison.ratio, comparison.low, comparison.high)
    return f"{comparison.candidate}: {ratio} the speed of {comparison.baseline} ({comparison.verdict})"


def _wrap(line: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  " if indent else INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
