"""Builds the artifacts of all variants before anything is timed, as many at once as there are cores."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchproof.errors import TrialError
from torchproof.machine.threads import thread_environment
from torchproof.measure.process import CALL_ERRORS, FreshProcess, as_trial_error
from torchproof.tune.candidates import Variant
from torchproof.types import CompileSeen, Precision


@dataclass
class Built:
    """What came of building one variant.

    Attributes:
        error: why there is no artifact; None when there is one.
    """

    folder: Path
    build_s: float | None = None
    artifact_bytes: int | None = None
    compiled: CompileSeen | None = None
    error: TrialError | None = None


@dataclass
class _Job:
    """One runtime with its precisions, built in order by one process: int8 is made from the float32 export."""

    path: str
    variants: list[Variant] = field(default_factory=list)


def build_all(
    variants: Sequence[Variant],
    spec: dict[str, Any],
    folder: Path,
    *,
    num_threads: int,
    at_once: int,
    deadline: float,
    memory_limit_bytes: int,
    progress: Callable[[str], None],
) -> dict[Variant, Built]:
    """Every variant's artifact, or why there is none.

    Args:
        num_threads: that the model will run with; compiled artifacts have it built in.
        deadline: ``time.monotonic()`` at which what isn't finished is ended.
    """
    jobs: dict[str, _Job] = {}
    for variant in variants:
        jobs.setdefault(variant.path, _Job(variant.path)).variants.append(variant)
    results: dict[Variant, Built] = {}
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(max_workers=at_once)
        stack.callback(pool.shutdown, cancel_futures=True)
        processes: list[FreshProcess] = []
        stack.callback(_kill_all, processes)  # runs before the pool's shutdown, so that no thread waits for one
        stopping = threading.Event()
        stack.callback(stopping.set)

        def run(job: _Job) -> dict[Variant, Built]:
            with FreshProcess(
                "torchproof.tune.jobs:Build",
                environment=thread_environment(num_threads),
                memory_limit_bytes=memory_limit_bytes,
            ) as process:
                processes.append(process)
                if stopping.is_set():
                    process.kill()  # the pool took up one more job before it was shut down
                return _build_job(job, process, spec, folder, num_threads, deadline)

        waiting = {pool.submit(run, job): job for job in jobs.values()}
        while waiting:
            names = ", ".join(job.variants[0].name for job in waiting.values())
            progress(f"building {names}")
            done, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                waiting.pop(future)
                results |= future.result()
    return results


def _kill_all(processes: list[FreshProcess]) -> None:
    for process in processes:
        process.kill()


def _build_job(
    job: _Job, process: FreshProcess, spec: dict[str, Any], folder: Path, num_threads: int, deadline: float
) -> dict[Variant, Built]:
    results: dict[Variant, Built] = {}
    for variant in job.variants:
        out = folder / f"{variant.name}-{variant.precision}"
        ready: Mapping[Precision, str] = {v.precision: str(b.folder) for v, b in results.items() if b.error is None}
        results[variant] = built = Built(out)
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TrialError("not built", "no time left to build it; a larger --budget gives it some")
            answer = process.call(
                "run",
                timeout_s=left,
                spec=spec,
                runtime=variant.path,
                precision=variant.precision,
                folder=str(out),
                built=ready,
                num_threads=num_threads,
            )
        except CALL_ERRORS as exc:
            built.error = _not_built(as_trial_error(exc), left)
            continue
        built.build_s = answer["build_s"]
        built.artifact_bytes = answer["artifact_bytes"]
        if answer["compiled"] is not None:
            built.compiled = msgspec.convert(answer["compiled"], CompileSeen)
    return results


def _not_built(error: TrialError, given_s: float) -> TrialError:
    if error.kind == "timed out":
        return TrialError("not built", f"not finished in {given_s:.0f} s; a larger --budget gives it more")
    return TrialError("not built", str(error)) if error.kind == "failed" else error
