"""Opens what is served: the plan's first choice that runs here, proven against the golden set, or a bare target."""

import itertools
import logging
import time
from typing import Any

import msgspec

from torchproof.bundle.read import Bundle
from torchproof.bundle.replay import load_choice, replay
from torchproof.errors import RefusedError, UserCodeError
from torchproof.machine.environment import plan_facts, read_environment
from torchproof.rules.base import of_candidate
from torchproof.rules.registry import judge
from torchproof.runtimes import RUNTIMES, open_runtime, skip_reason
from torchproof.runtimes.base import set_torch_threads
from torchproof.serve.answer import Loaded
from torchproof.target.modules import ModuleService
from torchproof.target.request import convert, request_type
from torchproof.target.respond import respond
from torchproof.target.rows import Run, eager
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

log = logging.getLogger("torchproof.serve")


def open_bundle_model(bundle: Bundle) -> Loaded:
    """The plan's first choice that loads here, after the golden set was replayed through it.

    Raises:
        RefusedError: no choice loads (each with its reason), or the golden set differs.
        UserCodeError: the user's code raised while it was imported, or on its own first sample.
    """
    service = open_service(bundle.target)
    environment = read_environment()
    choice, run, skipped = _first_that_loads(bundle, service, environment)
    golden = _replayed(bundle, run, choice)
    examples = _first_sample(service)
    loaded = _load_for_encode(bundle, service, run, choice, examples)
    return Loaded(
        target=bundle.proof.target.reference,
        service=service,
        signature=bundle.proof.signature,
        run=run,
        choice=choice,
        findings=(*skipped, *loaded, *_made_elsewhere(bundle, environment)),
        golden=golden,
        examples=examples,
    )


def open_target_model(target: Target, num_threads: int) -> Loaded:
    """A target without a bundle: the module itself in eval mode, float32, one request at a time. Nothing is measured.

    Args:
        num_threads: intra-op threads; 0 leaves the default.

    Raises:
        TargetError, UserCodeError: see ``open_service``, ``make_subject`` and ``read_signature``.
    """
    service = open_service(target)
    set_torch_threads(num_threads)
    module = load_module(service).eval()
    subject = make_subject(target, service, module, *sample_requests(service, None))
    signature = read_signature(module, subject.rows, service, batched=subject.batched)
    run = eager(module, signature)
    examples = tuple(subject.requests[:1])
    _answer_examples(service, signature, run, examples)
    candidate = Candidate(runtime="eager", num_threads=num_threads)
    return Loaded(
        target=target.reference,
        service=service,
        signature=signature,
        run=run,
        choice=Choice(candidate=candidate, max_batch_size=1, padding=False, artifact=""),
        findings=(),
        golden=(),
        examples=examples,
    )


def _first_that_loads(
    bundle: Bundle, service: Service, environment: Environment
) -> tuple[Choice, Run, tuple[Finding, ...]]:
    """The choice, ready to answer, and a finding for each one before it."""
    plan = bundle.proof.plan
    skipped: list[ArtifactSeen] = []
    for choice in (plan.chosen, *plan.runners_up):
        missing = tuple(flag for flag in choice.cpu_flags if flag not in environment.cpu_flags)
        # Flags first: machine code with an instruction that the CPU lacks ends the process with SIGILL.
        run = "" if missing else _try_to_load(bundle, service, choice, environment)
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


def _try_to_load(bundle: Bundle, service: Service, choice: Choice, environment: Environment) -> Run | str:
    """The choice, ready to answer, or why it is not."""
    candidate = choice.candidate
    if candidate.runtime not in RUNTIMES:
        return f"this torchproof has no runtime {candidate.runtime!r}"
    try:
        runtime = open_runtime(RUNTIMES[candidate.runtime])
        target = bundle.proof.target
        reason = skip_reason(runtime, candidate.precision, environment, target, to_build=False)
        return reason or load_choice(bundle, service, choice)
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


def _first_sample(service: Service) -> tuple[Any, ...]:
    """The first sampled request; nothing where the samples stayed behind, such as a file of recorded traffic."""
    if isinstance(service, ModuleService) and not service.rows:
        return ()
    try:
        return tuple(convert(s, request_type(service)) for s in itertools.islice(service.samples(), 1))
    except Exception as exc:  # noqa: BLE001  the user's code may raise anything; only the example is lost
        log.warning("samples() raised, so the docs show no example: %s", first_line(exc))
        return ()


def _load_for_encode(
    bundle: Bundle, service: Service, run: Run, choice: Choice, examples: tuple[Any, ...]
) -> tuple[Finding, ...]:
    """Calls ``load()`` for what it leaves behind, where the user's code can't answer without; the module is dropped."""
    signature = bundle.proof.signature
    known = [finding for finding in bundle.proof.findings if finding.code == NEEDS_LOAD]
    error = str(known[0].evidence.get("error", "")) if known else ""
    needed = bool(known)
    if open_runtime(RUNTIMES[choice.candidate.runtime]).needs_module:
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
