"""The loop: steps, evaluations, checkpoints; the same on one rank and on many."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
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

# Ranks tell each other their losses after several steps, where those are fast: on two cores it takes 0.8 ms.
TELL_S = 0.1
MAX_STEPS_BETWEEN = 64


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
        if self.recipe.num_epochs != self.request.num_epochs:
            with user_code("setting num_epochs"):
                self.recipe.num_epochs = self.request.num_epochs  # a scheduler may go by it
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


@dataclass(frozen=True)
class Told:
    """What all ranks know after they have told each other.

    Attributes:
        losses: mean of each step since the last time; None where it was no finite number.
        stop: a rank was asked to stop.
        save: it is time for a checkpoint.
        step_s: mean seconds of a step, of all ranks.
    """

    losses: list[float | None]
    stop: bool
    save: bool
    step_s: float


def train(job: Job, checkpoints: Checkpoints | None, say: Callable[[StepLine], None], stop: Callable[[], bool]) -> bool:
    """Trains from the state's step to the last one; ``say`` is called with every step and evaluation.

    Args:
        checkpoints: None keeps none: the run is measured, and leaves nothing behind.

    Returns:
        False where it was stopped before the last step, with a checkpoint of where.
    """
    state, request = job.state, job.request
    saved = began = time.monotonic()
    num_between = 1  # steps until the ranks tell each other
    while state.step < job.last_step:
        epoch = state.step // job.steps_per_epoch
        end = min((epoch + 1) * job.steps_per_epoch, job.last_step)
        order = epoch_order(job.num_train, request.seed, epoch)
        steps = [job.step_shares(step, order) for step in range(state.step, end)]
        job.plan.shares = [share for step in steps for share in step]
        batches = iter(job.loader)
        job.wrapped.called.train()
        lines: list[StepLine] = []
        losses: list[Tensor] = []
        for step in steps:
            if not lines:
                began = time.monotonic()
            lr = state.optimizer.param_groups[0]["lr"]
            scale = state.scaler.get_scale() if state.scaler.is_enabled() else None
            losses.append(take_step(job, step, batches))
            state.step += 1
            lines.append(StepLine(step=state.step, epoch=epoch, lr=float(lr), scale=scale))
            if len(lines) < num_between and state.step < end:
                continue
            mine = torch.stack(losses).double().cpu()  # waits for an accelerator: seconds are those of its work
            now = time.monotonic()
            save = job.rank == 0 and now - saved >= request.save_every_s
            told = _tell(job, mine, stop=stop(), save=save, seconds=now - began)
            num_between = steps_between(told.step_s, num_between, request.save_every_s)
            for line, loss in zip(lines, told.losses, strict=True):
                say(msgspec.structs.replace(line, loss=loss))
            lines.clear()
            losses.clear()
            if checkpoints is not None:
                checkpoints.poll()
                if told.save or told.stop:
                    checkpoints.save(state)
                    saved = time.monotonic()
            if told.stop and state.step < job.last_step:
                if checkpoints is not None:
                    checkpoints.finish()
                return False
        say(evaluation(job))
    if checkpoints is not None:
        checkpoints.save(state)
        checkpoints.finish()
    return True


def _tell(job: Job, losses: Tensor, *, stop: bool, save: bool, seconds: float) -> Told:
    """One collective, in which all ranks take part after the same step.

    Args:
        losses: of the steps since the last time, as ``take_step`` returns them; (num_steps,).
        seconds: that they took.
    """
    # Whole microseconds add up to the same number in any order: each rank has to draw the same conclusion from it.
    facts = [float(stop), float(save), float(round(seconds * 1e6))]
    told = torch.cat([losses, torch.tensor(facts, dtype=torch.float64)])
    with told_apart():
        dist.all_reduce(told)
    *sums, stops, saves, all_us = told.tolist()
    return Told(
        losses=[_finite(total / job.world_size) for total in sums],
        stop=stops > 0,
        save=saves > 0,
        step_s=all_us / 1e6 / job.world_size / len(losses),
    )


def steps_between(step_s: float, before: int, save_every_s: float) -> int:
    """As many as take TELL_S, or the time between checkpoints; at most twice as many as before."""
    wanted = int(min(TELL_S, save_every_s) / step_s) if step_s else MAX_STEPS_BETWEEN
    return max(1, min(wanted, 2 * before, MAX_STEPS_BETWEEN))


def take_step(job: Job, step: list[Share], batches: Iterator[Any]) -> Tensor:
    """One optimizer step. The rank's part of the mean loss, times the number of ranks; on the device."""
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
    return total


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


def evaluation(job: Job) -> StepLine:
    """The line of one that follows the step just taken."""
    step = job.state.step
    return StepLine(step=step, epoch=(step - 1) // job.steps_per_epoch, metrics=evaluate(job))


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
        for number, (batch, weight) in enumerate(zip(job.eval_loader, weights, strict=True)):
            seed_all(derive_seed("metrics", job.request.seed, job.rank, number))
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
    with told_apart():
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
