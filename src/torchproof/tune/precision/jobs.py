"""What the fresh processes do: open the recipe, train one seed. Each class answers ``FreshProcess.call``."""

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchproof.target.recipe import open_recipe
from torchproof.train.loop import Job, evaluate, train
from torchproof.train.report import scaler_of
from torchproof.types import Target
from torchproof.types.training import StepLine, TrainRequest


def training_device() -> torch.device:
    """The first GPU; the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def open_job(request: TrainRequest) -> Job:
    """The run in this process alone. It leaves no files behind, so it has no folder."""
    return Job(request, open_recipe(request.target), Path(), training_device(), rank=0, world_size=1)


class Opening:
    """Opens the recipe and evaluates a batch, so that what is wrong shows before anything is trained."""

    def run(self, target: dict[str, Any], num_steps: int | None) -> dict[str, Any]:
        """The request that all trainings start from, the names of the metrics, the device and the steps."""
        found = msgspec.convert(target, Target)
        recipe = open_recipe(found)
        request = TrainRequest(
            target=found,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            num_epochs=recipe.num_epochs,
            num_steps=num_steps,
            micro_batch_asked=recipe.batch_size,
            micro_batch_size=recipe.batch_size,
            max_grad_norm=recipe.max_grad_norm,
        )
        _join_alone()
        job = open_job(request)
        job.num_eval = min(job.num_eval, request.micro_batch_size)
        return {
            "request": msgspec.to_builtins(request),
            "metrics": sorted(evaluate(job)),
            "device": str(job.device),
            "num_steps": job.last_step,
            "full_num_steps": request.num_epochs * job.steps_per_epoch,
        }


class Training:
    """Trains one seed in one precision."""

    def run(self, request: dict[str, Any], evaluate_first: bool) -> dict[str, Any]:
        """A ``SeedRun`` without its ``seed``; ``peak_bytes`` is 0 on the CPU, where the caller sees it."""
        _join_alone()
        asked = msgspec.convert(request, TrainRequest)
        job = open_job(asked)
        first = evaluate(job) if evaluate_first else {}
        watch = _Watch()
        train(job, None, watch, lambda: False)
        on_cuda = job.device.type == "cuda"
        return {
            "metrics": watch.metrics,
            "first_metrics": first,
            "num_steps": len(watch.step_s),
            "step_s": statistics.median(watch.step_s),
            "peak_bytes": torch.cuda.max_memory_allocated(job.device) if on_cuda else 0,
            "scaler": msgspec.to_builtins(scaler_of(job, watch.scales, f"{asked.precision}, seed {asked.seed}")),
        }


class _Watch:
    """What is said of a run, and the seconds of each step, data included."""

    def __init__(self) -> None:
        self.metrics: dict[str, float | None] = {}
        self.scales: list[float | None] = []
        self.step_s: list[float] = []
        self._before = time.perf_counter()

    def __call__(self, line: StepLine) -> None:
        if line.metrics is not None:
            self.metrics = line.metrics
        else:
            self.step_s.append(time.perf_counter() - self._before)
            self.scales.append(line.scale)
        self._before = time.perf_counter()


def _join_alone() -> None:
    """A group of one: what ranks tell each other, this one tells itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
