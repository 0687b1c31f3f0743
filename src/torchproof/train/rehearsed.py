"""One rank of a rehearsal: looks at what the recipe gives here, and takes a few steps as in training.

Its methods are called in this order, each on all ranks before the next one: ``open``, ``draws`` on one rank alone,
``samples``, ``weights``, ``prepare``; then ``gradients``, ``train`` and ``go_on`` where it trains, or ``load`` and
``go_on`` where it resumes.
"""

import datetime
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, Subset

from torchproof.errors import TargetError
from torchproof.target.recipe import Recipe, open_recipe
from torchproof.target.usercode import user_code
from torchproof.train.checkpoint import Checkpoints
from torchproof.train.compare import spread
from torchproof.train.data import make_loader, open_data, seed_all, seeded
from torchproof.train.files import CHECKPOINTS
from torchproof.train.fingerprints import attributes, digest, parts, stored, tensors
from torchproof.train.loop import Job, loss_of, train
from torchproof.train.order import Share, derive_seed, epoch_order
from torchproof.types import Target
from torchproof.types.training import Loading, StepLine, TrainRequest

MAX_BATCH_SIZE = 8  # of all ranks: four samples for each are enough for statistics over a batch
NUM_TRAIN_SAMPLES = 32  # four steps of the largest batch
NUM_EVAL_SAMPLES = 8
ROUNDING = 2.0**-20  # of a parameter's largest value: 8 times the precision of float32
MOST = 1e9  # a difference as large as JSON can carry it: a value that is finite on one side only


class LocalBatchNorm(BatchNorm):
    """In place of ``SyncBatchNorm``, which DDP refuses without a GPU: each rank has statistics of its own."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dims, as there."""


class Prepared:
    """The user's recipe with what it has returned already: the model, and a few samples of the data.

    Attributes:
        batches: a hash of each batch that ``loss`` got.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, data: dict[str, Dataset[Any]]) -> None:
        self.recipe = recipe
        self.batches: list[str] = []
        self._model = model
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recipe, name)

    def model(self) -> nn.Module:
        return self._model

    def train_data(self) -> Dataset[Any]:
        return self._data["train_data"]

    def eval_data(self) -> Dataset[Any]:
        return self._data["eval_data"]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches.append(digest(batch))
        return self.recipe.loss(model, batch)


class Parts:
    """In place of a recipe's ``collate``: a batch is the hashes of its samples' parts, made where they are loaded."""

    @staticmethod
    def collate(samples: Sequence[Any]) -> list[list[str]]:
        return [list(parts(sample)) for sample in samples]


class RehearsedRank:
    """See the module."""

    recipe: Recipe
    model: nn.Module
    job: Job
    checkpoints: Checkpoints

    def open(self, target: dict[str, Any], run: str, group: str, wait_s: float) -> dict[str, int]:
        """Joins the process group and opens the data; the length of each dataset."""
        self.target, self.run = msgspec.convert(target, Target), Path(run)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(self.run / f"{group}.store"), self.world_size)  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=wait_s)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        self.recipe = open_recipe(self.target)
        self.data = {name: open_data(self.recipe, name) for name in ("train_data", "eval_data")}
        return {name: length for name, (_, length) in self.data.items()}

    def draws(self, epochs: list[list[int]], wait_s: float) -> list[list[list[str]]]:
        """The parts of the samples as two DataLoader workers read them, in turns: by epoch and place."""
        dataset, _ = self.data["train_data"]
        loading = Loading(num_workers=2, persistent_workers=False)
        loader, plan = make_loader(cast(Recipe, Parts()), dataset, loading, pin_memory=False)
        loader.timeout = wait_s  # a worker that hangs is no reason to hang
        found = []
        for indices in epochs:
            plan.shares = [Share((index,), 1.0, seed=0) for index in indices]
            with user_code("reading samples of train_data() in two DataLoader workers"):
                found.append([sample for batch in loader for sample in batch])
        return found

    def samples(self, name: str, indices: list[int]) -> list[list[list[str]]]:
        """The parts of these samples, read twice with the same random numbers: by reading and index."""
        dataset: Any = self.data[name][0]
        several = getattr(dataset, "__getitems__", None)
        found: list[list[list[str]]] = []
        with user_code(f"reading samples of {name}()"):
            for _ in range(2):
                found.append([])
                for index in indices:
                    with seeded(0):
                        sample = several([index])[0] if several else dataset[index]
                    found[-1].append(list(parts(sample)))
        return found

    def weights(self) -> dict[str, tuple[str, str]]:
        """Calls ``model()`` as training does; shape and hash of each parameter and buffer."""
        seed_all(derive_seed("weights", self.recipe.seed))
        with user_code("model()"):
            self.model = self.recipe.model()
        if not isinstance(self.model, nn.Module):
            raise TargetError(f"model() returned a {type(self.model).__name__}", help="return the torch.nn.Module")
        for name, tensor in itertools.chain(self.model.named_parameters(), self.model.named_buffers()):
            if is_lazy(tensor):
                raise TargetError(
                    f"model() returned {name} without a shape, which DDP refuses",
                    help="call the network once in model(), before it is returned",
                )
        for module in self.model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = LocalBatchNorm  # type: ignore[assignment] # on purpose
        return tensors(self.model, buffers=True)

    def prepare(self) -> int:
        """Makes the job of a training run with DDP, on a few samples; the samples of a step."""
        limits = {"train_data": NUM_TRAIN_SAMPLES, "eval_data": NUM_EVAL_SAMPLES}
        few: dict[str, Dataset[Any]] = {
            name: Subset(dataset, spread(length, limits[name])) for name, (dataset, length) in self.data.items()
        }
        self.prepared = Prepared(self.recipe, self.model, few)
        batch_size = max(self.world_size, min(self.recipe.batch_size, MAX_BATCH_SIZE))
        request = TrainRequest(
            target=self.target,
            strategy="ddp",
            batch_size=batch_size,
            seed=self.recipe.seed,
            num_epochs=1,
            micro_batch_asked=-(-batch_size // self.world_size),
            micro_batch_size=-(-batch_size // self.world_size),
            max_grad_norm=self.recipe.max_grad_norm,
        )
        recipe = cast(Recipe, self.prepared)
        self.job = Job(request, recipe, self.run, torch.device("cpu"), self.rank, self.world_size)
        dist.barrier()  # before a wait that has a longer limit
        self.checkpoints = Checkpoints(self.run)
        return batch_size

    def gradients(self, num_batches: int) -> dict[str, int]:
        """Batches after which a parameter has no gradient, by its name; DDP is not called, so no rank waits.

        They are those of the first steps of training, with the same random numbers: a layer that is left out at random
        is left out here and there.
        """
        job, model, seed = self.job, self.job.state.model, self.job.request.seed
        missing = {name: 0 for name, parameter in model.named_parameters() if parameter.requires_grad}
        orders = [epoch_order(job.num_train, seed, step // job.steps_per_epoch) for step in range(num_batches)]
        job.plan.shares = [job.step_shares(step, order)[0] for step, order in enumerate(orders)]
        model.train()
        batches = iter(job.loader)
        for step in range(num_batches):
            with user_code("loading a batch of train_data()"):
                batch = next(batches)
            model.zero_grad(set_to_none=True)
            seed_all(derive_seed("forward", seed, step, self.rank, 0))
            loss = loss_of(job.recipe, model, batch, job)
            with user_code("backward()"):
                loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                if name in missing and parameter.grad is None:
                    missing[name] += 1
        model.zero_grad(set_to_none=True)
        return missing

    def train(self, num_steps: int) -> dict[str, Any]:
        """Trains so many steps, evaluates and saves a checkpoint.

        Returns:
            ``weights``, shape and hash of each parameter after that; ``finite``, whether all losses are.
        """
        finite = self._train_until(num_steps)
        return {"weights": tensors(self.job.state.model, buffers=False), "finite": finite}

    def _train_until(self, step: int) -> bool:
        """Whether the losses on the way are finite."""
        lines: list[StepLine] = []
        self.job.last_step = step
        train(self.job, self.checkpoints, lines.append, lambda: False)
        return all(line.loss is not None for line in lines if line.metrics is None)

    def load(self, num_steps: int) -> None:
        """Loads the checkpoint of that step."""
        self.checkpoints.load(self.run / CHECKPOINTS / f"step-{num_steps:010}", self.job.state)

    def go_on(self, save_as: str) -> dict[str, Any]:
        """Takes one more step; rank 0 writes the parameters.

        Returns:
            ``stored`` and ``attributes`` before it, its ``batches``, and ``finite``, whether its loss is.
        """
        job = self.job
        before = {
            "stored": stored(job.state.as_dict()),
            "attributes": attributes(job.state.model, job.state.optimizer, self.recipe),
        }
        self._save(f"{save_as}-before")
        self.prepared.batches.clear()
        finite = self._train_until(job.state.step + 1)
        self._save(f"{save_as}-after")
        return {**before, "batches": self.prepared.batches, "finite": finite}

    def step_diff(self, one: str, other: str) -> tuple[float, str]:
        """The largest difference between the parameters after two steps, by the largest change of the first step.

        Returns:
            the difference, 0 where all of it is rounding, and the parameter's name.
        """
        before, after, others = (
            load_file(self.run / f"{name}.safetensors") for name in (f"{one}-before", f"{one}-after", f"{other}-after")
        )
        change = max((_largest(after[name] - before[name]) for name in after), default=0.0)
        worst, where = 0.0, ""
        for name, values in after.items():
            same = (values == others[name]) | (values.isnan() & others[name].isnan())
            diff = _largest(torch.where(same, 0.0, values - others[name]))
            if diff > ROUNDING * _largest(values) and diff > worst:
                worst, where = diff, name
        return (min(worst / change, MOST) if change else MOST if worst else 0.0), where

    def _save(self, name: str) -> None:
        if self.rank == 0:
            named = self.job.state.model.named_parameters()
            values = {key: value.detach().clone().contiguous() for key, value in named}
            save_file(values, self.run / f"{name}.safetensors")


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    largest = values.abs().max().item()
    return float(largest) if largest < MOST else MOST
