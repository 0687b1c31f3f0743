"""The loop: steps, evaluations, checkpoints; the same on one rank and on many."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchproof.errors import TargetError
from torchproof.target.recipe import Recipe
from torchproof.target.usercode import user_code
from torchproof.train.checkpoint import Checkpoints, State
from torchproof.train.data import make_loader, open_data, seed_all, to_device
from torchproof.train.order import Share, derive_seed, epoch_order, num_steps, shares
from torchproof.train.precision import autocast, keep_fp32
from torchproof.train.strategy import Wrapped, wrap
from torchproof.types.training import StepLine, TrainRequest

SUM, STOP, SAVE = range(3)  # what ranks tell each other after a step


class LostRankError(Exception):
    """Another rank has ended while this one waited for it."""


NOT_OF_THE_CODE = (torch.OutOfMemoryError, LostRankError)


@dataclass
class Job:
    """A run as one rank holds it."""

    request: TrainRequest
    recipe: Recipe
    run: Path
    device: torch.device
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        self.train_data, self.num_train = open_data(self.recipe, "train_data")
        self.eval_data, self.num_eval = open_data(self.recipe, "eval_data")
        seed_all(derive_seed("weights", self.request.seed))
        with user_code("model()"):
            model = self.recipe.model()
        if not isinstance(model, nn.Module):
            raise TargetError(f"model() returned a {type(model).__name__}", help="return the torch.nn.Module")
        keep_fp32(model, self.request.fp32_modules)
        self.wrapped: Wrapped = wrap(model, self.request, self.device)
        with user_code("optimizer()"):
            optimizer = self.recipe.optimizer(model)
        if not isinstance(optimizer, Optimizer):
            raise TargetError(f"optimizer() returned a {type(optimizer).__name__}", help="return a torch.optim one")
        with user_code("scheduler()"):
            scheduler = self.recipe.scheduler(optimizer)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.request.precision == "16-mixed")
        self.state = State(model, optimizer, scheduler, scaler)
        self.steps_per_epoch = num_steps(self.num_train, self.request.batch_size)
        self.last_step = self.request.num_steps or self.request.num_epochs * self.steps_per_epoch
        on_cuda = self.device.type == "cuda"
        self.loader, self.plan = make_loader(self.recipe, self.train_data, self.request.loading, pin_memory=on_cuda)
        self.eval_loader, self.eval_plan = make_loader(
            self.recipe, self.eval_data, self.request.loading, pin_memory=on_cuda
        )

    def step_shares(self, step: int, order: list[int]) -> list[Share]:
        """What this rank forwards in a step, counted from 0 over all epochs."""
        begin = step % self.steps_per_epoch * self.request.batch_size
        return shares(
            order[begin : begin + self.request.batch_size],
            rank=self.rank,
            world_size=self.world_size,
            micro_batch_size=self.request.micro_batch_size,
            seed=("samples", self.request.seed, step // self.steps_per_epoch),
        )


def train(job: Job, checkpoints: Checkpoints | None, say: Callable[[StepLine], None], stop: Callable[[], bool]) -> bool:
    """Trains from the state's step to the last one; ``say`` is called with every step and evaluation.

    Args:
        checkpoints: None keeps none: the run is measured, and leaves nothing behind.

    Returns:
        False where it was stopped before the last step, with a checkpoint of where.
    """
    state, request = job.state, job.request
    saved = time.monotonic()
    while state.step < job.last_step:
        epoch = state.step // job.steps_per_epoch
        end = min((epoch + 1) * job.steps_per_epoch, job.last_step)
        order = epoch_order(job.num_train, request.seed, epoch)
        steps = [job.step_shares(step, order) for step in range(state.step, end)]
        job.plan.shares = [share for step in steps for share in step]
        batches = iter(job.loader)
        job.wrapped.called.train()
        for step in steps:
            lr = state.optimizer.param_groups[0]["lr"]
            scale = state.scaler.get_scale() if state.scaler.is_enabled() else None
            told = torch.zeros(3, dtype=torch.float64)
            told[SUM] = _step(job, step, batches)
            told[STOP] = stop()
            told[SAVE] = job.rank == 0 and time.monotonic() - saved >= request.save_every_s
            dist.all_reduce(told)
            state.step += 1
            loss = _finite(told[SUM].item() / job.world_size)
            say(StepLine(step=state.step, epoch=epoch, loss=loss, lr=float(lr), scale=scale))
            if checkpoints is not None:
                checkpoints.poll()
                if told[SAVE] or told[STOP]:
                    checkpoints.save(state)
                    saved = time.monotonic()
            if told[STOP] and state.step < job.last_step:
                if checkpoints is not None:
                    checkpoints.finish()
                return False
        say(StepLine(step=state.step, epoch=epoch, metrics=evaluate(job)))
    if checkpoints is not None:
        checkpoints.save(state)
        checkpoints.finish()
    return True


def _step(job: Job, step: list[Share], batches: Iterator[Any]) -> float:
    """One optimizer step. The rank's part of the mean loss, times the number of ranks."""
    state, scaler = job.state, job.state.scaler
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=job.device)
    for number, share in enumerate(step):
        with user_code("loading a batch of train_data()"):
            batch = to_device(next(batches), job.device)
        seed_all(derive_seed("forward", job.request.seed, state.step, job.rank, number))
        with job.wrapped.micro_batch(last=number == len(step) - 1):
            loss = loss_of(job.recipe, job.wrapped.called, batch, job)
            with user_code("backward()", but=NOT_OF_THE_CODE), told_apart():
                scaler.scale(loss * share.weight).backward()
        total += loss.detach() * share.weight
    if job.request.max_grad_norm is not None:
        scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), job.request.max_grad_norm)
    with user_code("the optimizer's step()", but=NOT_OF_THE_CODE), told_apart():
        scaler.step(state.optimizer)
    scaler.update()
    if state.scheduler is not None:
        with user_code("the scheduler's step()"):
            state.scheduler.step()
    return total.item()


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """What is not the code's fault gets a class of its own: ``NOT_OF_THE_CODE``."""
    try:
        yield
    except MemoryError as exc:
        raise torch.OutOfMemoryError(str(exc)) from None
    except dist.DistError as exc:
        raise LostRankError(str(exc)) from None
    except RuntimeError as exc:
        if "DefaultCPUAllocator: can't allocate memory" in str(exc):
            raise torch.OutOfMemoryError(str(exc)) from None
        if "/gloo/" in str(exc):  # "[…/gloo/transport/tcp/pair.cc:537] Read error […]: Connection reset by peer"
            raise LostRankError(str(exc)) from None
        raise


def loss_of(recipe: Recipe, model: nn.Module, batch: Any, job: Job) -> Tensor:
    """What ``loss`` returns, under autocast.

    Raises:
        TargetError: it is no scalar, or nothing to go backward from.
    """
    with (
        user_code("loss()", but=NOT_OF_THE_CODE),
        told_apart(),
        autocast(job.request.precision, job.device),
    ):
        loss = recipe.loss(model, batch)
    if not isinstance(loss, Tensor):
        raise TargetError(f"loss() returned a {type(loss).__name__}", help="return the mean loss as a tensor")
    if loss.numel() != 1:
        raise TargetError(
            f"loss() returned a tensor of shape {tuple(loss.shape)}, no scalar", help="return its mean: loss.mean()"
        )
    if not loss.requires_grad:
        raise TargetError(
            "loss() returned a tensor without a graph", help="return what comes from model(...), without detach or item"
        )
    return loss.reshape(())


def evaluate(job: Job) -> dict[str, float | None]:
    """Means of the metrics over ``eval_data``; None for one that is no finite number."""
    batch_size = job.request.micro_batch_size * job.world_size
    seed = ("evaluation", job.request.seed)
    steps = [
        shares(
            range(begin, min(begin + batch_size, job.num_eval)),
            rank=job.rank,
            world_size=job.world_size,
            micro_batch_size=job.request.micro_batch_size,
            seed=seed,
        )
        for begin in range(0, job.num_eval, batch_size)
    ]
    job.eval_plan.shares = [share for step in steps for share in step]
    weights = [
        share.weight * min(batch_size, job.num_eval - number * batch_size)
        for number, step in enumerate(steps)
        for share in step
    ]
    sums: dict[str, float] = {}
    model = job.state.model
    model.eval()
    try:
        for batch, weight in zip(job.eval_loader, weights, strict=True):
            with (
                torch.no_grad(),
                user_code("metrics()", but=NOT_OF_THE_CODE),
                told_apart(),
                autocast(job.request.precision, job.device),
            ):
                found = job.recipe.metrics(model, to_device(batch, job.device))
            if not isinstance(found, Mapping):
                raise TargetError(f"metrics() returned a {type(found).__name__}", help="return {name: mean}")
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + (_number(value, name) * weight if weight else 0.0)
    finally:
        model.train()
    values = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64)
    dist.all_reduce(values)
    scale = job.num_eval * job.world_size
    return {name: _finite(value / scale) for name, value in zip(sorted(sums), values.tolist(), strict=True)}


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TargetError(
            f"metrics() returned {name!r} as a tensor of shape {tuple(value.shape)}",
            help="return its mean over the batch",
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TargetError(
            f"metrics() returned {name!r} as a {type(value).__name__}", help="return a number, or a scalar tensor"
        ) from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
