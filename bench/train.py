"""What `torchproof train` costs beside hand-written PyTorch, and what FSDP saves. Writes bench/results/train.md.

    python -m bench.train

Two ranks on this machine. The overhead is that of whole epochs: data, forward, backward, gradients, optimizer, what the
loop says of its steps, and an evaluation; both loops take turns in the same two processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchproof as tp
from torchproof.machine.environment import read_environment
from torchproof.measure.interleave import interleave
from torchproof.render import units
from torchproof.train.launch import rank_environment
from torchproof.train.loop import Job, train
from torchproof.types import Target
from torchproof.types.training import Strategy, TrainRequest

RESULT = Path(__file__).parent / "results" / "train.md"
NUM_RANKS = 2
NUM_STEPS = 20  # of a block, which is an epoch
NUM_MEMORY_STEPS = 6
BUDGET_S = 240.0
MIB = 1 << 20


class Steps(tp.Recipe):
    """An MLP of a few milliseconds a step, on random numbers."""

    batch_size = 128
    width, num_layers, num_samples = 512, 4, NUM_STEPS * batch_size

    def model(self) -> nn.Module:
        layers = [layer for _ in range(self.num_layers) for layer in (nn.Linear(self.width, self.width), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def train_data(self) -> TensorDataset:
        return self._data(self.num_samples)

    def eval_data(self) -> TensorDataset:
        return self._data(1)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}

    def _data(self, number: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(number, self.width, generator=generator), torch.randint(10, (number,), generator=generator)
        )


class Large(Steps):
    """128 MiB of weights, so 512 MiB with gradients and AdamW's state."""

    width, num_layers, num_samples, batch_size = 2048, 8, 64, 8


def open_job(recipe: tp.Recipe, strategy: Strategy) -> Job:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    request = TrainRequest(
        target=Target(reference="bench/train.py", kind="python"),
        strategy=strategy,
        batch_size=recipe.batch_size,
        seed=0,
        num_epochs=10**6,
        micro_batch_asked=recipe.batch_size // world_size,
        micro_batch_size=recipe.batch_size // world_size,
        max_grad_norm=None,
    )
    return Job(request, recipe, Path(), torch.device("cpu"), rank, world_size)


def ours(recipe: tp.Recipe) -> Callable[[int], list[float]]:
    job = open_job(recipe, "ddp")

    def block(number: int) -> list[float]:
        dist.barrier()
        start = time.perf_counter()
        job.last_step = job.state.step + NUM_STEPS
        train(job, None, lambda line: None, lambda: False)
        return [time.perf_counter() - start]

    return block


def by_hand(recipe: tp.Recipe) -> Callable[[int], list[float]]:
    model = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(model)
    data, held_out = recipe.train_data(), recipe.eval_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader: DataLoader[Any] = DataLoader(data, batch_size=recipe.batch_size // NUM_RANKS, sampler=sampler)

    def block(number: int) -> list[float]:
        dist.barrier()
        start = time.perf_counter()
        sampler.set_epoch(number)
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = recipe.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(held_out, batch_size=recipe.batch_size):
                float(recipe.metrics(model, batch)["loss"])
        model.train()  # type: ignore[no-untyped-call]
        return [time.perf_counter() - start]

    return block


def overhead() -> dict[str, Any]:
    """Rank 0 decides when it is enough; the other one does as many blocks as it is told to."""
    hand, own = by_hand(Steps()), ours(Steps())
    for block in (hand, own):
        block(0)

    def together(block: Callable[[int], list[float]], which: int) -> Callable[[int], list[float]]:
        def told(number: int) -> list[float]:
            dist.broadcast(torch.tensor(which), 0)
            return block(number)

        return told

    if dist.get_rank():
        which = torch.tensor(0)
        while True:
            dist.broadcast(which, 0)
            if which.item() == 2:
                return {}
            (hand, own)[int(which.item())](0)
    comparison, _ = interleave(together(hand, 0), together(own, 1), names=("by hand", "torchproof"), budget_s=BUDGET_S)
    dist.broadcast(torch.tensor(2), 0)
    return {"ratio": comparison.ratio, "low": comparison.low, "high": comparison.high, "pairs": comparison.num_pairs}


def memory(strategy: Strategy) -> dict[str, Any]:
    """After some steps: bytes of the tensors that one rank holds, and what its process has grown by."""
    before = psutil.Process().memory_full_info().uss
    job = open_job(Large(), strategy)
    job.last_step = NUM_MEMORY_STEPS
    train(job, None, lambda line: None, lambda: False)
    grown = psutil.Process().memory_full_info().uss - before
    tensors: list[Tensor] = list(job.state.model.parameters())
    tensors += [p.grad for p in job.state.model.parameters() if p.grad is not None]
    tensors += [t for state in job.state.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {"tensor_bytes": sum(t.numel() * t.element_size() for t in local), "uss_bytes": grown}


def worker(what: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = overhead() if what == "overhead" else memory("fsdp" if what == "fsdp" else "single")
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def run(what: str, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
             "-m", "bench.train", "--worker", what, "--out", str(out)],
            check=True,
            env={**os.environ, **rank_environment("fsdp" if what == "fsdp" else "ddp", num_threads=1)},
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker, options.out)
        return 0
    steps = run("overhead", NUM_RANKS)
    single, sharded = run("single", 1), run("fsdp", NUM_RANKS)
    environment = read_environment()
    text = f"""# torchproof train beside hand-written PyTorch

Written by `python -m bench.train` on {time.strftime("%Y-%m-%d")}: {environment.cpu_model}, torch {torch.__version__}, \
{NUM_RANKS} ranks with gloo and one thread each.

| | |
|---|---|
| a DDP step by hand / with torchproof, {steps["pairs"]} interleaved pairs of {NUM_STEPS} steps | \
{units.ratio(steps["ratio"], steps["low"], steps["high"])} |
| weights, gradients and AdamW's state, single | {units.size(single["tensor_bytes"])} |
| the same of one of {NUM_RANKS} ranks with FSDP | {units.size(sharded["tensor_bytes"])} |
| growth of the process's own memory in {NUM_MEMORY_STEPS} steps, single | {units.size(single["uss_bytes"])} |
| the same of one of {NUM_RANKS} ranks with FSDP | {units.size(sharded["uss_bytes"])} |
"""
    RESULT.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
