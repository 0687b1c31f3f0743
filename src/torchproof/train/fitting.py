"""Whether a step fits on the device, and so how the ranks share the model: sums over measured sizes."""

from collections.abc import Callable

from torchproof.types.training import StepMemory, Strategy, StrategyChoice

# Of the device's memory; the rest is for what no tensor of the step is: contexts, workspaces, buckets, fragmentation.
USABLE_SHARE = 0.85


def choose_strategy(measure: Callable[[bool], StepMemory], *, device_bytes: int, world_size: int) -> StrategyChoice:
    """DDP where a step fits on each device; else FSDP, with activation checkpointing where that alone doesn't fit.

    Args:
        measure: what a step of one process needs; with activation checkpointing where it is given True.
        device_bytes: memory of one rank's device.
    """
    memory = measure(False)
    checkpointed: StepMemory | None = None
    strategy: Strategy = "ddp"
    limit = device_bytes * USABLE_SHARE
    if memory.refusal:
        reason = f"what a step needs is not known: {memory.refusal}"
    elif needed(memory, "ddp", world_size) <= limit:
        reason = "a whole step fits on each device"
    else:
        strategy = "fsdp"
        reason = "a whole step does not fit on a device, its share does"
        if needed(memory, "fsdp", world_size) > limit:
            checkpointed = measure(True)
            reason = "its share fits once activations are computed again in backward"
            if needed(checkpointed, "fsdp", world_size) > limit:
                reason = "not even its share fits: the micro-batch will be halved until it does"
    return StrategyChoice(
        strategy=strategy,
        activation_checkpointing=checkpointed is not None,
        world_size=world_size,
        device_bytes=device_bytes,
        memory=memory,
        checkpointed=checkpointed,
        reason=reason,
    )


def needed(memory: StepMemory, strategy: Strategy, world_size: int) -> int:
    """Bytes of one rank. FSDP holds a share of weights, gradients and optimizer state, and two parts gathered whole:
    the one that runs and the next, with the gradients of one."""
    if strategy != "fsdp":
        return memory.state_bytes + memory.activation_bytes
    return memory.state_bytes // world_size + 3 * memory.block_bytes + memory.activation_bytes
