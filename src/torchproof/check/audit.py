"""The audit of one target: every probe, judged by every rule."""

import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from torchproof.check.batching import Probe, holds, see_batch, see_padding
from torchproof.check.modes import see_modes, unchanged
from torchproof.rules.registry import judge
from torchproof.target.respond import respond
from torchproof.target.rows import Row, eager, sizes_of, volume
from torchproof.target.signature import read_signature
from torchproof.target.subject import (
    Subject,
    encode_without_load,
    load_module,
    make_subject,
    open_service,
    sample_requests,
)
from torchproof.target.usercode import user_code
from torchproof.types import BatchSeen, CheckReport, LoadSeen, Observation, PaddingSeen, Signature, Target


@dataclass(frozen=True)
class Audit:
    """What was found, with the live objects it was found on.

    Attributes:
        module: as ``load()`` returned it.
        encode_needs_load: whether ``encode`` works only after ``load()``.
    """

    report: CheckReport
    subject: Subject
    module: nn.Module
    signature: Signature
    encode_needs_load: bool


def audit(target: Target, traffic: Path | None = None) -> Audit:
    """Loads the target and runs it on its samples.

    Args:
        traffic: a JSON Lines file whose requests take the place of ``samples()``.

    Raises:
        TargetError, TrafficError: see ``target``.
        UserCodeError: the user's code raised.
    """
    service = open_service(target)
    source, requests = sample_requests(service, traffic)
    before_load = encode_without_load(service, requests[0][1])
    start = time.perf_counter()
    module = load_module(service)
    load_s = time.perf_counter() - start
    subject = make_subject(target, service, module, source, requests)
    name = target.reference
    with unchanged(module, evaluate=True):
        signature = read_signature(module, subject.rows, service, batched=subject.batched)
    rows = _few(subject.rows, signature)
    load_seen = LoadSeen(target=name, encode_needs_load=bool(before_load), error=before_load, load_s=load_s)
    with user_code("running the model on a sample"):
        modes = see_modes(module, rows, signature, name)
    if not modes.non_finite_outputs:  # JSON has no form for them, and TP601 says so already
        with unchanged(module, evaluate=True), user_code(f"answering {requests[0][0]}"):
            respond(service, signature, eager(module, signature), requests[0][1])
    batches: list[BatchSeen] = []
    paddings: list[PaddingSeen] = []
    # Answers that differ between equal requests would differ between batches too, which proves nothing about batching.
    repeatable = modes.repeat_diff <= modes.threshold and not modes.mutated_buffers
    with unchanged(module, evaluate=True):
        probe = Probe(module, rows[0], signature)
        if subject.batched and repeatable:
            batches = [see_batch(probe, subject.rows, name)]
            paddings = see_padding(probe, subject.rows, name)
    seen_all: list[Observation] = [load_seen, modes, *batches, *paddings]
    report = CheckReport(
        target=target,
        signature=signature,
        traffic=subject.traffic(signature),
        precision=probe.precision,
        batching=bool(batches) and all(holds(seen) for seen in batches),
        padding=bool(paddings) and all(holds(seen) for seen in paddings),
        findings=tuple(f for seen in seen_all for f in judge(seen)),
    )
    return Audit(
        report=report, subject=subject, module=module, signature=signature, encode_needs_load=bool(before_load)
    )


def _few(rows: list[Row], signature: Signature) -> list[Row]:
    """The smallest, the median and the largest row."""
    ascending = sorted(rows, key=lambda row: volume(sizes_of(row, signature.inputs)))
    return [ascending[i] for i in sorted({0, len(ascending) // 2, len(ascending) - 1})]
