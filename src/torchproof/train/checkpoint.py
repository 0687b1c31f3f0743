"""Checkpoints: written while training goes on, whole or not there at all, read on as many ranks as there are then."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from torchproof.errors import RefusedError
from torchproof.target.usercode import first_line
from torchproof.train.files import CHECKPOINTS, finished_checkpoints, last_checkpoint

NUM_KEPT = 2


@dataclass
class State:
    """What a checkpoint holds beside the model and the optimizer, which are asked when it is taken."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: Any
    step: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For DCP: tensors by their names, sharded or not, and plain values."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else {},
            "scaler": self.scaler.state_dict(),
            "step": self.step,
        }


@dataclass
class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: its folder, which all ranks see.
    """

    run: Path
    _group: Any = None  # of its own: what is written in the background must not meet what training sends
    _saving: Future[Any] | None = None
    _saved: Path | None = field(default=None)

    def __post_init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.run / CHECKPOINTS

    def latest(self) -> Path | None:
        """The newest one that is whole; None where there is none."""
        return last_checkpoint(self.run)

    def save(self, state: State) -> None:
        """Takes the state now and writes it in the background; waits for the one before it.

        Raises:
            RefusedError: the one before it could not be written. The last whole one is still there.
        """
        self.finish()
        self._saved = self.folder / f"step-{state.step:010}"
        unfinished = self._saved.with_suffix(".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(self._group)
        saving = async_save(state.as_dict(), checkpoint_id=unfinished, process_group=self._group)
        assert isinstance(saving, Future)
        self._saving = saving

    def poll(self) -> None:
        """Finishes the one that is being written, where it is there; see ``save`` for errors."""
        if self._saving is not None and self._saving.done():
            self.finish()

    def finish(self) -> None:
        """Waits for the one that is being written; see ``save`` for errors."""
        if self._saving is None or self._saved is None:
            return
        saving, self._saving = self._saving, None
        unfinished = self._saved.with_suffix(".tmp")
        try:
            saving.result()
        except (Exception, CheckpointException) as exc:  # noqa: BLE001  the latter is a BaseException of its own
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            last = last_checkpoint(self.run)
            raise RefusedError(
                f"the checkpoint {self._saved} could not be written: {_cause(exc)}",
                help=f"make room; the same command goes on from {last.name if last else 'the start'}",
            ) from None
        if dist.get_rank() == 0:  # done here means that all ranks have written: the list of files comes last
            shutil.rmtree(self._saved, ignore_errors=True)
            unfinished.rename(self._saved)
            _sync(self.folder)
            for old in finished_checkpoints(self.run)[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, path: Path, state: State) -> None:
        """Puts a checkpoint into model, optimizer, scheduler and scaler, and sets ``step``.

        Raises:
            RefusedError: it is another model's, and names the first parameter that differs; or it can't be read.
        """
        wanted = state.as_dict()
        with _reading(path):
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
        if difference := _difference(wanted["model"], stored):
            raise RefusedError(
                f"{path} is a checkpoint of another model: {difference}",
                help="name another folder with -o, or train the recipe that it was made with",
            )
        # There is none where no step was taken yet, as in 16-mixed at first, or a parameter never had a gradient.
        states = wanted["optimizer"]["state"]
        for name in [name for name in states if not any(key.startswith(f"optimizer.state.{name}.") for key in stored)]:
            del states[name]
        with _reading(path):
            load(wanted, checkpoint_id=path)
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
            options=StateDictOptions(strict=False),  # for those parameters; what the model lacks was looked at above
        )
        if state.scheduler is not None:
            state.scheduler.load_state_dict(wanted["scheduler"])
        if wanted["scaler"]:
            state.scaler.load_state_dict(wanted["scaler"])
        state.step = wanted["step"]


def _difference(model: dict[str, Any], stored: dict[str, Any]) -> str:
    """The first parameter that only one of them has, or that has another shape; empty where there is none."""
    prefix = "model."
    for name, tensor in model.items():
        there = stored.get(prefix + name)
        if there is None:
            return f"it has no {name}"
        if tuple(there.size) != tuple(tensor.shape):
            return f"{name} is {list(there.size)} there and {list(tensor.shape)} here"
    for key in stored:
        if key.startswith(prefix) and key.removeprefix(prefix) not in model:
            return f"{key.removeprefix(prefix)} is in it only"
    return ""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as exc:  # noqa: BLE001  a file that is cut off raises many kinds
        raise RefusedError(
            f"the checkpoint {path} can't be read: {_cause(exc)}",
            help="delete this folder: the same command goes on from the one before it, or from the start",
        ) from None


def _cause(exc: BaseException) -> str:
    """The first line of what went wrong, on whichever rank."""
    if isinstance(exc, CheckpointException):
        exc = next(iter(exc.failures.values()))[0]
    return first_line(exc)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
