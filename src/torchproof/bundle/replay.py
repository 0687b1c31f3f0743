"""Loads a choice of the plan and replays the golden set through it: the last step of tune, the first of serve."""

from collections.abc import Sequence

import torch

from torchproof.bundle.read import GOLDEN, Bundle
from torchproof.runtimes import RUNTIMES, Source, open_runtime
from torchproof.target import golden
from torchproof.target.modules import ModuleService
from torchproof.target.rows import Row, Run, batches, run_rows, sizes_of, volume
from torchproof.target.service import Service
from torchproof.target.subject import load_module
from torchproof.types import Choice, GoldenSeen, Signature


def open_source(bundle: Bundle, service: Service, choice: Choice) -> Source:
    """What a runtime loads the choice from. Warms up on the golden set's inputs."""
    proof = bundle.proof
    inputs, _ = golden.load(bundle.path / GOLDEN)
    if isinstance(service, ModuleService):
        service.typed_by({spec.name: getattr(torch, spec.dtype) for spec in proof.signature.inputs})
    return Source(
        module=lambda: load_module(service, bundle.weights).eval(),
        signature=proof.signature,
        rows=ascending(inputs, proof.signature),
        batching=proof.batching,
        padding=choice.padding,
        max_batch_size=choice.max_batch_size,
    )


def ascending(rows: Sequence[Row], signature: Signature) -> list[Row]:
    """Rows by size."""
    return sorted(rows, key=lambda row: volume(sizes_of(row, signature.inputs)))


def load_choice(bundle: Bundle, service: Service, choice: Choice) -> Run:
    """The choice's artifact, ready to answer, warm-up included. Raises whatever the runtime raises."""
    candidate = choice.candidate
    runtime = open_runtime(RUNTIMES[candidate.runtime])
    source = open_source(bundle, service, choice)
    return runtime.load(source, candidate.precision, bundle.path / choice.artifact, candidate.num_threads)


def replay(bundle: Bundle, run: Run, choice: Choice) -> tuple[GoldenSeen, ...]:
    """The golden set through a loaded choice, one at a time and in the largest batch that may be served."""
    proof = bundle.proof
    inputs, references = golden.load(bundle.path / GOLDEN)
    seen = []
    for batch_size in sorted({1, choice.max_batch_size}):
        outputs = run_batched(run, inputs, proof.signature, batch_size, padding=choice.padding)
        names = [spec.name for spec in proof.signature.outputs]
        error = golden.compare(outputs, references, names)
        seen.append(
            GoldenSeen(
                target=proof.target.reference,
                candidate=choice.candidate.label,
                output=error.output,
                metric=proof.tolerance.metric,
                error=golden.value_of(error, proof.tolerance),
                bound=proof.tolerance.bound,
                within=golden.within(error, proof.tolerance),
                num_rows=len(inputs),
                batch_size=batch_size,
            )
        )
    return tuple(seen)


def run_batched(run: Run, rows: Sequence[Row], signature: Signature, batch_size: int, *, padding: bool) -> list[Row]:
    """Every row's outputs, with rows sharing forwards as they would when served; in the order of the rows."""
    outputs: list[Row] = [{}] * len(rows)
    for group in batches(rows, signature, batch_size, padding=padding):
        for i, row in zip(group, run_rows(run, [rows[i] for i in group], signature), strict=True):
            outputs[i] = row
    return outputs
