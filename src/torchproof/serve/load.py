"""Opens what is served: the plan's first choice that runs here, proven against the golden set, or a bare target."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from torchproof.bundle.read import GOLDEN, SUMS, Bundle
from torchproof.bundle.replay import ascending, open_source, replay
from torchproof.check.batching import Probe, holds, see_batch, see_padding
from torchproof.errors import BundleError, RefusedError, UserCodeError
from torchproof.machine.environment import plan_facts, read_environment
from torchproof.rules.base import of_candidate
from torchproof.rules.registry import judge
from torchproof.runtimes import RUNTIMES, open_runtime, skip_reason
from torchproof.runtimes.base import set_torch_threads
from torchproof.serve.canary import OWN_TOLERANCE, Canary
from torchproof.target import golden
from torchproof.target.modules import ModuleService
from torchproof.target.request import convert, request_type
from torchproof.target.respond import respond
from torchproof.target.rows import Row, Run, eager, run_rows
from torchproof.target.service import Service
from torchproof.target.signature import read_signature
from torchproof.target.subject import load_module, make_subject, open_service, sample_requests
from torchproof.target.usercode import first_line, user_code
from torchproof.types import (
    ArtifactSeen,
    Candidate,
    Choice,
    Environment,
    Finding,
    GoldenSeen,
    LoadSeen,
    PlanSeen,
    Signature,
    Target,
)

NEEDS_LOAD = "TP706"
# Sampled requests that are kept: enough to see how long one takes and how large it is.
MAX_REQUESTS = 16
# Of a target without a bundle, where check's probes allow batches at all; the measured cost decides up to here.
TARGET_MAX_BATCH_SIZE = 32

log = logging.getLogger("torchproof.serve")


@dataclass(frozen=True)
class Prepared:
    """What replicas can share: made once, before they are forked.

    Attributes:
        source: a bundle that was checked, or a bare target.
        module: in eval mode with the stored weights; None where the runtime needs none.
        sums: the bundle's checksums at that time.
        environment: of the machine, not of the few cores that a replica is given.
    """

    source: Bundle | Target
    service: Service
    module: nn.Module | None
    sums: bytes
    environment: Environment


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to answer.

    Attributes:
        findings: of this start.
        golden: the replays, all within the tolerance; empty for a target without a bundle.
        requests: a few sampled ones; empty where the samples stayed behind, such as a file of recorded traffic.
        rows: sampled, ascending by size; of a bundle the golden set's.
    """

    target: str
    service: Service
    signature: Signature
    run: Run
    choice: Choice
    findings: tuple[Finding, ...]
    golden: tuple[GoldenSeen, ...]
    requests: tuple[Any, ...]
    rows: Sequence[Row]
    canary: Canary

    @property
    def finite(self) -> bool:
        """Whether answers are finite as a rule, so that one that isn't deserves a look."""
        return self.canary.finite


def prepare(source: Bundle | Target) -> Prepared:
    """Opens the service, and loads its module where it will be needed.

    Raises:
        TargetError, UserCodeError: see ``open_service`` and ``load_module``.
    """
    environment = read_environment()
    if isinstance(source, Target):
        service = open_service(source)
        return Prepared(source, service, load_module(service).eval(), b"", environment)
    service = open_service(source.target)
    runtime = source.proof.plan.chosen.candidate.runtime
    module = None
    if runtime in RUNTIMES and open_runtime(RUNTIMES[runtime]).needs_module:
        module = load_module(service, source.weights).eval()
    return Prepared(source, service, module, (source.path / SUMS).read_bytes(), environment)


def load(prepared: Prepared, num_threads: int, choice: Choice | None) -> Loaded:
    """The model, ready to answer, as the first replica loads it.

    Args:
        num_threads: at most so many intra-op threads, where they are not built in; 0 as planned.
        choice: what the first replica took, for all others; nothing is proven again then but the canary.

    Raises:
        RefusedError: no choice loads (each with its reason), or the golden set differs.
        BundleError: the bundle was replaced since it was opened.
        UserCodeError: the user's code raised while it was imported, or on its own first sample.
    """
    if isinstance(prepared.source, Target):
        loaded = _load_target(prepared, prepared.source, num_threads, choice)
    else:
        loaded = _load_bundle(prepared, prepared.source, num_threads, choice)
    if reason := loaded.canary.look():
        raise RefusedError(f"{loaded.target}: {reason}", help="run torchproof check on it")
    return loaded


def _load_bundle(prepared: Prepared, bundle: Bundle, num_threads: int, choice: Choice | None) -> Loaded:
    if _sums(bundle) != prepared.sums:
        raise BundleError(f"{bundle.path} was replaced by another bundle", help="reload, so that it is proven")
    environment = prepared.environment
    choices = (choice,) if choice else (bundle.proof.plan.chosen, *bundle.proof.plan.runners_up)
    limited = [_limit_threads(one, num_threads) for one in choices]
    taken, run, skipped = _first_that_loads(prepared, bundle, limited, environment)
    replays = () if choice else _replayed(bundle, run, taken)
    requests = _few_requests(prepared.service)
    found = _load_for_encode(prepared, bundle, run, taken, requests[:1])
    inputs, references = golden.load(bundle.path / GOLDEN)
    signature = bundle.proof.signature
    return Loaded(
        target=bundle.proof.target.reference,
        service=prepared.service,
        signature=signature,
        run=run,
        choice=taken,
        findings=() if choice else (*skipped, *found, *_made_elsewhere(bundle, environment)),
        golden=replays,
        requests=requests,
        rows=ascending(inputs, signature),
        canary=Canary(run, signature, inputs, references, bundle.proof.tolerance),
    )


def _load_target(prepared: Prepared, target: Target, num_threads: int, choice: Choice | None) -> Loaded:
    """The module itself in float32. Nothing is measured; requests share a forward where check's probes allow it."""
    set_torch_threads(num_threads)
    service, module = prepared.service, prepared.module
    assert module is not None
    subject = make_subject(target, service, module, *sample_requests(service, None))
    signature = read_signature(module, subject.rows, service, batched=subject.batched)
    run = eager(module, signature)
    requests = tuple(subject.requests[:MAX_REQUESTS])
    _answer_examples(service, signature, run, requests[:1])
    rows = ascending(subject.rows, signature)
    if choice is None:
        batching = padding = False
        if subject.batched:
            probe = Probe(module, rows[0], signature)
            batching = holds(see_batch(probe, rows, target.reference))
            paddings = see_padding(probe, rows, target.reference) if batching else []
            padding = bool(paddings) and all(holds(seen) for seen in paddings)
        choice = Choice(
            candidate=Candidate(runtime="eager", num_threads=num_threads),
            max_batch_size=TARGET_MAX_BATCH_SIZE if batching else 1,
            padding=padding,
            artifact="",
        )
    references = [run_rows(run, [row], signature)[0] for row in rows]
    return Loaded(
        target=target.reference,
        service=service,
        signature=signature,
        run=run,
        choice=choice,
        findings=(),
        golden=(),
        requests=requests,
        rows=rows,
        canary=Canary(run, signature, rows, references, OWN_TOLERANCE),
    )


def _sums(bundle: Bundle) -> bytes:
    try:
        return (bundle.path / SUMS).read_bytes()
    except OSError:
        return b""


def _limit_threads(choice: Choice, num_threads: int) -> Choice:
    candidate = choice.candidate
    runtime = RUNTIMES.get(candidate.runtime)
    if not num_threads or runtime is None or open_runtime(runtime).threads_built_in:
        return choice
    fewer = min(candidate.num_threads or num_threads, num_threads)
    return msgspec.structs.replace(choice, candidate=msgspec.structs.replace(candidate, num_threads=fewer))


def _first_that_loads(
    prepared: Prepared, bundle: Bundle, choices: Sequence[Choice], environment: Environment
) -> tuple[Choice, Run, tuple[Finding, ...]]:
    """The choice, ready to answer, and a finding for each one before it."""
    skipped: list[ArtifactSeen] = []
    for choice in choices:
        missing = tuple(flag for flag in choice.cpu_flags if flag not in environment.cpu_flags)
        # Flags first: machine code with an instruction that the CPU lacks ends the process with SIGILL.
        run = "" if missing else _try_to_load(prepared, bundle, choice, environment)
        label = choice.candidate.label
        if not isinstance(run, str):
            found = (msgspec.structs.replace(seen, fallback=label) for seen in skipped)
            return choice, run, tuple(finding for seen in found for finding in judge(seen))
        target = bundle.proof.target.reference
        skipped.append(ArtifactSeen(target=target, candidate=label, missing_cpu_flags=missing, error=run, fallback=""))
    reasons = [
        f"{seen.candidate}: {seen.error or 'this CPU lacks ' + ', '.join(seen.missing_cpu_flags)}" for seen in skipped
    ]
    raise RefusedError(
        "TP705: no choice of the plan runs on this machine:\n" + "\n".join(reasons),
        help="run torchproof tune on this kind of machine; more: torchproof explain TP705",
    )


def _try_to_load(prepared: Prepared, bundle: Bundle, choice: Choice, environment: Environment) -> Run | str:
    """The choice, ready to answer, or why it is not."""
    candidate = choice.candidate
    if candidate.runtime not in RUNTIMES:
        return f"this torchproof has no runtime {candidate.runtime!r}"
    try:
        runtime = open_runtime(RUNTIMES[candidate.runtime])
        if reason := skip_reason(runtime, candidate.precision, environment, bundle.proof.target, to_build=False):
            return reason
        source = open_source(bundle, prepared.service, choice)
        if (module := prepared.module) is not None:
            source = dataclasses.replace(source, module=lambda: module)
        return runtime.load(source, candidate.precision, bundle.path / choice.artifact, candidate.num_threads)
    except UserCodeError as exc:
        return f"{exc.doing}: {exc.trace.strip().splitlines()[-1]}"
    except Exception as exc:  # noqa: BLE001  a runtime raises what it likes; the next choice may still load
        return first_line(exc)


def _replayed(bundle: Bundle, run: Run, choice: Choice) -> tuple[GoldenSeen, ...]:
    where = of_candidate(bundle.proof.target.reference, choice.candidate.label)
    try:
        seen = replay(bundle, run, choice)
    except Exception as exc:
        raise RefusedError(
            f"{where}: the golden set could not be replayed: {first_line(exc)}",
            help="run torchproof tune on this kind of machine",
        ) from exc
    differing = [finding for one in seen if not one.within for finding in judge(one)]
    if differing:
        raise RefusedError(
            "\n".join(f"{finding.code}: {finding.where}: {finding.message}" for finding in differing),
            help=f"{differing[0].fix}; more: torchproof explain {differing[0].code}",
        )
    return seen


def _few_requests(service: Service) -> tuple[Any, ...]:
    """The first sampled requests; nothing where the samples stayed behind, such as a file of recorded traffic."""
    if isinstance(service, ModuleService) and not service.rows:
        return ()
    try:
        few = itertools.islice(service.samples(), MAX_REQUESTS)
        return tuple(convert(sample, request_type(service)) for sample in few)
    except Exception as exc:  # noqa: BLE001  the user's code may raise anything; only the examples are lost
        log.warning("samples() raised, so the docs show no example: %s", first_line(exc))
        return ()


def _load_for_encode(
    prepared: Prepared, bundle: Bundle, run: Run, choice: Choice, examples: tuple[Any, ...]
) -> tuple[Finding, ...]:
    """Calls ``load()`` for what it leaves behind, where the user's code can't answer without; the module is dropped."""
    service, signature = prepared.service, bundle.proof.signature
    known = [finding for finding in bundle.proof.findings if finding.code == NEEDS_LOAD]
    error = str(known[0].evidence.get("error", "")) if known else ""
    needed = bool(known)
    if prepared.module is not None or open_runtime(RUNTIMES[choice.candidate.runtime]).needs_module:
        needed = False  # load() was called already
    elif not needed:
        try:
            _answer_examples(service, signature, run, examples)
        except UserCodeError as exc:
            needed, error = True, exc.trace.strip().splitlines()[-1]
    load_s = 0.0
    if needed:
        start = time.perf_counter()
        load_module(service)
        load_s = time.perf_counter() - start
    _answer_examples(service, signature, run, examples)
    target = bundle.proof.target.reference
    return judge(LoadSeen(target=target, encode_needs_load=needed, error=error, load_s=load_s))


def _made_elsewhere(bundle: Bundle, environment: Environment) -> tuple[Finding, ...]:
    """Whether the plan's measurements are this machine's; what depends on the traffic is not known at the start."""
    proof = bundle.proof
    return judge(
        PlanSeen(target=proof.target.reference, expected=proof.plan.holds_while, found=plan_facts(environment))
    )


def _answer_examples(service: Service, signature: Signature, run: Run, examples: tuple[Any, ...]) -> None:
    """A service that can't answer its own sample is not ready."""
    for request in examples:
        with user_code("answering the first of samples()"):
            respond(service, signature, run, request)
