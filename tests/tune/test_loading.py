"""The search for a DataLoader's settings on real recipes of a few lines, in real processes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import msgspec
import pytest

from torchproof.errors import TargetError, UserCodeError
from torchproof.rules.registry import judge
from torchproof.target.resolve import resolve
from torchproof.tune.loading import choose_loading
from torchproof.tune.loading.memory import batch_bytes
from torchproof.tune.loading.probe import Probe, as_batches
from torchproof.tune.loading.training import Training
from torchproof.types import decode, encode
from torchproof.types.doctor import SharedMemory
from torchproof.types.loading import Cost, LoadingCosts, LoadingProof, PickleSeen, WorkerMemorySeen
from torchproof.types.training import Loading

RECIPE = """
import time
import numpy as np
from torch.utils.data import Dataset

class Data(Dataset):
DATA

class Fit(tp.Recipe):
    batch_size = 8
    num_epochs = 2
    def model(self):
        return nn.Linear(4, 1)
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=16)
    def loss(self, model, batch):
        return model(batch).square().mean()
    def train_data(self):
        return Data()
    def eval_data(self):
        return Data()
    def metrics(self, model, batch):
        return {}
"""

PLAIN = """
def __len__(self):
    return 61
def __getitem__(self, index):
    return torch.full((4,), float(index))
"""

RAISES = PLAIN.replace("    return torch", "    if index == 17:\n        [][1]\n    return torch")

WAITS = """
def __len__(self):
    return 64
def __getitem__(self, index):
    time.sleep(0.004)
    return torch.full((4,), float(index))
"""

Recipe = Callable[[str], Path]


@pytest.fixture
def recipe(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Writes the recipe with this body of its dataset. What is measured is measured briefly."""
    for name in ("LOAD_S", "PART_S", "WORKER_S"):
        monkeypatch.setattr(f"torchproof.tune.loading.probe.{name}", 0.05)

    def written(data: str) -> Path:
        return write(RECIPE.replace("DATA", indent(dedent(data), "    ")), "recipe.py")

    return written


def probe(path: Path) -> dict[str, Any]:
    return Probe().run(msgspec.to_builtins(resolve(str(path))))


def nothing(text: str, share: float) -> None:
    """Progress that nobody looks at."""


# The whole thing


def test_settings_are_chosen_from_real_training(recipe: Recipe) -> None:
    said: list[str] = []
    path = recipe(WAITS)
    done = choose_loading(resolve(str(path)), budget_s=4.0, progress=lambda text, share: said.append(text))

    measured = [arm for arm in done.arms if arm.measured]
    assert [arm.label for arm in measured if arm.loading.num_workers == 0] == ["0 workers, 1 thread"]
    assert len(measured) == 3
    assert all(len(arm.measured) >= 8 for arm in measured)
    assert done.chosen in [arm.loading for arm in measured]
    assert len(done.comparisons) >= 2
    assert {comparison.baseline for comparison in done.comparisons[:2]} == {"0 workers, 1 thread"}
    load = done.costs.threads[0].loads[0]
    assert load.wait_s > load.cpu_s
    assert load.wait_s >= 8 * 0.004
    assert max(arm.loading.num_workers for arm in done.arms) >= 4  # items wait: more workers than cores are tried
    assert done.costs.batch_size == 8
    assert done.costs.batch_bytes == 4096  # a page
    assert [arm.predicted for arm in done.arms] != [arm.predicted for arm in done.arms][::-1]
    assert done.findings == ()
    assert decode(encode(done), LoadingProof, what="proof") == done
    assert said[0].startswith("measuring")
    assert said[-1].startswith("training with 0 workers, 1 thread; ")


def test_what_shared_memory_cannot_hold_is_found_and_not_chosen(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 bytes for a batch: one worker with 2 batches on their way needs 3 pages, and 2 are free."""
    monkeypatch.setattr(
        "torchproof.tune.loading.search.shared_memory", lambda: SharedMemory(size_bytes=8192, free_bytes=8192)
    )
    done = choose_loading(resolve(str(recipe(WAITS))), budget_s=1.0, progress=nothing)
    assert done.chosen.num_workers == 0
    assert [finding.code for finding in done.findings] == ["TP501"]
    assert all(arm.refusal for arm in done.arms if arm.loading.num_workers)


# What is measured


def test_the_probe_measures_apart(recipe: Recipe) -> None:
    found = probe(recipe(WAITS))
    costs = msgspec.convert(found["costs"], LoadingCosts)
    (alone, *_) = costs.threads
    assert alone.num_threads == 1
    assert all(load.wait_s >= 8 * 0.004 for load in alone.loads)
    assert alone.step.wait_s < 0.004
    assert costs.worker is not None
    assert costs.worker.send_cpu_s < 0.004 * 8  # the samples' waiting is no part of it
    assert costs.worker.uss_bytes > 0
    assert costs.transfer is None or costs.device != "cpu"
    assert (costs.num_samples, costs.num_epochs) == (64, 2)


def test_slow_samples_stand_for_a_batch() -> None:
    """A part of a batch is scaled up, and parts follow each other round."""
    parts = [(2, Cost(cpu_s=float(n), wait_s=0.0, wall_s=float(n))) for n in (1, 2, 3)]
    assert [batch.cpu_s for batch in as_batches(parts, 4)] == [3.0, 5.0, 4.0]
    assert [batch.cpu_s for batch in as_batches(parts, 2)] == [1.0, 2.0, 3.0]
    assert [batch.cpu_s for batch in as_batches(parts, 3)] == pytest.approx([2.25, 3.75, 3.0])


def test_fewer_samples_than_a_batch_are_a_batch(recipe: Recipe) -> None:
    costs = probe(recipe(PLAIN.replace("61", "3")))["costs"]
    assert (costs["batch_size"], costs["num_samples"]) == (3, 3)
    assert costs["worker"] is not None


def test_a_batch_takes_whole_pages_of_each_storage_once() -> None:
    import torch

    tensor = torch.zeros(1024)
    assert batch_bytes(tensor) == 4096
    assert batch_bytes([tensor, tensor[:8], {"y": torch.zeros(1)}, "text"]) == 8192
    assert batch_bytes(torch.zeros(1025)) == 8192


# What workers copy

MANY = """
def __init__(self):
    KEPT
def __len__(self):
    return 150_000
def __getitems__(self, indices):
    return [self[index] for index in indices]
def __getitem__(self, index):
    len(self.names[index])
    return torch.zeros(4)
"""


@pytest.fixture
def many(recipe: Recipe) -> Recipe:
    """Writes the recipe whose dataset keeps this."""
    return lambda data: big_batches(recipe(data))


MEMORY = """
import math
import sys
import msgspec
from torchproof.target.resolve import resolve
from torchproof.tune.loading import probe
probe.LOAD_S = 10.0  # of this many seconds a batch may take a quarter
probe.MAX_LOADS = 4
probe.MEMORY_S = math.inf
found = probe.Probe().run(msgspec.to_builtins(resolve(sys.argv[1])))
print(msgspec.json.encode(found["memory"]).decode())
"""


def memory(path: Path) -> WorkerMemorySeen | None:
    """Of two epochs, however long they take, read in few batches.

    In a fresh process, as a search does it: in this one the dataset's objects would share pages with those of other
    tests, which are written into for other reasons.
    """
    found = subprocess.run([sys.executable, "-c", MEMORY, str(path)], stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(found.stdout.splitlines()[-1], type=WorkerMemorySeen | None)


def big_batches(path: Path) -> Path:
    """A dataset's epoch in little time: what a batch costs is nothing to this test."""
    path.write_text(
        path.read_text()
        .replace("batch_size = 8", "batch_size = 5_000")
        .replace(
            "    def model(self)",
            "    def collate(self, samples):\n        return samples[0][None]\n    def model(self)",
        )
    )
    return path


def test_a_list_of_objects_is_copied_and_found(many: Recipe) -> None:
    kept = 'self.names = [f"/data/train/image_{n:08d}.jpg" for n in range(150_000)]'
    seen = memory(many(MANY.replace("KEPT", kept)))
    assert seen is not None
    assert seen.num_objects >= 150_000
    assert [finding.code for finding in judge(seen)] == ["TP502"]


def test_the_same_names_in_one_array_are_not_copied(many: Recipe) -> None:
    kept = 'self.names = np.array([f"/data/train/image_{n:08d}.jpg" for n in range(150_000)])'
    assert memory(many(MANY.replace("KEPT", kept))) is None


def test_a_list_that_samples_never_look_at_is_not_found(many: Recipe) -> None:
    """It would be copied if they did."""
    kept = 'self.names = "x" * 150_000; self.unused = [f"image_{n:08d}.jpg" for n in range(150_000)]'
    seen = memory(many(MANY.replace("KEPT", kept)))
    assert seen is not None
    assert seen.object_bytes > 8 << 20
    assert judge(seen) == ()


def test_a_cache_that_a_worker_fills_is_no_copy(many: Recipe) -> None:
    """Nor what it puts in place of what the probe's own reading left there: 40 MiB, which no training process has."""
    kept = 'self.names = "x" * 150_000; self.unused = [f"{n}" for n in range(150_000)]; self.cache = {}'
    code = MANY.replace("KEPT", kept).replace("len(self.names[index])", "self.cache[index % 2000] = b'x' * 20_000")
    seen = memory(many(code))
    assert seen is not None
    assert seen.uss_bytes > 30 << 20
    assert judge(seen) == ()


# Bad input


def test_an_empty_dataset_is_named(recipe: Recipe) -> None:
    with pytest.raises(TargetError, match=r"train_data\(\) is empty"):
        choose_loading(resolve(str(recipe(PLAIN.replace("61", "0")))), budget_s=1.0, progress=nothing)


def test_a_sample_that_raises_is_named(recipe: Recipe) -> None:
    path = recipe(RAISES.replace("61", "24"))  # three batches: those that are timed go through all
    with pytest.raises(UserCodeError, match=r"train_data\(\)\[17\] raised IndexError") as caught:
        probe(path)
    assert "[][1]" in caught.value.trace


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_raises_in_training_is_named(recipe: Recipe, num_workers: int) -> None:
    """Two batches: the first steps go through both."""
    path = recipe(RAISES.replace("61", "16").replace("17", "11"))
    target = msgspec.to_builtins(resolve(str(path)))
    loading = msgspec.to_builtins(Loading(num_threads=1, num_workers=num_workers))
    with pytest.raises(UserCodeError, match=r"train_data\(\)\[11\] raised IndexError"):
        Training().open(target, loading, 0.0, True)


def test_samples_that_do_not_collate_are_said_so(recipe: Recipe) -> None:
    path = recipe(PLAIN.replace("torch.full((4,)", "torch.full((1 + index % 3,)"))
    with pytest.raises(UserCodeError, match=r"collate\(\) raised RuntimeError") as caught:
        probe(path)
    assert "stack expects each tensor to be equal size" in caught.value.trace


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_does_not_collate_in_training_is_said_so(recipe: Recipe, num_workers: int) -> None:
    """One sample of the two batches has another size than the others."""
    path = recipe(PLAIN.replace("61", "16").replace("torch.full((4,)", "torch.full((4 + (index == 11),)"))
    target = msgspec.to_builtins(resolve(str(path)))
    loading = msgspec.to_builtins(Loading(num_threads=1, num_workers=num_workers))
    with pytest.raises(UserCodeError, match=r"collate\(\) raised RuntimeError"):
        Training().open(target, loading, 0.0, True)


def test_what_ends_in_a_worker_only_leaves_no_workers(recipe: Recipe) -> None:
    path = recipe(
        PLAIN.replace(
            "    return torch",
            "    if torch.utils.data.get_worker_info():\n        raise OSError('no connection')\n    return torch",
        )
    )
    costs = probe(path)["costs"]
    assert costs["worker"] is None
    assert "OSError" in costs["worker_error"]


def test_a_dataset_that_cannot_be_pickled_is_found_where_it_has_to_be(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(PLAIN + "\ndef __init__(self):\n    self.scale = lambda sample: sample / 255\n")
    forked = msgspec.convert(probe(path)["pickled"], PickleSeen)
    monkeypatch.setattr("multiprocessing.get_start_method", lambda *args, **kwargs: "spawn")
    found = probe(path)
    spawned = msgspec.convert(found["pickled"], PickleSeen)
    assert [judge(seen) == () for seen in (forked, spawned)] == [True, False]
    assert "lambda" in spawned.error
    assert found["costs"]["worker"] is None
    assert found["costs"]["worker_error"] == spawned.error
