"""The whole of tune: searches, makes the plan with its reasons, writes the bundle and proves it."""

import os
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from torchproof import __version__
from torchproof.bundle.read import ARTIFACTS
from torchproof.bundle.write import check_destination, existing_parent, write_bundle
from torchproof.errors import RefusedError
from torchproof.machine.environment import plan_facts
from torchproof.machine.threads import thread_environment
from torchproof.measure.process import CALL_ERRORS, FreshProcess, as_trial_error
from torchproof.render import units
from torchproof.tune.choose import best_batch_size, runners_up, runtime_decision
from torchproof.tune.measuring import BASELINE, REFERENCE
from torchproof.tune.request import Progress, TuneRequest
from torchproof.tune.search import PREPARE_TIMEOUT_S, Outcome, Search
from torchproof.types import (
    SCHEMA,
    Choice,
    Decision,
    GoldenSeen,
    GoldenSummary,
    Plan,
    Proof,
    Rejected,
    Trial,
)

NUM_RUNNERS_UP = 2  # besides plain eager, which comes last wherever the limits allow it


def tune(request: TuneRequest, progress: Progress = lambda text, share: None) -> Proof:
    """Measures, chooses, and writes the bundle.

    Raises:
        UsageError: the target, the traffic or the output (see there). Nothing is written.
        UserCodeError: the user's code raised.
        RefusedError: equal requests get different answers, or the finished bundle doesn't reproduce the golden set.
        LimitsError: nothing met the limits and the tolerance.
    """
    check_destination(request.output)
    with tempfile.TemporaryDirectory(
        prefix=f".{request.output.name}.", suffix=".work", dir=existing_parent(request.output)
    ) as work:
        search = Search(request, Path(work), progress)
        outcome = search.run()
        search.progress(f"writing {request.output.name} and proving it")
        return _write(search, outcome)


def _write(search: Search, outcome: Outcome) -> Proof:
    request, report, prepared = search.request, search.report, search.prepared
    served = [outcome.chosen, *runners_up(outcome.ranked, outcome.chosen, NUM_RUNNERS_UP)]
    chosen, *others = [_choice(search, trial) for trial in served]
    proof = Proof(
        schema=SCHEMA,
        torchproof=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=request.target,
        signature=report.signature,
        traffic=report.traffic,
        environment=search.environment,
        limits=request.limits,
        tolerance=request.tolerance,
        golden=GoldenSummary(num_rows=prepared["num_golden_rows"], precision=prepared["precision"]),
        batching=report.batching,
        padding=report.padding,
        baseline=BASELINE.label,
        reference=REFERENCE.label,
        speedup=outcome.speedup,
        plan=Plan(
            chosen=chosen,
            runners_up=tuple(others),
            decisions=_decisions(search, outcome.chosen),
            holds_while=_holds_while(search),
        ),
        trials=tuple(search.trials),
        findings=tuple(search.findings),
        search_s=search.spent(),
    )
    folders = {
        choice.artifact: search.built[search.variant_of(choice.candidate)].folder for choice in (chosen, *others)
    }
    write_bundle(
        request.output,
        proof,
        golden=search.work / "golden.safetensors",
        weights=search.work / "weights.safetensors" if prepared["weights"] else None,
        artifacts={name: folder for name, folder in folders.items() if folder.is_dir()},
        code=[Path(path) for path in prepared["code"]],
        prove=partial(_prove, search, chosen),
    )
    return proof


def _choice(search: Search, trial: Trial) -> Choice:
    candidate = trial.candidate
    return Choice(
        candidate=candidate,
        max_batch_size=best_batch_size(trial),
        padding=search.report.padding,
        artifact=f"{ARTIFACTS}/{candidate.runtime}-{candidate.precision}",
        cpu_flags=search.environment.cpu_flags if search.runtimes[candidate.runtime].native else (),
    )


def _decisions(search: Search, chosen: Trial) -> tuple[Decision, ...]:
    request, report = search.request, search.report
    rates = [f"{p.batch_size}: {units.rate(p.rps.estimate, p.rps.low, p.rps.high)}" for p in chosen.throughput]
    return (
        runtime_decision(chosen, search.trials, request.tolerance, request.limits, search.ties),
        Decision(
            knob="max_batch_size",
            value=str(best_batch_size(chosen)),
            reason="; ".join(rates) if report.batching else "a row's answer is not proven independent of its batch",
        ),
        Decision(
            knob="padding",
            value="yes" if report.padding else "no",
            reason="padded and unpadded outputs agree" if report.padding else "not proven safe, or no dim varies",
            rejected=tuple(Rejected(value="yes", reason=f.message) for f in search.findings if f.code == "TP702"),
        ),
    )


def _holds_while(search: Search) -> dict[str, str]:
    """The facts that the plan rests on."""
    largest = {f"largest {dim}": str(sizes[-1]) for dim, sizes in search.report.traffic.sizes.items()}
    return plan_facts(search.environment) | largest


def _prove(search: Search, chosen: Choice, folder: Path) -> None:
    """Replays the golden set from the finished bundle, in a fresh process, as ``serve`` will."""
    with FreshProcess(
        "torchproof.tune.jobs:Verify",
        environment={**thread_environment(chosen.candidate.num_threads), "PYTHONDONTWRITEBYTECODE": "1"},
        memory_limit_bytes=search.memory_limit_bytes,
        folder=os.sep,  # not where the user's own files happen to be found
    ) as process:
        try:
            answers = process.call("run", timeout_s=PREPARE_TIMEOUT_S, bundle=str(folder.resolve()))
        except CALL_ERRORS as exc:
            ended = as_trial_error(exc)
            raise RefusedError(
                f"the finished bundle doesn't run: {ended.kind}: {ended}",
                help="files that the code reads go into Service.files, and a package that it belongs to has to be "
                "installed; then tune again",
            ) from None
    for seen in msgspec.convert(answers, list[GoldenSeen]):
        if not seen.within:
            raise RefusedError(
                f"the finished bundle is off on {seen.output}: {seen.metric} {seen.error:.4g}, "
                f"tolerance {seen.bound:.4g}, {seen.batch_size} to a batch",
                help="code that reads other files than in Service.files gives other answers from the bundle",
            )
