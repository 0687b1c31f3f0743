"""The nouns that every package shares: frozen records of plain values, stored as JSON. No behaviour, no torch."""

from torchproof.types.candidate import Candidate, Choice, Precision
from torchproof.types.environment import Environment
from torchproof.types.finding import Finding, Severity
from torchproof.types.limits import Limits, Tolerance
from torchproof.types.measurement import Comparison, Measurement, Unit, Verdict
from torchproof.types.observation import (
    ArtifactSeen,
    BatchSeen,
    CompileSeen,
    GoldenSeen,
    Growth,
    LoadSeen,
    MemorySeen,
    MetricSeen,
    ModesSeen,
    Observation,
    OverflowSeen,
    PaddingSeen,
    PlanSeen,
    TrainSeen,
)
from torchproof.types.plan import Decision, Plan, Rejected
from torchproof.types.precision import ScalerSeen
from torchproof.types.proof import SCHEMA, CheckReport, GoldenSummary, Proof
from torchproof.types.record import Record, decode, encode
from torchproof.types.signature import InputSpec, OutputSpec, Signature
from torchproof.types.target import Target
from torchproof.types.traffic import Traffic
from torchproof.types.trial import GoldenError, Outcome, Throughput, Trial

__all__ = [
    "SCHEMA",
    "ArtifactSeen",
    "BatchSeen",
    "Candidate",
    "CheckReport",
    "Choice",
    "Comparison",
    "CompileSeen",
    "Decision",
    "Environment",
    "Finding",
    "GoldenError",
    "GoldenSeen",
    "GoldenSummary",
    "Growth",
    "InputSpec",
    "Limits",
    "LoadSeen",
    "Measurement",
    "MemorySeen",
    "MetricSeen",
    "ModesSeen",
    "Observation",
    "Outcome",
    "OutputSpec",
    "OverflowSeen",
    "PaddingSeen",
    "Plan",
    "PlanSeen",
    "Precision",
    "Proof",
    "Record",
    "Rejected",
    "ScalerSeen",
    "Severity",
    "Signature",
    "Target",
    "Throughput",
    "Tolerance",
    "Traffic",
    "TrainSeen",
    "Trial",
    "Unit",
    "Verdict",
    "decode",
    "encode",
]
