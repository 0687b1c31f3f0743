"""What came of measuring one candidate."""

from typing import Literal

from torchproof.types.candidate import Candidate
from torchproof.types.measurement import Comparison, Measurement
from torchproof.types.observation import CompileSeen
from torchproof.types.record import Record

Outcome = Literal["measured", "skipped", "not built", "failed", "crashed", "timed out", "out of memory", "not reached"]


class GoldenError(Record):
    """Distance of a candidate's outputs from the golden set, worst over all rows and outputs.

    Attributes:
        output: the output that is furthest off.
        cos: 1 is equal; see ``Tolerance``.
        max_abs, max_rel: largest differences, ``max_rel`` relative to the row's largest value.

    A value is None when an output is not finite where the reference is.
    """

    output: str
    cos: float | None
    max_abs: float | None
    max_rel: float | None


class Throughput(Record):
    """Requests per second at one batch size."""

    batch_size: int
    rps: Measurement


class Trial(Record):
    """One row of the report.

    Attributes:
        outcome: ``measured``, or how it ended; ``reason`` then says why (first line of the real error).
        golden: error against the golden set, from the artifact that was timed.
        latency: seconds of one request in the model, over the traffic's sizes; estimate is the median.
        p99: 99th percentile of the same samples.
        comparison: against the reference, interleaved, one request at a time; None for the reference itself.
        cold_start_s: from the start of a fresh process to its first answer; None where only the threads were switched.
        build_s: export or compile, paid once before deployment.
        peak_memory_bytes: peak resident memory of the trial's process up to here; thread counts share one process
            unless its memory is limited.
        artifact_bytes: size on disk of what the runtime loads.
    """

    candidate: Candidate
    outcome: Outcome
    reason: str = ""
    golden: GoldenError | None = None
    latency: Measurement | None = None
    p99: Measurement | None = None
    comparison: Comparison | None = None
    throughput: tuple[Throughput, ...] = ()
    cold_start_s: float | None = None
    build_s: float | None = None
    peak_memory_bytes: int | None = None
    artifact_bytes: int | None = None
    compiled: CompileSeen | None = None
