"""DDP where a step fits, FSDP where only its share does, activation checkpointing where nothing else helps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchproof as tp
from torchproof.render.training import arithmetic
from torchproof.train.fitting import USABLE_SHARE, choose_strategy, needed
from torchproof.train.memory import step_memory
from torchproof.types.training import StepMemory

MIB = 1 << 20
STEP = StepMemory(
    weight_bytes=100 * MIB,
    gradient_bytes=100 * MIB,
    optimizer_bytes=200 * MIB,
    activation_bytes=200 * MIB,
    block_bytes=10 * MIB,
)
AGAIN = StepMemory(
    weight_bytes=100 * MIB,
    gradient_bytes=100 * MIB,
    optimizer_bytes=200 * MIB,
    activation_bytes=20 * MIB,
    block_bytes=10 * MIB,
)


def measured(memory: StepMemory) -> Callable[[bool], StepMemory]:
    return lambda checkpointing: AGAIN if checkpointing else memory


@pytest.mark.parametrize(
    ("device_mib", "strategy", "checkpointing"),
    [
        (600 / USABLE_SHARE + 1, "ddp", False),
        (600 / USABLE_SHARE - 1, "fsdp", False),
        (430 / USABLE_SHARE + 1, "fsdp", False),  # half of 400 of state, 3 blocks of 10, 200 of activations
        (430 / USABLE_SHARE - 1, "fsdp", True),
        (1, "fsdp", True),
    ],
)
def test_the_sums_decide(device_mib: float, strategy: str, checkpointing: bool) -> None:
    choice = choose_strategy(measured(STEP), device_bytes=int(device_mib * MIB), world_size=2)
    assert (choice.strategy, choice.activation_checkpointing) == (strategy, checkpointing)
    text = arithmetic(choice)
    assert "weights 100 MiB + gradients 100 MiB + optimizer 200 MiB + activations 200 MiB = 600 MiB" in text
    assert ("when computed again" in text) == checkpointing


def test_more_ranks_need_less_each_with_fsdp_only() -> None:
    assert needed(STEP, "fsdp", 8) < needed(STEP, "fsdp", 2) < needed(STEP, "ddp", 2) == needed(STEP, "ddp", 8)


def test_what_cannot_be_known_is_said_and_ddp_is_the_plain_choice() -> None:
    choice = choose_strategy(measured(StepMemory(refusal="it looks at values")), device_bytes=1, world_size=2)
    assert choice.strategy == "ddp"
    assert "it looks at values" in arithmetic(choice)


class Wide(tp.Recipe):
    """Ten blocks that each keep (B, 256) inputs and pre-activations."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(10)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()


SAMPLES = list(torch.zeros(512, 256))
WEIGHTS = 10 * 2 * (256 * 256 + 256) * 4


def test_a_step_on_fake_tensors_has_the_sizes_of_a_real_one() -> None:
    """AdamW holds two copies of the weights, and a step count for each tensor; GELU and Linear keep their inputs."""
    memory = step_memory(Wide(), SAMPLES, precision="32-true", activation_checkpointing=False)
    assert memory.refusal == ""
    assert memory.weight_bytes == memory.gradient_bytes == WEIGHTS
    assert memory.optimizer_bytes == 2 * WEIGHTS + 40 * 4
    assert memory.block_bytes == WEIGHTS // 10
    kept = 10 * 2 * 512 * 256 * 4
    assert kept <= memory.activation_bytes <= 1.3 * kept


def test_activation_checkpointing_keeps_the_blocks_inputs_only() -> None:
    plain = step_memory(Wide(), SAMPLES, precision="32-true", activation_checkpointing=False)
    again = step_memory(Wide(), SAMPLES, precision="32-true", activation_checkpointing=True)
    assert again.refusal == ""
    assert again.activation_bytes < 0.75 * plain.activation_bytes
    assert again.state_bytes == plain.state_bytes


def test_bf16_needs_less_for_activations() -> None:
    plain = step_memory(Wide(), SAMPLES, precision="32-true", activation_checkpointing=False)
    mixed = step_memory(Wide(), SAMPLES, precision="bf16-mixed", activation_checkpointing=False)
    assert mixed.refusal == ""
    assert mixed.activation_bytes < 0.9 * plain.activation_bytes


class Looking(Wide):
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        return loss if loss.item() < 1e9 else loss * 0


def test_code_that_looks_at_values_is_refused_and_not_guessed() -> None:
    memory = step_memory(Looking(), SAMPLES, precision="32-true", activation_checkpointing=False)
    assert memory.refusal
    assert memory.state_bytes == 0
