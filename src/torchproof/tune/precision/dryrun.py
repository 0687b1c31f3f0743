"""Before anything is trained in 16-mixed: where it would overflow, and which modules have to stay in float32."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from torchproof.target.usercode import user_code
from torchproof.train.data import seed_all, to_device
from torchproof.train.loop import Job, loss_of
from torchproof.train.order import derive_seed, epoch_order, shares
from torchproof.train.precision import autocast, keep_fp32
from torchproof.tune.precision.jobs import open_job
from torchproof.tune.precision.overflow import OverflowFinder
from torchproof.types.precision import Overflow
from torchproof.types.training import TrainPrecision, TrainRequest

NUM_BATCHES = 4  # micro-batches of train_data; and one of eval_data
MAX_ROUNDS = 8  # an island can make the next module overflow, as it hands on what float16 would have cut off
FIRST_SCALE = 2.0**16  # torch.amp.GradScaler's own
LAST_SCALE = 2.0**-16  # the scaler goes below 1 where it has to; from here on float16 has nothing left of gradients


class Rehearsal:
    """Micro-batches through the model with its first weights; a new model each time."""

    def open(self, request: dict[str, Any]) -> int:
        """Loads the micro-batches; how many there are."""
        self.job = job = open_job(msgspec.convert(request, TrainRequest))
        order = epoch_order(job.num_train, job.request.seed, 0)
        steps = range(min(NUM_BATCHES, job.steps_per_epoch))
        job.plan.shares = [share for step in steps for share in job.step_shares(step, order)][:NUM_BATCHES]
        with user_code("loading a batch of train_data()"):
            self.batches = [to_device(batch, job.device) for batch in job.loader]
        indices = range(min(job.num_eval, job.request.micro_batch_size))
        job.eval_plan.shares = shares(
            indices, rank=0, world_size=1, micro_batch_size=len(indices), seed=("evaluation", job.request.seed)
        )
        with user_code("loading a batch of eval_data()"):
            (self.eval_batch,) = (to_device(batch, job.device) for batch in job.eval_loader)
        return len(self.batches)

    def overflows(self) -> list[dict[str, Any]]:
        """Those of 16-mixed without islands, as ``Overflow``."""
        self.found = self._overflows(())
        return [msgspec.to_builtins(overflow) for overflow in self.found]

    def islands(self) -> list[str]:
        """The fewest modules to keep in float32 so that none of ``overflows`` and no other is left; none where there
        is no such set: what overflows is in the model's own forward, or in the loss."""
        islands: list[str] = []
        found = self.found
        for _ in range(MAX_ROUNDS):
            if not found:
                return self._fewest(islands)
            islands += sorted({overflow.module for overflow in found} - set(islands))
            if "" in islands:
                return []
            found = self._overflows(islands)
        return []

    def verify(self, islands: list[str]) -> dict[str, Any]:
        """``loss_32``, ``loss_16``, ``scale`` and ``lost_metrics`` of a ``DryRun``, from 16-mixed itself."""
        loss_32, metrics_32, _ = self._run("32-true", ())
        loss_16, metrics_16, scale = self._run("16-mixed", islands)
        lost = [
            name for name, value in metrics_32.items() if math.isfinite(value) and not math.isfinite(metrics_16[name])
        ]
        return {"loss_32": _finite(loss_32), "loss_16": _finite(loss_16), "scale": scale, "lost_metrics": lost}

    def _fewest(self, islands: list[str]) -> list[str]:
        """Without those that are of no use once the others are there."""
        for name in list(islands):
            others = [other for other in islands if other != name]
            if not self._overflows(others):
                islands = others
        return islands

    def _overflows(self, islands: Sequence[str]) -> list[Overflow]:
        job = self._in("bf16-mixed")
        model = self._model(islands)
        with OverflowFinder(model) as finder:
            for number, batch in enumerate(self.batches):
                finder.phase = "forward"
                loss = self._loss(job, model, batch, number)
                finder.phase = "backward"
                with user_code("backward()"):
                    loss.backward()  # type: ignore[no-untyped-call]
                model.zero_grad(set_to_none=True)
            finder.phase = "evaluation"
            self._metrics(job, model)
        return list(finder.found.values())

    def _run(self, precision: TrainPrecision, islands: Sequence[str]) -> tuple[float, dict[str, float], float | None]:
        """The mean loss, the metrics, and the largest scale at which the gradients of all micro-batches are finite."""
        job = self._in(precision)
        model = self._model(islands)
        losses = []
        scale = FIRST_SCALE if precision == "16-mixed" else None
        for number, batch in enumerate(self.batches):
            loss = self._loss(job, model, batch, number)
            losses.append(loss.item())
            scale = _finite_at(loss, model, scale)
        return sum(losses) / len(losses), self._metrics(job, model), scale

    def _metrics(self, job: Job, model: nn.Module) -> dict[str, float]:
        model.eval()
        with torch.no_grad(), user_code("metrics()"), autocast(job.request.precision, job.device):
            return {name: float(value) for name, value in job.recipe.metrics(model, self.eval_batch).items()}

    def _loss(self, job: Job, model: nn.Module, batch: Any, number: int) -> Tensor:
        seed_all(derive_seed("forward", job.request.seed, 0, 0, number))
        return loss_of(job.recipe, model, batch, job)

    def _in(self, precision: TrainPrecision) -> Job:
        job = copy.copy(self.job)  # with the same data
        job.request = msgspec.structs.replace(self.job.request, precision=precision)
        return job

    def _model(self, islands: Sequence[str]) -> nn.Module:
        seed_all(derive_seed("weights", self.job.request.seed))
        with user_code("model()"):
            model = self.job.recipe.model()
        keep_fp32(model, islands)
        return model.to(self.job.device).train()


def _finite_at(loss: Tensor, model: nn.Module, scale: float | None) -> float | None:
    """The largest scale up to this one, halved as the scaler does, at which the gradients are finite; None: none is."""
    while scale is not None and scale >= LAST_SCALE:
        model.zero_grad(set_to_none=True)
        with user_code("backward()"):
            (loss * scale).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        if all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
            return scale
        scale /= 2
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
