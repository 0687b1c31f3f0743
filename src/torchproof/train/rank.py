"""One rank of a run: sets up, goes on from the last checkpoint, trains, and says how it went."""

import contextlib
import datetime
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from torchproof.errors import RefusedError, TorchproofError, UserCodeError, describe
from torchproof.render.progress import Progress
from torchproof.target.recipe import open_recipe
from torchproof.target.usercode import first_line
from torchproof.train import files
from torchproof.train.checkpoint import Checkpoints
from torchproof.train.loop import Job, LostRankError, evaluation, train
from torchproof.train.report import report
from torchproof.types.training import StepLine, TrainRequest

TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's own default; a rank that waits longer has lost the others
STOPPED = 3  # exit code of a rank that was told to stop

AGAIN = "the same command goes on from the last checkpoint"
FEWER = "a smaller model, --precision bf16-mixed, or --strategy fsdp with more processes"


def run_rank(run: Path, request: TrainRequest) -> int:
    """Trains as the run's folder says.

    Returns:
        the exit code: 0 when it is done, 1 when it can't be done, which the folder then says, 3 when it was stopped.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device()
    is_ours = not dist.is_initialized()  # or Ray's
    if is_ours:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        job = Job(request, open_recipe(request.target), run, device, rank, world_size)
        checkpoints = Checkpoints(run)
        if resumed := checkpoints.latest():
            checkpoints.load(resumed, job.state)
        with Speaker(job) as say:
            step = job.state.step
            if resumed and (step % job.steps_per_epoch == 0 or step == job.last_step):
                say(evaluation(job))  # it may have been stopped before that
            if not train(job, checkpoints, say, _stopping()):
                return STOPPED
        weights = get_model_state_dict(
            job.state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if rank == 0:
            # Cloned: safetensors takes no two names for one tensor.
            cloned = {name: value.clone() for name, value in weights.items() if isinstance(value, torch.Tensor)}
            files.replace(run / files.WEIGHTS, lambda path: save_file(cloned, path))
            files.write_report(run, report(job))
    except torch.OutOfMemoryError as exc:
        if request.micro_batch_size > 1:
            files.halve_micro_batch(run, request)
            return 1  # the agent ends the other ranks, which wait for this one, and starts all again
        return _refuse(run, f"one sample at a time needs more memory than there is: {first_line(exc)}", FEWER)
    except LostRankError as exc:
        sys.stderr.write(f"rank {rank} has lost another one: {first_line(exc)}\n")
        return 1  # all are started again
    except OSError as exc:  # of the run's own files: what the user's code raises is a UserCodeError
        return _refuse(run, f"{run} can't be written: {exc.strerror or exc}", f"make room in it; {AGAIN}")
    except (TorchproofError, UserCodeError) as exc:
        files.write_error(run, describe(exc))
        return 1
    if is_ours:
        dist.destroy_process_group()
    return 0


def _refuse(run: Path, message: str, help: str) -> int:
    files.write_error(run, describe(RefusedError(message, help=help)))
    return 1


class Speaker:
    """Writes what a run says of its steps: on rank 0, to ``metrics.jsonl``, the terminal and TensorBoard."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._closing = contextlib.ExitStack()
        self._curves: Any = None

    def __enter__(self) -> "Speaker":
        step = self.job.state.step
        if self.job.rank == 0:
            self._file = self._closing.enter_context(files.open_metrics(self.job.run, step))
            self._progress = self._closing.enter_context(Progress())
            if self.job.request.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # only where it is installed

                self._curves = SummaryWriter(str(self.job.run / "tensorboard"), purge_step=step + 1)
                self._closing.callback(self._curves.close)
            if step:
                self._progress(f"goes on after step {step}", step / self.job.last_step)
        return self

    def __exit__(self, *args: Any) -> None:
        self._closing.close()

    def __call__(self, line: StepLine) -> None:
        if self.job.rank:
            return
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        if self._curves is not None:
            values = line.metrics or {"loss": line.loss, "lr": line.lr, "scale": line.scale}
            for name, value in values.items():
                if value is not None:
                    self._curves.add_scalar(name, value, line.step)
        if self._progress.is_terminal or line.metrics is not None:
            self._progress(_text(line, self.job), line.step / self.job.last_step)


def _text(line: StepLine, job: Job) -> str:
    epochs = -(-job.last_step // job.steps_per_epoch)
    where = f"epoch {line.epoch + 1}/{epochs}, step {line.step}/{job.last_step}"
    if line.metrics is None:
        return f"{where}, loss {_short(line.loss)}"
    return f"{where}: " + ", ".join(f"{name} {_short(value)}" for name, value in line.metrics.items())


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call] # before anything is seeded
    return device


def _stopping() -> Any:
    """Whether SIGTERM or SIGINT has come: the run ends after its step, with a checkpoint."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    if threading.current_thread() is threading.main_thread():  # Ray trains in another one, and ends it on its own
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
    return lambda: stopped
