"""Measures one variant in turns with the reference, each in its own fresh process."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchproof.errors import TrialError
from torchproof.machine.threads import thread_environment
from torchproof.measure.interleave import Block, Pairs, interleave
from torchproof.measure.process import CALL_ERRORS, FreshProcess, as_trial_error
from torchproof.stats import median_interval, quantile, quantile_interval
from torchproof.target.golden import within, worst
from torchproof.tune.building import Built
from torchproof.tune.candidates import BATCH_SIZES, Variant
from torchproof.types import (
    Candidate,
    Comparison,
    GoldenError,
    Measurement,
    Throughput,
    Tolerance,
    Trial,
)

HANDLER = "torchproof.tune.jobs:Trial"
# As people serve it: torch's default threads, whose idle ones spin.
BASELINE = Candidate(runtime="eager", num_threads=0)
# What every candidate is timed in turns with. Not the baseline itself: beside one busy neighbour its spinning threads
# made the same comparison read 15x [1.7, 46] here, which ranks nothing.
REFERENCE = Candidate(runtime="eager", num_threads=1)

BLOCK_S = 0.08  # of the reference: long beside the clock's steps, short beside a neighbour's bursts
SHORT_BLOCK_S = 0.02  # for the baseline, which can be 50 times slower than it should be
MAX_REPEATS = 200
PATIENCE = 10  # times as slow as the reference may a candidate be before it counts as hanging
PILOT_S = 5.0  # for the first look at how long the reference takes
RATE_S = 0.6  # of timing at one batch size; a fast model gets up to NUM_RATES samples, a slow one a single pass
NUM_RATES = 6  # the fewest samples whose range is a 95% interval of the median
P99_S = 10.0  # for the reference's p99, where a limit asks for it
NUM_CALLS_FOR_P99 = 368  # the fewest for a two-sided 95% interval of a p99


class ReferenceDiedError(Exception):
    """The reference's process ended in the middle of a trial."""


class Reference:
    """Plain eager, one thread, in a process that stays.

    Attributes:
        num_rows: rows that are timed.
        call_s: seconds of one call, the median over those rows.
    """

    def __init__(self, process: FreshProcess, num_rows: int, *, timeout_s: float) -> None:
        self.process = process
        self.num_rows = num_rows
        self.timeout_s = timeout_s
        # The first pass meets cold caches at every size and is not kept. A slow model is timed on fewer rows.
        one = process.call("time", timeout_s=timeout_s, rows=[num_rows // 2], repeats=1)[0]
        step = max(1, math.ceil(num_rows * one / PILOT_S))
        rows = list(range(0, num_rows, step))
        calls = process.call("time", timeout_s=timeout_s, rows=rows, repeats=2)
        self.calls: list[float] = calls[len(rows) :]
        self.call_s = median_interval(self.calls)[0]

    def block(self, process: FreshProcess, block_s: float = BLOCK_S) -> Block:
        """Times the same rows in any process, so many of them that the reference takes ``block_s``.

        A block holds every so-manieth row by size, so that each has small and large ones.
        """
        rows_per_block = min(self.num_rows, max(1, round(block_s / self.call_s)))
        num_strata = math.ceil(self.num_rows / rows_per_block)
        repeats = min(MAX_REPEATS, max(1, round(block_s / (self.call_s * rows_per_block))))

        def run(number: int) -> list[float]:
            rows = list(range(number % num_strata, self.num_rows, num_strata))
            timeout_s = self.timeout_s + PATIENCE * self.call_s * len(rows) * repeats
            seconds: list[float] = process.call("time", timeout_s=timeout_s, rows=rows, repeats=repeats)
            return seconds

        return run

    def compare(
        self, process: FreshProcess, candidate: Candidate, budget_s: float, block_s: float = BLOCK_S
    ) -> tuple[Comparison, Pairs]:
        """A loaded candidate against the reference.

        Raises:
            ReferenceDiedError: the reference is the one that ended.
            TrialError: the candidate ended.
        """
        try:
            return interleave(
                self.block(self.process, block_s),
                self.block(process, block_s),
                names=(REFERENCE.label, candidate.label),
                budget_s=budget_s,
            )
        except TrialError:
            if not self.process.alive:
                raise ReferenceDiedError from None
            raise


class Measuring:
    """What all trials of a search share.

    Attributes:
        spec: the target's description, see ``jobs.Model.open``.
        reference: set once it is open.
    """

    reference: Reference

    def __init__(
        self, spec: dict[str, Any], tolerance: Tolerance, *, timeout_s: float, memory_limit_bytes: int, want_p99: bool
    ) -> None:
        self.spec = spec
        self.tolerance = tolerance
        self.timeout_s = timeout_s
        self.memory_limit_bytes = memory_limit_bytes
        self.want_p99 = want_p99

    @property
    def pass_timeout_s(self) -> float:
        """Seconds that one pass over all rows may take."""
        return self.timeout_s + PATIENCE * self.reference.call_s * self.reference.num_rows

    def process(self, num_threads: int) -> FreshProcess:
        """A fresh process with the environment that ``serve`` will have; 0 threads: the default one."""
        environment = thread_environment(num_threads) if num_threads else {}
        return FreshProcess(HANDLER, environment=environment, memory_limit_bytes=self.memory_limit_bytes)

    def load(self, process: FreshProcess, variant: Variant, folder: Path, num_threads: int) -> float:
        """Loads the artifact and answers once; seconds since the process was started."""
        process.call(
            "load",
            timeout_s=self.timeout_s,
            spec=self.spec,
            runtime=variant.path,
            precision=variant.precision,
            folder=str(folder),
            num_threads=num_threads,
        )
        return time.perf_counter() - process.started

    def open_reference(self, plain: Variant, folder: Path) -> tuple[FreshProcess, Trial]:
        """Starts the reference; its row has nothing to be compared with.

        Raises:
            TrialError: the eager model itself doesn't run.
        """
        process = self.process(REFERENCE.num_threads)
        try:
            cold_start_s = self.load(process, plain, folder, REFERENCE.num_threads)
            self.reference = Reference(process, int(self.spec["num_rows"]), timeout_s=self.timeout_s)
            pairs = Pairs(calls=list(self.reference.calls))
            if self.want_p99:
                self._more_calls(process, pairs, P99_S)
            calls = pairs.calls
            row = Trial(
                candidate=REFERENCE,
                outcome="measured",
                golden=self._golden(process),
                latency=latency(calls),
                p99=p99(calls),
                throughput=self._throughput(process),
                cold_start_s=cold_start_s,
                peak_memory_bytes=process.call("peak_memory_bytes", timeout_s=self.timeout_s),
            )
        except BaseException:
            process.close()
            raise
        return process, row

    def open_baseline(self) -> tuple[FreshProcess, float]:
        """Starts the baseline; the process and its cold start in seconds."""
        process = self.process(BASELINE.num_threads)
        try:
            process.call("load_baseline", timeout_s=self.timeout_s, spec=self.spec)
        except BaseException:
            process.close()
            raise
        return process, time.perf_counter() - process.started

    def baseline_trial(self) -> Trial:
        """The baseline's row, from the fewest pairs: what is chosen will be compared with it again."""
        try:
            process, cold_start_s = self.open_baseline()
            with process:
                comparison, pairs = self.reference.compare(process, BASELINE, 0.0, SHORT_BLOCK_S)
                return Trial(
                    candidate=BASELINE,
                    outcome="measured",
                    latency=latency(pairs.calls),
                    p99=p99(pairs.calls),
                    comparison=comparison,
                    cold_start_s=cold_start_s,
                    peak_memory_bytes=process.call("peak_memory_bytes", timeout_s=self.timeout_s),
                )
        except CALL_ERRORS as exc:
            return ended(BASELINE, as_trial_error(exc))

    def trials(self, variant: Variant, built: Built, threads: Sequence[int], *, budget_s: float) -> list[Trial]:
        """One row for each thread count. However it ends, it ends as a row.

        Args:
            threads: the first one is loaded, the others are switched to.
            budget_s: wall seconds for comparing, all thread counts together.
        """
        rows: list[Trial] = []
        candidate = Candidate(runtime=variant.name, precision=variant.precision, num_threads=threads[0])
        try:
            with self.process(threads[0]) as process:
                cold_start_s = self.load(process, variant, built.folder, threads[0])
                golden = self._golden(process)
                for num_threads in threads:
                    candidate = msgspec.structs.replace(candidate, num_threads=num_threads)
                    if num_threads != threads[0]:
                        process.call("set_threads", timeout_s=self.timeout_s, num_threads=num_threads)
                    fits = within(golden, self.tolerance)
                    # A candidate that gives wrong answers is timed only as long as it takes to say what was passed up.
                    share = budget_s / len(threads) if fits else 0.0
                    comparison, pairs = self.reference.compare(process, candidate, share)
                    if self.want_p99 and fits:
                        self._more_calls(process, pairs, share)
                    rows.append(
                        Trial(
                            candidate=candidate,
                            outcome="measured",
                            golden=golden,
                            latency=latency(pairs.calls),
                            p99=p99(pairs.calls),
                            comparison=comparison,
                            throughput=self._throughput(process) if fits and comparison.verdict != "worse" else (),
                            cold_start_s=cold_start_s if num_threads == threads[0] else None,
                            build_s=built.build_s,
                            peak_memory_bytes=process.call("peak_memory_bytes", timeout_s=self.timeout_s),
                            artifact_bytes=built.artifact_bytes,
                            compiled=built.compiled,
                        )
                    )
        except CALL_ERRORS as exc:
            rows.append(ended(candidate, as_trial_error(exc), build_s=built.build_s))
        return rows

    def _golden(self, process: FreshProcess) -> GoldenError:
        """The worse of one row at a time and the largest batch."""
        errors = []
        for batch_size in sorted({1, int(self.spec["max_batch_size"])}):
            answer = process.call(
                "golden", timeout_s=self.pass_timeout_s, batch_size=batch_size, padding=self.spec["padding"]
            )
            errors.append(msgspec.convert(answer, GoldenError))
        return worst(errors)

    def _more_calls(self, process: FreshProcess, pairs: Pairs, budget_s: float) -> None:
        """Times single calls until a p99 has an interval, or the budget ends."""
        end = time.monotonic() + budget_s
        number = len(pairs.candidate)
        while len(pairs.calls) < NUM_CALLS_FOR_P99 and time.monotonic() < end:
            pairs.calls += self.reference.block(process)(number)
            number += 1

    def _throughput(self, process: FreshProcess) -> tuple[Throughput, ...]:
        points: list[Throughput] = []
        for batch_size in BATCH_SIZES:
            if batch_size > self.spec["max_batch_size"]:
                break
            rates = process.call(
                "throughput",
                timeout_s=2 * self.pass_timeout_s,
                batch_size=batch_size,
                padding=self.spec["padding"],
                seconds=RATE_S,
                max_rates=NUM_RATES,
            )
            estimate, low, high = median_interval(rates)
            points.append(
                Throughput(
                    batch_size=batch_size,
                    rps=Measurement(
                        quantity="median throughput",
                        unit="rps",
                        samples=tuple(rates),
                        estimate=estimate,
                        low=low,
                        high=high,
                    ),
                )
            )
            if len(points) > 1 and estimate < points[-2].rps.estimate:
                break  # a larger batch already costs more than it brings
        return tuple(points)


def ended(candidate: Candidate, exc: TrialError, *, build_s: float | None = None) -> Trial:
    """The row of a trial that ended early."""
    outcome: Any = exc.kind
    return Trial(candidate=candidate, outcome=outcome, reason=str(exc), build_s=build_s)


def latency(calls: Sequence[float]) -> Measurement:
    """The median call, with its interval."""
    estimate, low, high = median_interval(calls)
    return Measurement(quantity="median latency", unit="s", samples=tuple(calls), estimate=estimate, low=low, high=high)


def p99(calls: Sequence[float]) -> Measurement:
    """The 99th percentile; its samples are those of the latency and are not stored twice."""
    low, high = quantile_interval(calls, 0.99)
    return Measurement(
        quantity=f"p99 latency of {len(calls)} calls",
        unit="s",
        samples=(),
        estimate=quantile(calls, 0.99),
        low=low,
        high=high,
    )
