"""One process that trains as ``train`` does: opens the recipe, walks through its epochs, takes timed steps."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchproof.errors import TrialError, UserCodeError
from torchproof.target.recipe import open_recipe
from torchproof.target.usercode import user_code
from torchproof.train.data import seeded
from torchproof.train.loop import Job, take_step
from torchproof.train.order import Share, epoch_order
from torchproof.types import Target
from torchproof.types.training import Loading, TrainRequest

WARM_UP_S = 0.3
TIMED_S = 0.2

Step = list[Share]


def open_job(target: Target, loading: Loading) -> Job:
    """The recipe on one process, in full precision, as ``train`` would open it.

    Raises:
        TargetError, UserCodeError: as ``train``.
    """
    recipe = open_recipe(target)
    request = TrainRequest(
        target=target,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        num_epochs=recipe.num_epochs,
        micro_batch_asked=recipe.batch_size,
        micro_batch_size=recipe.batch_size,
        max_grad_norm=recipe.max_grad_norm,
        loading=loading,
    )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    job = Job(request, recipe, Path(), device, rank=0, world_size=1)
    job.state.scheduler = None  # one that ends with the run would raise: more steps are taken here than it has
    return job


def epochs(job: Job, begin: float = 0.0) -> Iterator[list[Step]]:
    """Each epoch's steps, without end.

    Args:
        begin: the part of the first epoch that is left out: who begins elsewhere finds no other's files in the cache.
    """
    for epoch in itertools.count():
        order = epoch_order(job.num_train, job.request.seed, epoch)
        first = 0 if epoch else int(begin * job.steps_per_epoch)
        here = range(epoch * job.steps_per_epoch + first, (epoch + 1) * job.steps_per_epoch)
        yield [job.step_shares(step, order) for step in here]


def read(job: Job, share: Share) -> list[Any]:
    """The samples of a share, as the loader reads them.

    Raises:
        UserCodeError: names the sample that raised.
    """
    shared: Any = job.loader.dataset
    try:
        return list(shared.__getitems__(share))
    except Exception:
        with seeded(share.seed):
            for index in share.indices:
                with user_code(f"train_data()[{index}]"):
                    job.train_data[index]
        with user_code("train_data().__getitems__()"):
            raise


def blame(job: Job, share: Share) -> None:
    """Reads and collates a share again, in this process, after a loader that raised.

    Raises:
        UserCodeError: it is a sample, which is named, or collate.
    """
    samples = read(job, share)
    with user_code("collate()"):
        job.recipe.collate(samples)


class Training:
    """Trains in turns with others. Answers ``FreshProcess.call``."""

    def open(self, target: dict[str, Any], loading: dict[str, Any], begin: float, in_order: bool) -> float:
        """Starts its workers and takes a few steps, with what they brought while nobody waited for it left out.

        Returns:
            seconds of a step: a first idea.
        """
        self.job = open_job(msgspec.convert(target, Target), msgspec.convert(loading, Loading))
        self.job.loader.in_order = in_order
        self._steps = self._train(begin)
        settings = self.job.request.loading
        self._run(WARM_UP_S, settings.num_workers * settings.prefetch_factor + 1)
        start = time.perf_counter()
        num_steps = self._run(TIMED_S, max(2, settings.num_workers))
        return (time.perf_counter() - start) / num_steps

    def run(self, num_steps: int) -> float:
        """Seconds of so many steps, loading included."""
        start = time.perf_counter()
        for _ in range(num_steps):
            next(self._steps)
        return time.perf_counter() - start

    def _run(self, least_s: float, least: int) -> int:
        end, done = time.perf_counter() + least_s, 0
        while done < least or time.perf_counter() < end:
            next(self._steps)
            done += 1
        return done

    def _train(self, begin: float) -> Iterator[None]:
        job = self.job
        job.wrapped.called.train()
        for steps in epochs(job, begin):
            job.plan.shares = [share for step in steps for share in step]
            with user_code("starting the workers"):
                batches = iter(job.loader)
            for step in steps:
                try:
                    take_step(job, step, batches).item()
                except UserCodeError as exc:
                    if exc.doing.startswith("loading a batch"):
                        for share in step:
                            blame(job, share)
                        if job.request.loading.num_workers:  # it happens in a worker only
                            raise TrialError("failed", exc.trace.strip().rpartition("\n")[2]) from None
                    raise
                job.state.step += 1
                yield
