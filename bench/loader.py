"""The chosen DataLoader settings beside an exhaustive grid and rules of thumb. Writes bench/results/loader.md.

    python -m bench.loader            # half an hour
    python -m bench.loader DecodeCpu  # one case; nothing is written

Nine recipes: three datasets (decoding, numbers in RAM, features in Python) and three steps (nothing, waiting as for an
accelerator, computing). For each one the search chooses, then all settings of the grid train in turns, as the search's
own candidates do: a process each, stopped while another has its turn. Whether the best of the grid is the best, rounds
say that it isn't compared in: the best of the odd ones is compared in the even ones, and the other way round. The
best of the same rounds would be the luckiest, too.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torchproof as tp
from torchproof.errors import TrialError
from torchproof.machine.cores import measure_usable_cores, num_cores
from torchproof.machine.environment import read_environment
from torchproof.render import units
from torchproof.stats import compare_paired
from torchproof.target.resolve import resolve
from torchproof.tune.loading import choose_loading
from torchproof.tune.loading.confirm import Contestant
from torchproof.types import Comparison
from torchproof.types.loading import LoadingArm
from torchproof.types.training import Loading

RESULT = Path(__file__).parent / "results" / "loader.md"
SEARCH_S = 12.0  # the search's budget
NUM_ROUNDS = 8
BLOCK_S = 1.25  # at least, and a whole round of the workers; 10 s of training for each setting in all
NUM_CLASSES = 10
MAX_MEAN, MAX_WORST, MAX_TIME = 0.03, 0.10, 0.1  # what is aimed at

# Shape legend: H rows, W columns, F features.


class Decoded(Dataset[tuple[Tensor, int]]):
    """Images of 250 x 188, inflated as PNG is, cropped at random, made 112 x 112 and normalised: some 2 ms each."""

    H, W, num_images = 188, 250, 64

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        small = rng.integers(0, 64, (self.num_images, self.H // 4, self.W // 2, 3), dtype=np.uint8)
        self.files = [zlib.compress(np.resize(image, (self.H, self.W, 3)).tobytes(), 1) for image in small]

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raw = bytearray(zlib.decompress(self.files[index % self.num_images]))
        image = torch.frombuffer(raw, dtype=torch.uint8).view(self.H, self.W, 3).permute(2, 0, 1).float()
        top, left = random.randint(0, 60), random.randint(0, 80)
        crop = image[None, :, top : top + 128, left : left + 170]
        sized = nn.functional.interpolate(crop, size=(112, 112), mode="bilinear", align_corners=False)
        return (sized[0] / 255 - 0.45) / 0.22, index % NUM_CLASSES


class Featured(Dataset[tuple[Tensor, int]]):
    """Python over a numpy row: some 0.1 ms each."""

    F = 256

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(8192, self.F)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.x[index]
        out = np.concatenate([np.sort(row * factor) - row.mean() for factor in (1, 2, 3, 4)])
        out[0] = sum(value * value if value > 0 else -value for value in row.tolist())
        return torch.from_numpy(out), index % NUM_CLASSES


def in_ram() -> TensorDataset:
    """4,096 images of 32 x 32 in one tensor."""
    images = torch.randn(4096, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(len(images)) % NUM_CLASSES)


class Case(tp.Recipe):
    """A step that takes about as long as it says, whatever the batch.

    Attributes:
        wait_s: asleep, as long as an accelerator computes.
        num_products: of two matrices of 384 x 384, 3 ms or less each.
    """

    num_epochs = 1000  # the start of workers is not what is compared here
    batch_size = 32
    wait_s = 0.0
    num_products = 0

    def model(self) -> nn.Module:
        return nn.Linear(1, NUM_CLASSES)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        if self.wait_s:
            time.sleep(self.wait_s)
        matrix = torch.ones(384, 384)
        for _ in range(self.num_products):
            torch.mm(matrix, matrix)
        return nn.functional.cross_entropy(model(x.flatten(1)[:, :1]), labels)

    def train_data(self) -> Dataset[Any]:
        return Decoded()

    def eval_data(self) -> Dataset[Any]:
        return self.train_data()

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


class Decode(Case): ...


class DecodeWait(Decode):
    wait_s = 0.06


class DecodeCpu(Decode):
    num_products = 30


class Ram(Case):
    batch_size = 128

    def train_data(self) -> Dataset[Any]:
        return in_ram()


class RamWait(Ram):
    wait_s = 0.005


class RamCpu(Ram):
    num_products = 3


class Features(Case):
    batch_size = 64

    def train_data(self) -> Dataset[Any]:
        return Featured()


class FeaturesWait(Features):
    wait_s = 0.01


class FeaturesCpu(Features):
    num_products = 5


CASES = {
    case.__name__: case
    for case in (Decode, DecodeWait, DecodeCpu, Ram, RamWait, RamCpu, Features, FeaturesWait, FeaturesCpu)
}

# What people take without looking.
RULES = {
    "PyTorch's default": Loading(),
    "one worker a core": Loading(num_workers=num_cores()),
    "4 workers": Loading(num_workers=4),
}


def grid() -> list[Loading]:
    """Every setting: the workers that the search considers, and rules of thumb; threads; prefetch_factor."""
    counts = {0, *(1 << power for power in range((2 * num_cores()).bit_length())), num_cores(), 4}
    threads = (1, 0) if num_cores() > 1 else (0,)
    return [
        Loading(num_threads=number, num_workers=count, prefetch_factor=factor)
        for count in sorted(counts)
        for number in threads
        for factor in ((2, 4) if count else (2,))
    ]


@dataclass
class Found:
    """One case.

    Attributes:
        best: of the grid, over all rounds; what the chosen one is compared with is found in the other half of them.
        against: the speed of the chosen one by that of the best, and of each rule.
        capacity: cores' work that the machine did before and after.
    """

    name: str
    chosen: Loading
    best: Loading
    against: dict[str, Comparison]
    search_s: float
    sweep_s: float
    capacity: tuple[float, float]


def sweep(name: str, settings: Sequence[Loading]) -> dict[Loading, list[float]]:
    """Seconds of a step in each block of each setting, all in turns, in another order each round."""
    target = resolve(f"{__file__}:{name}")
    order = random.Random(0)
    with ExitStack() as stack:
        running = {}
        for number, loading in enumerate(settings):
            threads = loading.num_threads or num_cores()
            arm = LoadingArm(loading=loading, predicted=0.0)
            contestant = Contestant(target, arm, threads, begin=number / len(settings))
            running[loading] = stack.enter_context(contestant)
        with ThreadPoolExecutor(2) as pool:
            opened = list(pool.map(Contestant.open, running.values()))
        steps = {}
        for loading, step_s in zip(settings, opened, strict=True):
            if isinstance(step_s, TrialError):
                raise step_s
            number = max(1, loading.num_workers)  # they bring their batches together
            steps[loading] = number * math.ceil(BLOCK_S / (number * step_s))
        taken: dict[Loading, list[float]] = {loading: [] for loading in settings}
        for _ in range(NUM_ROUNDS):
            for loading in order.sample(list(settings), len(settings)):
                taken[loading].append(running[loading].run(steps[loading]) / steps[loading])
    return taken


def best_of(taken: dict[Loading, list[float]], rounds: range) -> Loading:
    """The one whose typical block was the shortest in these rounds."""
    return min(taken, key=lambda loading: statistics.median(taken[loading][number] for number in rounds))


def held_out_best(taken: dict[Loading, list[float]]) -> list[float]:
    """Seconds of a step of the best setting in each round, which the other half of the rounds names."""
    halves = [range(half, NUM_ROUNDS, 2) for half in (0, 1)]
    named = [best_of(taken, half) for half in halves]
    return [taken[named[1 - number % 2]][number] for number in range(NUM_ROUNDS)]


def capacity() -> float:
    found = measure_usable_cores()
    return found.estimate if found else 0.0


def look(name: str) -> Found:
    before = capacity()
    proof = choose_loading(resolve(f"{__file__}:{name}"), budget_s=SEARCH_S, progress=lambda text, share: None)
    settings = grid()
    # pin_memory does nothing on a CPU.
    chosen = next(s for s in settings if _key(s) == _key(proof.chosen))
    start = time.monotonic()
    taken = sweep(name, settings)
    sweep_s = time.monotonic() - start
    others = {"the best": held_out_best(taken)}
    others |= {rule: taken[next(s for s in settings if _key(s) == _key(loading))] for rule, loading in RULES.items()}
    against = {
        other: compare_paired(blocks, taken[chosen], names=(other, "the chosen")) for other, blocks in others.items()
    }
    best = best_of(taken, range(NUM_ROUNDS))
    return Found(name, chosen, best, against, proof.search_s, sweep_s, (before, capacity()))


def _key(loading: Loading) -> tuple[int, int, int]:
    return loading.num_workers, loading.num_threads, loading.prefetch_factor if loading.num_workers else 0


def label(loading: Loading) -> str:
    return LoadingArm(loading=loading, predicted=0.0).label


def regret(comparison: Comparison) -> float:
    """The part of the best one's speed that is lost; below 0 where the chosen one was faster in the rounds held out."""
    return 1 - comparison.ratio


def table(found: Sequence[Found]) -> str:
    rows = [["case", "chosen", "best of the grid", "chosen / best", *(f"/ {rule}" for rule in RULES), "search / sweep"]]
    rows[0].append("cores")
    for one in found:
        ratios = [units.ratio(c.ratio, c.low, c.high) for c in one.against.values()]
        times = f"{units.seconds(one.search_s)} / {units.seconds(one.sweep_s)}"
        cores = " to ".join(f"{value:.2f}" for value in one.capacity)
        rows.append([one.name, label(one.chosen), label(one.best), *ratios, times, cores])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def summary(found: Sequence[Found]) -> str:
    """The figures that are aimed at, and what the rules would have lost."""
    lost = [regret(one.against["the best"]) for one in found]
    share = sum(one.search_s for one in found) / sum(one.sweep_s for one in found)
    lines = [
        "| | mean | worst |",
        "|---|---|---|",
        f"| the chosen one's loss against the best | {statistics.mean(lost):.1%} | {max(lost):.1%} |",
    ]
    for rule in RULES:
        # The rule by the best, through the chosen one: both ratios are of the same rounds.
        losses = [1 - one.against["the best"].ratio / one.against[rule].ratio for one in found]
        lines.append(f"| {rule} | {statistics.mean(losses):.1%} | {max(losses):.1%} |")
    lines += [
        "",
        f"Aimed at: a loss of {MAX_MEAN:.0%} at most on average and {MAX_WORST:.0%} at worst, in {MAX_TIME:.0%} of the "
        f"sweep's time. The search took {share:.0%}. The best was shown to be faster, by its interval, in "
        f"{sum(one.against['the best'].high < 1 for one in found)} of {len(found)} cases. A loss "
        "below 0, where the chosen one was faster than the best of the other rounds, counts in the mean.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="of " + ", ".join(CASES))
    names = parser.parse_args(arguments).cases
    if unknown := set(names) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    start = time.monotonic()
    found = []
    for name in names or CASES:
        found.append(look(name))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    environment = read_environment()
    text = f"""# The chosen DataLoader settings against an exhaustive grid

Written by `python -m bench.loader` on {time.strftime("%Y-%m-%d")}: {environment.cpu_model}, {num_cores()} cores, \
torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; {units.seconds(time.monotonic() - start)} in all. Speeds of \
the chosen setting by those of others over {NUM_ROUNDS} rounds, in which all {len(grid())} settings train in turns, \
some {BLOCK_S} s each; above 1 the chosen one is faster. The interval is the median's, at 98.75%. The best is named by \
one half of the rounds and compared in the other. Cores: the work that the machine did for busy processes, before and \
after. Machines differ: run yours.

{table(found)}

{summary(found)}
"""
    if not names:
        RESULT.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
