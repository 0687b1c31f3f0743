"""What ``train`` says at the end."""

from torchproof.render import findings, units
from torchproof.types.training import StrategyChoice, TrainReport


def text(report: TrainReport, run: str, width: int) -> str:
    """The findings, where there are some, and the run in four lines."""
    processes = "1 process" if report.world_size == 1 else f"{report.world_size} processes"
    metrics = ", ".join(f"{name} {number(value)}" for name, value in report.metrics.items()) or "none"
    rows = [
        (
            "trained",
            f"{report.target.reference}, {report.strategy} on {processes} ({report.device}), {report.precision}",
        ),
        ("steps", f"{report.num_steps} of {report.batch_size} samples, {report.num_epochs} epochs"),
        ("metrics", f"{metrics}   (loss {number(report.loss)})"),
    ]
    said = "".join(f"{label + ':':<12}{value}\n" for label, value in rows) + f"wrote {run}\n"
    return f"{findings.text(report.findings, width)}\n{said}" if report.findings else said


def arithmetic(choice: StrategyChoice) -> str:
    """Why this strategy: a line for each sum, and what it is held against."""
    memory = choice.memory
    said = f"strategy:   {choice.strategy} on {choice.world_size} processes"
    if choice.activation_checkpointing:
        said += " with activation checkpointing"
    said += f": {choice.reason}"
    if memory.refusal:
        return said
    parts = [
        ("weights", memory.weight_bytes),
        ("gradients", memory.gradient_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activation_bytes),
    ]
    sums = " + ".join(f"{name} {units.size(value)}" for name, value in parts)
    whole = memory.state_bytes + memory.activation_bytes
    lines = [said, f"a step:     {sums} = {units.size(whole)}, of {units.size(choice.device_bytes)}"]
    if choice.checkpointed is not None:
        lines.append(f"            activations {units.size(choice.checkpointed.activation_bytes)} when computed again")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Four digits; a value that was none is said to be so."""
    return "not finite" if value is None else f"{value:.4g}"
