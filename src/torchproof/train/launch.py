"""Starts the ranks with torchrun's agent, which starts them again where one ends."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchproof.errors import TorchproofError, TrialError, UsageError, UserCodeError, revive
from torchproof.machine.cores import num_cores
from torchproof.machine.memory import usable_memory
from torchproof.train import files
from torchproof.types.training import Strategy, TrainReport, TrainRequest

MAX_RESTARTS = 3  # torchrun's own is 0; a run of weeks should survive a process
# glibc raises its own threshold to the size of what was freed, up to 32 MiB, and keeps weights that FSDP gathered and
# let go as free memory between others: measured, 893 MiB of a rank where 271 MiB were in use. With a fixed one the
# process gives them back, and steps take up to a fifth longer.
MMAP_THRESHOLD_BYTES = 1 << 20


@dataclass(frozen=True)
class Nodes:
    """The machines of a run.

    Attributes:
        rendezvous: ``host:port`` where they meet; empty for this machine alone.
    """

    num_nodes: int = 1
    num_processes: int = 1
    rendezvous: str = ""


class InterruptedRunError(Exception):
    """A signal has ended the run; its checkpoint is there."""


def launch(run: Path, request: TrainRequest, nodes: Nodes) -> TrainReport:
    """Runs it to its end, or until it can't go on.

    Raises:
        TorchproofError, UserCodeError: what a rank found.
        TrialError: a rank ended without a word, time and again.
        InterruptedRunError: by a signal.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    os.environ.update(prepare(run, request, nodes))
    # torch keeps one store for all attempts (pytorch issue 135712): a rank that is faster than another finds the
    # other's address of the attempt before there, and both wait for ever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=nodes.num_nodes,
        max_nodes=nodes.num_nodes,
        nproc_per_node=nodes.num_processes,
        run_id="torchproof",
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.rendezvous or "localhost:0",
        local_addr=None if nodes.rendezvous else "localhost",
        max_restarts=max_restarts(request),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "torchproof.train.worker", str(run))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        raise _found(run) or TrialError(
            "crashed", f"rank {rank} ended with exit code {failure.exitcode}, time and again"
        ) from None
    except SignalException:
        raise InterruptedRunError from None
    return finished(run)


def prepare(run: Path, request: TrainRequest, nodes: Nodes) -> dict[str, str]:
    """Writes the request into the run's folder.

    Returns:
        environment variables that the ranks need and the user has not set.

    Raises:
        UsageError: the folder can't be written, or holds another run.
    """
    _check_same(run, request)
    files.write_request(run, request)
    threads = request.loading.num_threads or max(1, num_cores() // nodes.num_processes)
    return rank_environment(request.strategy, threads)


def rank_environment(strategy: Strategy, num_threads: int) -> dict[str, str]:
    """Environment variables of a rank; what the user has set stays as it is."""
    wanted = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive"}
    if strategy == "fsdp" and not torch.cuda.is_available():
        wanted["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def max_restarts(request: TrainRequest) -> int:
    """Of all ranks: ``MAX_RESTARTS``, and one for each time that the micro-batch can be halved."""
    return MAX_RESTARTS + request.micro_batch_size.bit_length()


def finished(run: Path) -> TrainReport:
    """The report of a run that has ended.

    Raises:
        TorchproofError, UserCodeError: what a rank found.
    """
    if found := _found(run):
        raise found
    return files.read_report(run)


def _check_same(run: Path, request: TrainRequest) -> None:
    """Raises UsageError where the folder holds a run that this one can't go on from."""
    if files.last_checkpoint(run) is None:
        return
    before = files.read_request(run)
    for name in ("target", "batch_size", "seed"):
        was, is_now = getattr(before, name), getattr(request, name)
        if name == "target":
            was, is_now = (f"{target.path or target.module}:{target.name or ''}" for target in (was, is_now))
        if was != is_now:
            raise UsageError(
                f"{run} holds a run with {name} {was}, and now it is {is_now}",
                help="name another folder with -o, or delete this one",
            )


def _found(run: Path) -> TorchproofError | UserCodeError | None:
    error = files.read_error(run)
    return revive(error) if error else None  # type: ignore[return-value]


def device_bytes(num_processes: int) -> int:
    """Memory of one rank's device, where so many share this machine."""
    if torch.cuda.is_available():
        return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return usable_memory() // num_processes


def default_processes() -> int:
    """One for each GPU; one where there is none."""
    return max(1, torch.cuda.device_count())
