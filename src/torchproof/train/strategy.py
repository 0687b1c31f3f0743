"""One process, DDP or FSDP: what is called in forward, and when gradients travel."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torchproof.types.training import TrainRequest


@dataclass(frozen=True)
class Wrapped:
    """A model that is ready to train.

    Attributes:
        model: the user's own, with the parameters.
        called: what ``loss`` gets; the same, or DDP around it.
    """

    model: nn.Module
    called: nn.Module

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients travel after the last micro-batch of a step only."""
        if isinstance(self.called, DistributedDataParallel) and not last:
            with self.called.no_sync():
                yield
            return
        if isinstance(self.called, FSDPModule):
            self.called.set_requires_gradient_sync(last)
        yield


def wrap(model: nn.Module, request: TrainRequest, device: torch.device) -> Wrapped:
    """Moves the model to its device and makes it train with the other ranks."""
    strategy, precision = request.strategy, request.precision
    model.to(device)
    if request.activation_checkpointing:
        checkpoint_activations(model)
    if strategy == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return Wrapped(model, DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True))
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return Wrapped(model, model)


def checkpoint_activations(model: nn.Module) -> None:
    """Makes the model's blocks keep their inputs only; what they computed is computed again in backward."""
    for block in blocks(model):
        block.forward = _computed_again(block.forward)


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def computed_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return computed_again


def blocks(model: nn.Module) -> list[nn.Module]:
    """What FSDP gathers at once: the members of lists of modules, as transformers keep their layers in; where there is
    no such list, the model's children."""
    listed = [
        member
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for member in module
        if any(True for _ in member.parameters())
    ]
    inner = {id(other) for member in listed for other in member.modules() if other is not member}
    outermost = [member for member in listed if id(member) not in inner]
    return outermost or [child for child in model.children() if any(True for _ in child.parameters())]
