"""Measures what the parts of training cost by themselves, in a process of its own."""

import itertools
import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import torch
from torch.utils.data._utils import pin_memory as pinning

from torchproof.errors import TorchproofError, UserCodeError
from torchproof.target.usercode import first_line, user_code
from torchproof.train.data import make_loader, to_device
from torchproof.train.loop import Job, take_step
from torchproof.train.order import Share
from torchproof.tune.loading.clock import cost_of, process_cpu_s, repeated, typical
from torchproof.tune.loading.memory import PAGE_BYTES, Nowhere, Objects, batch_bytes
from torchproof.tune.loading.predict import average
from torchproof.tune.loading.training import blame, epochs, open_job, read
from torchproof.types import Target
from torchproof.types.loading import (
    Cost,
    LoadingCosts,
    PickleSeen,
    ThreadCosts,
    TransferCosts,
    WorkerCosts,
    WorkerMemorySeen,
)
from torchproof.types.training import Loading

LOAD_S = 0.6  # reading samples, for each number of threads
PART_S = 0.3  # collate, and the step
WORKER_S = 0.6
MEMORY_S = 3.0  # a worker reads on for so long where the dataset holds Python objects
MIN_OBJECTS = 10_000  # fewer are a few pages
MIN_LOADS = 4
MAX_LOADS = 64
WARM_SAMPLES = 3


class Probe:
    """Answers ``FreshProcess.call``."""

    def run(self, target: dict[str, Any]) -> dict[str, Any]:
        """All costs, the way the dataset gets to workers, and what a worker stops sharing.

        Raises:
            TargetError, UserCodeError: the recipe can't be trained; a sample that raises is named.
        """
        self.target = msgspec.convert(target, Target)
        default = torch.get_num_threads()
        self.job = open_job(self.target, Loading())
        self.objects = Objects(self.job.train_data)  # before a sample is read: not what reading leaves in a cache
        self.job.wrapped.called.train()
        # Read on from each other, without a repeat while there are samples: a file that was read is in the cache.
        self.shares = (share for steps in epochs(self.job) for step in steps for share in step)
        self.batch_size = min(self.job.request.batch_size, self.job.num_train)
        torch.set_num_threads(1)
        self.chunk, samples = self._first_samples()
        with user_code("collate()"):
            batch = self.job.recipe.collate(samples)
        threads = [self._with_threads(1, samples, batch)]
        if default > 1:
            threads.append(self._with_threads(default, samples, batch))
        torch.set_num_threads(1)
        pickled = self._pickled()
        worker, error, memory = None, pickled.error, None
        if not error:
            worker, error, memory = self._worker(threads[0])
        costs = LoadingCosts(
            batch_size=self.batch_size,
            num_samples=self.job.num_train,
            num_epochs=self.job.request.num_epochs,
            device=str(self.job.device),
            batch_bytes=batch_bytes(batch),
            threads=tuple(threads),
            worker=worker,
            worker_error=error,
            transfer=self._transfer(batch),
        )
        return {
            "costs": msgspec.to_builtins(costs),
            "pickled": msgspec.to_builtins(pickled),
            "memory": msgspec.to_builtins(memory),
        }

    # 1. samples

    def _first_samples(self) -> tuple[int, list[Any]]:
        """How many samples are timed at once, and those of a batch. Where they are slow, a few stand for all."""
        share = next(self.shares)
        head, *rest = _cut(share, min(WARM_SAMPLES, len(share.indices)))
        samples = read(self.job, head)
        sample_s = max(cost_of(lambda: read(self.job, head)).wall_s / len(head.indices), 1e-9)
        chunk = max(1, min(self.batch_size, int(LOAD_S / MIN_LOADS / sample_s)))
        for part in rest:
            if len(samples) >= max(chunk, WARM_SAMPLES):
                break
            samples += read(self.job, part)
        return chunk, list(itertools.islice(itertools.cycle(samples), self.batch_size))

    def _loads(self) -> list[Cost]:
        """What the samples of a batch cost, one batch after the other."""
        costs: list[tuple[int, Cost]] = []
        end = time.perf_counter() + LOAD_S
        for part in self._chunks():
            costs.append((len(part.indices), cost_of(lambda part=part: read(self.job, part))))  # type: ignore[misc]
            if len(costs) >= MAX_LOADS or (len(costs) >= MIN_LOADS and time.perf_counter() >= end):
                break
        return as_batches(costs, self.batch_size)

    def _chunks(self) -> Iterator[Share]:
        for share in self.shares:
            yield from _cut(share, self.chunk)

    # 2. what the training process does

    def _with_threads(self, num_threads: int, samples: list[Any], batch: Any) -> ThreadCosts:
        torch.set_num_threads(num_threads)
        loads = self._loads()
        step = [Share(tuple(range(self.batch_size)), 1.0, 0)]
        batches = itertools.repeat(batch)
        with user_code("collate()"):
            collate = repeated(lambda: self.job.recipe.collate(samples), budget_s=PART_S, least=3)
        steps = repeated(lambda: take_step(self.job, step, batches).item(), budget_s=PART_S, least=3)
        return ThreadCosts(num_threads=num_threads, loads=tuple(loads), collate=typical(collate), step=typical(steps))

    def _transfer(self, batch: Any) -> TransferCosts | None:
        device = self.job.device
        if device.type != "cuda":
            return None

        def move(value: Any) -> None:
            to_device(value, device)
            torch.cuda.synchronize(device)

        pin: Callable[[Any], Any] = pinning.pin_memory  # the loader's own: it goes into lists and dicts
        pinned = pin(batch)
        return TransferCosts(
            pageable_s=typical(repeated(lambda: move(batch), budget_s=PART_S, least=3)).wall_s,
            pinned_s=typical(repeated(lambda: move(pinned), budget_s=PART_S, least=3)).wall_s,
            pin_s=typical(repeated(lambda: pin(batch), budget_s=PART_S, least=3)).wall_s,
        )

    # 3. what a worker adds

    def _pickled(self) -> PickleSeen:
        """Whether the dataset gets to a worker, where workers start without a copy of this process."""
        method = multiprocessing.get_start_method()
        error = ""
        if method != "fork":
            try:
                pickle.Pickler(Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(
                    (self.job.train_data, self.job.recipe.collate)
                )
            except Exception as exc:  # noqa: BLE001  what the user's __getstate__ raises
                error = first_line(exc)
        return PickleSeen(target=self.target.reference, start_method=method, error=error)

    def _worker(self, alone: ThreadCosts) -> tuple[WorkerCosts | None, str, WorkerMemorySeen | None]:
        """One worker at work; or why there can be none."""
        objects = self.objects
        run = _WorkerRun(self.job, self.chunk)
        try:
            run.start()
            run.measure(WORKER_S)
            if objects.count >= MIN_OBJECTS:
                run.go_on(MEMORY_S)
            uss_bytes = int(psutil.Process(run.pid).memory_full_info().uss)
            copied_bytes = objects.copied_bytes(run.pid)
        except (TorchproofError, UserCodeError):
            raise
        except Exception as exc:  # noqa: BLE001  what the loader raises for a worker that ended
            blame(self.job, run.share)
            return None, first_line(exc), None
        finally:
            run.close()
        scale = self.batch_size / self.chunk
        load_cpu_s = average(alone.loads).cpu_s
        worker = WorkerCosts(
            send_cpu_s=max(0.0, run.worker_cpu_s * scale - load_cpu_s - alone.collate.cpu_s),
            receive_cpu_s=run.receive_cpu_s * scale,
            start_s=run.start_s,
            uss_bytes=uss_bytes,
        )
        if objects.count < MIN_OBJECTS or copied_bytes is None or multiprocessing.get_start_method() != "fork":
            return worker, "", None
        seen = WorkerMemorySeen(
            target=self.target.reference,
            num_objects=objects.count,
            object_bytes=len(objects.pages) * PAGE_BYTES,
            copied_bytes=copied_bytes,
            uss_bytes=uss_bytes,
            num_samples=self.job.num_train,
            num_read=run.num_read,
        )
        return worker, "", seen


class _WorkerRun:
    """The real loader with one worker, and nothing that trains.

    Attributes:
        share: the one that is waited for.
        start_s, worker_cpu_s, receive_cpu_s: as in ``WorkerCosts``; the worker's time is all of it.
        num_read: samples so far.
    """

    def __init__(self, job: Job, chunk: int) -> None:
        self.loader, self.plan = make_loader(
            job.recipe, job.train_data, Loading(num_workers=1), pin_memory=job.device.type == "cuda"
        )
        self._epochs = (
            [part for step in steps for share in step for part in _cut(share, chunk)] for steps in epochs(job)
        )
        self._batches: Iterator[Any] = iter(())
        self.num_read = 0
        self.start_s = self.worker_cpu_s = self.receive_cpu_s = 0.0
        self.pid = 0

    def start(self) -> None:
        """Up to its first batch."""
        known = {process.pid for process in multiprocessing.active_children()}
        self._open_epoch()
        (self.pid,) = (p.pid for p in multiprocessing.active_children() if p.pid and p.pid not in known)
        self._next()

    def measure(self, budget_s: float) -> None:
        """CPU time of both sides for each batch."""
        costs: list[float] = []
        worker_s = process_cpu_s(self.pid)
        end = time.perf_counter() + budget_s
        while len(costs) < MIN_LOADS or time.perf_counter() < end:
            costs.append(cost_of(self._next).cpu_s)
        self.worker_cpu_s = (process_cpu_s(self.pid) - worker_s) / len(costs)
        self.receive_cpu_s = statistics.median(costs)

    def go_on(self, budget_s: float) -> None:
        """Reads for so long, two epochs at most: by then each object has been looked at."""
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end and self.num_read < 2 * len(self.loader.dataset.dataset):  # type: ignore[attr-defined]
            self._next()

    def close(self) -> None:
        """Ends the worker."""
        del self._batches, self.loader

    def _open_epoch(self) -> None:
        self.plan.shares = next(self._epochs)
        self.share, *_ = self.plan.shares
        begin = time.perf_counter()
        self._batches = iter(self.loader)
        self.start_s = self.start_s or time.perf_counter() - begin
        self._left = iter(self.plan.shares)

    def _next(self) -> None:
        share = next(self._left, None)
        if share is None:
            self._open_epoch()
            share = next(self._left)
        self.share = share
        next(self._batches)
        self.num_read += len(share.indices)


def as_batches(costs: list[tuple[int, Cost]], batch_size: int) -> list[Cost]:
    """Costs of batches from those of smaller parts, each of which begins one.

    Args:
        costs: samples in a part, and what they took.
    """
    batches = []
    for begin in range(len(costs)):
        count, cpu_s, wait_s, wall_s = 0, 0.0, 0.0, 0.0
        for num_samples, cost in itertools.islice(itertools.cycle(costs), begin, None):
            count += num_samples
            cpu_s, wait_s, wall_s = cpu_s + cost.cpu_s, wait_s + cost.wait_s, wall_s + cost.wall_s
            if count >= batch_size:
                break
        scale = batch_size / count
        batches.append(Cost(cpu_s=cpu_s * scale, wait_s=wait_s * scale, wall_s=wall_s * scale))
    return batches


def _cut(share: Share, size: int) -> list[Share]:
    """Its samples in parts of at most so many."""
    return [
        Share(share.indices[begin : begin + size], share.weight, share.seed)
        for begin in range(0, len(share.indices), size)
    ]
