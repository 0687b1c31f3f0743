"""The search: check, baseline, threads, builds, trials, choice."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from torchproof.bundle.read import ARTIFACTS
from torchproof.errors import LimitsError, RefusedError, TrialError
from torchproof.machine.environment import read_environment
from torchproof.machine.memory import available_memory
from torchproof.measure.interleave import interleave
from torchproof.measure.process import CALL_ERRORS, FreshProcess, as_trial_error
from torchproof.rules.registry import judge
from torchproof.runtimes import Runtime, open_runtime, skip_reason
from torchproof.tune.building import Built, build_all
from torchproof.tune.candidates import MAX_BATCH_SIZE, Variant, thread_counts, usable_threads
from torchproof.tune.choose import (
    choose,
    eligible,
    exclusions,
    speed,
)
from torchproof.tune.measuring import BASELINE, BLOCK_S, REFERENCE, SHORT_BLOCK_S, Measuring, ReferenceDiedError, ended
from torchproof.tune.request import Progress, TuneRequest
from torchproof.types import (
    Candidate,
    CheckReport,
    Comparison,
    Environment,
    Finding,
    Trial,
)

PREPARE_TIMEOUT_S = 600.0  # a big model loads slowly; it is the user's own code, and Ctrl-C ends it
BUILD_SHARE = 0.65  # of the budget, with everything before it: the rest is for the trials
MIN_TRIAL_S = 3.0  # below this a trial can't even load
HEAD_TO_HEAD_S = 8.0
COLLAPSED = 0.5  # speed of the baseline against one thread, below which its blocks would take too long
MEMORY_SHARE = 0.8  # of the memory that is available at the start: what one trial, or all builds at once, may take


@dataclass(frozen=True)
class Outcome:
    """What a search comes to.

    Attributes:
        ranked: the trials that may be served, fastest first.
        speedup: the chosen one against the baseline, in turns; None when the baseline could not be measured.
    """

    chosen: Trial
    ranked: list[Trial]
    speedup: Comparison | None


class Search:
    """One run; its methods are the steps, in order.

    Attributes:
        trials: every row so far.
        findings: of the check and of the trials.
        ties: why a faster candidate was passed over for a simpler one, by label.
        built: each variant's artifact.
    """

    def __init__(self, request: TuneRequest, work: Path, progress: Progress) -> None:
        self.request = request
        self.work = work
        self.start = time.monotonic()
        self._progress = progress
        self.environment: Environment = read_environment()
        self.memory_limit_bytes = int(available_memory() * MEMORY_SHARE)
        self.trials: list[Trial] = []
        self.findings: list[Finding] = []
        self.built: dict[Variant, Built] = {}
        self.ties: dict[str, str] = {}

    def run(self) -> Outcome:
        """All steps.

        Raises:
            UsageError: the target or the traffic (see there).
            UserCodeError: the user's code raised.
            RefusedError: the model can't be run, or doesn't repeat its own answers.
            LimitsError: nothing met the limits and the tolerance.
        """
        self.prepare()
        with ExitStack() as stack:
            plain, *others = self.variants()
            self.open_reference(plain, stack)
            threads = self.try_plain(plain)
            self.build([v for v in others if self.runtimes[v.name].builds], threads[0])
            self.try_all(others, threads)
            chosen, ranked = self.choose()
            speedup = self.against_baseline(chosen)
        return Outcome(chosen=chosen, ranked=ranked, speedup=speedup)

    def progress(self, text: str) -> None:
        self._progress(text, min(1.0, self.spent() / self.request.budget_s))

    def spent(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        return self.request.budget_s - self.spent()

    # 1. the target

    def prepare(self) -> None:
        """Checks the target in a process of its own; refuses a model that doesn't repeat its own answers."""
        target = self.request.target
        self.progress(f"checking {target.reference}")
        traffic = self.request.traffic
        with FreshProcess("torchproof.tune.jobs:Prepare", memory_limit_bytes=self.memory_limit_bytes) as process:
            try:
                done = process.call(
                    "run",
                    timeout_s=PREPARE_TIMEOUT_S,
                    target=msgspec.to_builtins(target),
                    traffic=str(traffic.absolute()) if traffic else None,
                    folder=str(self.work),
                )
            except TrialError as exc:
                raise RefusedError(
                    f"{target.reference} can't be checked: {exc.kind}: {exc}",
                    help="run torchproof check on it; the model has to run here before it can be tuned",
                ) from None
        self.report = msgspec.convert(done["report"], CheckReport)
        self.findings += self.report.findings
        broken = [f for f in self.findings if f.severity == "error"]
        if broken:
            raise RefusedError(
                f"{broken[0].code} {broken[0].name}: {broken[0].message}",
                help=f"{broken[0].fix}; until then there is no answer to hold a candidate to",
            )
        self.prepared = done
        batching = self.report.batching
        self.spec: dict[str, Any] = {
            "target": msgspec.to_builtins(target),
            "signature": msgspec.to_builtins(self.report.signature),
            "folder": str(self.work),
            "weights": done["weights"],
            "batching": batching,
            "padding": self.report.padding,
            "max_batch_size": MAX_BATCH_SIZE if batching else 1,
            "encode_needs_load": done["encode_needs_load"],
            "num_rows": done["num_timed_rows"],
        }

    # 2. what to try

    def variants(self) -> list[Variant]:
        """Every runtime at every precision that can run here, plain eager first; the others become skipped rows."""
        found = []
        self.runtimes: dict[str, Runtime] = {}
        for name, path in self.request.runtimes.items():
            runtime = self.runtimes[name] = open_runtime(path)
            for precision in runtime.precisions:
                reason = skip_reason(runtime, precision, self.environment, self.request.target, to_build=True)
                if reason:
                    candidate = Candidate(runtime=name, precision=precision)
                    self.trials.append(Trial(candidate=candidate, outcome="skipped", reason=reason))
                else:
                    found.append(Variant(name=name, path=path, precision=precision))
        return found

    # 3. plain eager: the reference, the baseline, and the thread count that suits the model

    def open_reference(self, plain: Variant, stack: ExitStack) -> None:
        self.progress("measuring eager")
        self.built[plain] = Built(self.work / "nothing")
        self.plain = plain
        self.measuring = Measuring(
            self.spec,
            self.request.tolerance,
            timeout_s=self.request.trial_timeout_s,
            memory_limit_bytes=self.memory_limit_bytes,
            want_p99=self.request.limits.p99_s is not None,
        )
        row = self.start_reference()
        stack.callback(lambda: self.measuring.reference.process.close())
        (baseline,) = self.beside_reference(lambda: [self.measuring.baseline_trial()])
        self.trials += [baseline, row]

    def start_reference(self) -> Trial:
        try:
            return self.measuring.open_reference(self.plain, self.built[self.plain].folder)[1]
        except TrialError as exc:
            raise RefusedError(
                f"the eager model itself doesn't run: {exc.kind}: {exc}", help="run torchproof check on it"
            ) from None

    def beside_reference(self, measure: Callable[[], list[Trial]]) -> list[Trial]:
        """Measures against the reference; once more against a new one where it ended in the middle."""
        for _ in range(2):
            try:
                return measure()
            except ReferenceDiedError:
                self.measuring.reference.process.close()
                self.start_reference()
        raise RefusedError(
            "the reference's process ended twice in the middle of a trial",
            help="look for what ends processes on this machine (memory?), and try again",
        )

    def try_plain(self, plain: Variant) -> list[int]:
        """Thread counts, the one that suits the eager model best first."""
        counts = [n for n in thread_counts(self.environment) if n != REFERENCE.num_threads]
        rows = self.try_one(plain, counts, budget_s=self.left() / 20) if counts else []
        better = [t for t in rows if t.comparison is not None and t.comparison.verdict == "better"]
        best = max(better, key=lambda t: t.comparison.ratio if t.comparison else 0.0, default=None)
        first = best.candidate.num_threads if best is not None else REFERENCE.num_threads
        return [first, *(n for n in thread_counts(self.environment) if n != first)]

    # 4. artifacts

    def build(self, variants: list[Variant], num_threads: int) -> None:
        """The quick ones first, so that a short budget still has them."""
        self.built |= build_all(
            variants,
            self.spec,
            self.work / ARTIFACTS,
            num_threads=num_threads,
            at_once=usable_threads(self.environment),
            deadline=self.start + max(self.request.budget_s * BUILD_SHARE, self.spent() + MIN_TRIAL_S),
            memory_limit_bytes=self.memory_limit_bytes // usable_threads(self.environment),
            progress=self.progress,
        )

    # 5. trials

    def try_all(self, variants: list[Variant], threads: list[int]) -> None:
        # What is simple and quick to load first: if time runs out, it runs out on the rest.
        order = sorted(variants, key=lambda v: self.runtimes[v.name].simplicity)
        for position, variant in enumerate(order):
            built = self.built.setdefault(variant, Built(self.work / "nothing"))
            fixed = self.runtimes[variant.name].threads_built_in
            counts = threads[:1] if fixed else threads
            candidate = Candidate(runtime=variant.name, precision=variant.precision, num_threads=counts[0])
            if built.error is not None:
                self.trials.append(ended(candidate, built.error))
            elif built.compiled is not None and built.compiled.num_graphs == 0:
                seen = msgspec.structs.replace(built.compiled, target=self.request.target.reference)
                self.findings += judge(seen)
                reason = f"nothing was compiled: 0 graphs of {seen.num_frames} frames"
                self.trials.append(Trial(candidate=candidate, outcome="failed", reason=reason, compiled=seen))
            elif self.left() < MIN_TRIAL_S:
                reason = "the budget ended before it; a larger --budget reaches it"
                self.trials.append(Trial(candidate=candidate, outcome="not reached", reason=reason))
            else:
                self.try_one(variant, counts, budget_s=max(self.left(), 0.0) / (len(order) - position) / 2)

    def try_one(self, variant: Variant, counts: list[int], *, budget_s: float) -> list[Trial]:
        precision = "" if variant.precision == "float32" else f" {variant.precision}"
        self.progress(f"measuring {variant.name}{precision}")
        built = self.built[variant]
        # Threads that are switched to have no cold start and no memory peak of their own; where one of these is
        # limited, each count gets a process to itself.
        limits = self.request.limits
        apart = limits.max_cold_start_s is not None or limits.max_memory_bytes is not None
        groups = [[n] for n in counts] if apart else [counts]
        share = budget_s / len(groups)
        rows: list[Trial] = []
        for group in groups:
            rows += self.beside_reference(partial(self.measuring.trials, variant, built, group, budget_s=share))
        self.trials += rows
        return rows

    # 6. the choice

    def choose(self) -> tuple[Trial, list[Trial]]:
        """The trial to serve, and all that may be served, fastest first."""
        ranked = eligible(self.trials, self.request.tolerance, self.request.limits)
        if not ranked:
            tried = [trial for trial in self.trials if trial.candidate != BASELINE]
            reasons = exclusions(tried, self.request.tolerance, self.request.limits)
            raise LimitsError(
                "\n  ".join(["nothing met the limits", *reasons]),
                help="loosen the limit that excluded the one you want",
            )
        return choose(ranked, self.simplicity, self.separated), ranked

    def simplicity(self, candidate: Candidate) -> tuple[int, ...]:
        runtime = self.runtimes[candidate.runtime]
        return runtime.simplicity, runtime.precisions.index(candidate.precision), candidate.num_threads

    def separated(self, faster: Trial, simpler: Trial) -> bool:
        """Whether the first is faster than the second when they are timed in turns; no when there is no time left."""
        names = (simpler.candidate.label, faster.candidate.label)
        if self.left() < MIN_TRIAL_S:
            self.ties[names[1]] = f"{speed(faster)}, not told apart from {names[0]}, which is simpler (no time left)"
            return False
        self.progress(f"comparing {names[1]} with {names[0]}")
        with ExitStack() as stack:
            processes: list[FreshProcess] = []
            try:
                for trial in (simpler, faster):
                    candidate = trial.candidate
                    processes.append(stack.enter_context(self.measuring.process(candidate.num_threads)))
                    variant = self.variant_of(candidate)
                    self.measuring.load(processes[-1], variant, self.built[variant].folder, candidate.num_threads)
                blocks = [self.measuring.reference.block(process) for process in processes]
                result, _ = interleave(*blocks, names=names, budget_s=min(HEAD_TO_HEAD_S, self.left()))
            except CALL_ERRORS as exc:
                if len(processes) == 1 or not processes[0].alive:
                    return True  # the simpler one is what ended
                ended_as = as_trial_error(exc)
                self.ties[names[1]] = f"{speed(faster)}, but beside {names[0]} it {ended_as.kind}: {ended_as}"
                return False
        if result.verdict == "better":
            return True
        self.ties[names[1]] = (
            f"{speed(faster)}; {result.ratio:.2f}x [{result.low:.2f}, {result.high:.2f}] against {names[0]}, "
            "which is simpler"
        )
        return False

    def against_baseline(self, chosen: Trial) -> Comparison | None:
        """The chosen candidate and the baseline in turns: what the user gains."""
        candidate = chosen.candidate
        self.progress(f"comparing {candidate.label} with the baseline")
        variant = self.variant_of(candidate)
        today = next(trial.comparison for trial in self.trials if trial.candidate == BASELINE)
        block_s = BLOCK_S if today is not None and today.ratio > COLLAPSED else SHORT_BLOCK_S
        try:
            process, _ = self.measuring.open_baseline()
            with process, self.measuring.process(candidate.num_threads) as other:
                self.measuring.load(other, variant, self.built[variant].folder, candidate.num_threads)
                blocks = [self.measuring.reference.block(p, block_s) for p in (process, other)]
                names = (BASELINE.label, candidate.label)
                return interleave(*blocks, names=names, budget_s=min(HEAD_TO_HEAD_S, self.left()))[0]
        except CALL_ERRORS:
            return None  # the baseline's own row says how it ended

    def variant_of(self, candidate: Candidate) -> Variant:
        return Variant(candidate.runtime, self.request.runtimes[candidate.runtime], candidate.precision)
