"""What a step needs of memory, before it is taken: it runs on fake tensors, which have sizes and no data."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from torchproof.target.recipe import Recipe
from torchproof.target.usercode import first_line, user_code
from torchproof.train.data import open_data
from torchproof.train.precision import autocast
from torchproof.train.strategy import blocks, checkpoint_activations
from torchproof.types.training import StepMemory, TrainPrecision


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators return while it is on, until nothing refers to them.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that was there before."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen[storage] = None
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, num_bytes)

    def _drop(self, num_bytes: int) -> None:
        self.now -= num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def measured_steps(recipe: Recipe, micro_batch_size: int, precision: TrainPrecision) -> Callable[[bool], StepMemory]:
    """What ``choose_strategy`` asks for, on the first samples of ``train_data``.

    Raises:
        TargetError, UserCodeError: the data, or what the recipe makes of it, can't be had.
    """
    dataset, length = open_data(recipe, "train_data")
    with user_code("reading samples of train_data()"):
        samples = [dataset[index] for index in range(min(micro_batch_size, length))]
    return lambda checkpointing: step_memory(
        recipe, samples, precision=precision, activation_checkpointing=checkpointing
    )


def step_memory(
    recipe: Recipe, samples: Sequence[Any], *, precision: TrainPrecision, activation_checkpointing: bool
) -> StepMemory:
    """Of one process that forwards these samples at once, from its second step on.

    Args:
        samples: of ``train_data``, as many as a micro-batch has.

    Returns:
        with ``refusal`` where the step doesn't run without data: the code looks at values.

    Raises:
        UserCodeError: ``model`` or ``collate`` raised.
    """
    with user_code("model()"):
        model = recipe.model()
    with user_code("collate()"):
        batch = recipe.collate(samples)
    parts = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks(model)]
    if activation_checkpointing:
        checkpoint_activations(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            _make_fake(model, mode)
            fake_batch = tree_map(
                lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch
            )
            memory = _two_steps(recipe, model, fake_batch, precision)
    except Exception as exc:  # noqa: BLE001  whatever the user's code or a fake operator raises
        return StepMemory(refusal=first_line(exc))
    return msgspec.structs.replace(memory, block_bytes=max(parts, default=memory.weight_bytes))


def _two_steps(recipe: Recipe, model: nn.Module, batch: Any, precision: TrainPrecision) -> StepMemory:
    optimizer = recipe.optimizer(model)
    live = Live()
    weights = list(model.parameters()) + list(model.buffers())
    for tensor in [*weights, *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))]:
        live.add(tensor)
    with live:
        for _ in range(2):
            live.peak = live.now
            optimizer.zero_grad(set_to_none=True)
            with autocast(precision, torch.device("cpu")):
                loss = recipe.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            optimizer.step()
    state = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor)]
    weight_bytes = _bytes(weights)
    gradient_bytes = _bytes(p.grad for p in model.parameters() if p.grad is not None)
    optimizer_bytes = _bytes(state)
    return StepMemory(
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=max(0, live.peak - weight_bytes - gradient_bytes - optimizer_bytes),
    )


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces parameters and buffers by fake ones; those that were one tensor stay one."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fake = known.get(id(parameter))
                if fake is None:
                    fake = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
                    known[id(parameter)] = fake
                module._parameters[name] = fake  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)


def _bytes(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())
