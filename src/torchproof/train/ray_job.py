"""Runs the ranks as a Ray Train job, on whichever machines a Ray cluster has: Ray places them and starts them again."""

import os
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from torchproof.errors import TrialError
from torchproof.train import files
from torchproof.train.launch import InterruptedRunError, Nodes, finished, max_restarts, prepare
from torchproof.train.rank import TIMEOUT, run_rank
from torchproof.types.training import TrainReport, TrainRequest

FOLDER = "ray"  # Ray's own, in the run's


def launch_on_ray(run: Path, request: TrainRequest, num_processes: int) -> TrainReport:
    """What ``launch`` does, on the cluster of ``RAY_ADDRESS``, or on one that is started on this machine.

    Args:
        run: the run's folder, which all of the cluster's machines see.

    Raises:
        As ``launch`` does.
    """
    run = run.resolve()
    variables = prepare(run, request, Nodes(1, num_processes))
    on_cuda = torch.cuda.is_available()
    trainer = TorchTrainer(
        _rank,
        train_loop_config={"run": str(run)},
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout_s=int(TIMEOUT.total_seconds())
        ),
        scaling_config=ScalingConfig(num_workers=num_processes, use_gpu=on_cuda),
        run_config=RunConfig(
            name=FOLDER,
            storage_path=str(run),
            failure_config=FailureConfig(max_failures=max_restarts(request)),
            worker_runtime_env={"env_vars": variables},  # type: ignore[call-arg] # of the version that runs
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as exc:
        if files.read_error(run):
            return finished(run)  # raises what the rank found
        raise TrialError("crashed", f"a rank ended, time and again: {str(exc).splitlines()[-1]}") from None
    except (KeyboardInterrupt, SystemExit):  # Ray's own handler of SIGINT exits
        raise InterruptedRunError from None
    return finished(run)


def _rank(config: dict[str, str]) -> None:
    """In each of Ray's workers, which have joined a process group already. What it raises has Ray start all again."""
    run = Path(config["run"])
    if files.read_error(run):
        return  # another rank has found that it can't be done: not again
    if code := run_rank(run, files.read_request(run)):
        raise RuntimeError(f"rank {os.environ['RANK']} ended with {code}")
