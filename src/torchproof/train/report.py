"""What a run leaves behind beside its weights: on what, how and how well it was trained."""

import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from torchproof import __version__
from torchproof.machine.environment import read_environment
from torchproof.rules.registry import judge
from torchproof.target.usercode import user_code
from torchproof.train import files
from torchproof.train.data import seeded
from torchproof.train.loop import Job
from torchproof.types import SCHEMA, Observation, ScalerSeen, TrainSeen
from torchproof.types.training import DataSeen, TrainReport

NUM_HASHED = 16  # samples, evenly spaced: enough to tell data sets apart, little enough for images


def report(job: Job) -> TrainReport:
    """The report of a run that has ended, by what it said of its steps."""
    request = job.request
    lines = files.read_metrics(job.run)
    steps = [line for line in lines if line.metrics is None]
    metrics = next((line.metrics for line in reversed(lines) if line.metrics is not None), {})
    seen: list[Observation] = [
        TrainSeen(
            target=request.target.reference,
            batch_size=request.batch_size,
            world_size=job.world_size,
            micro_batch_asked=request.micro_batch_asked,
            micro_batch_size=request.micro_batch_size,
            num_steps=len(steps),
            non_finite_steps=tuple(line.step for line in steps if line.loss is None),
            non_finite_metrics=tuple(name for name, value in metrics.items() if value is None),
        )
    ]
    if scaler := scaler_of(job, [line.scale for line in steps]):
        seen.append(scaler)
    return TrainReport(
        schema=SCHEMA,
        torchproof=__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=request.target,
        environment=read_environment(),
        strategy=request.strategy,
        precision=request.precision,
        eval_precision=request.precision,
        fp32_modules=request.fp32_modules,
        device=str(job.device),
        world_size=job.world_size,
        batch_size=request.batch_size,
        micro_batch_size=request.micro_batch_size,
        activation_checkpointing=request.activation_checkpointing,
        loading=request.loading,
        seed=request.seed,
        num_steps=job.state.step,
        num_epochs=-(-job.state.step // job.steps_per_epoch),
        train_data=fingerprint(job.train_data, job.num_train),
        eval_data=fingerprint(job.eval_data, job.num_eval),
        loss=steps[-1].loss if steps else None,
        metrics=metrics,
        findings=tuple(finding for observation in seen for finding in judge(observation)),
    )


def scaler_of(job: Job, scales: Sequence[float | None], run: str = "") -> ScalerSeen | None:
    """What the gradient scaler of a run that has ended did; None without one.

    Args:
        scales: of each step, as ``StepLine`` has them.
        run: see ``ScalerSeen``.
    """
    known = [scale for scale in scales if scale is not None]
    if not known:
        return None
    # The scale is lowered where a step was skipped and there only; at 0 it can't be, and every step is skipped.
    after = [*known[1:], float(job.state.scaler.get_scale())]
    skipped = [low < high or low == 0 for high, low in zip(known, after, strict=True)]
    return ScalerSeen(
        target=job.request.target.reference,
        run=run,
        num_steps=len(skipped),
        num_skipped=sum(skipped),
        num_skipped_last=len(list(itertools.takewhile(bool, reversed(skipped)))),
        first_scale=known[0],
        last_scale=after[-1],
    )


def fingerprint(dataset: Dataset[Any], num_samples: int) -> DataSeen:
    """Of data whose samples are the same each time they are asked for with the same random numbers."""
    digest = hashlib.sha256(str(num_samples).encode())
    indices = sorted({number * (num_samples - 1) // max(1, NUM_HASHED - 1) for number in range(NUM_HASHED)})
    with user_code("reading samples for the fingerprint"), seeded(0):
        for index in indices:
            _add(digest, dataset[index])
    return DataSeen(num_samples=num_samples, sha256=digest.hexdigest())


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _add(digest, part)
    else:
        digest.update(repr(value).encode())
