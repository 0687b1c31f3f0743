"""What is to be served, as the command line has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchproof.serve.logs import Format
from torchproof.types import Target
from torchproof.types.serving import CapsAsked


@dataclass(frozen=True)
class Wanted:
    """What is to be served, and how.

    Attributes:
        bundle, target: one of the two.
        num_replicas: None to choose between replicas and this process by measurement; 0 for this process.
        cores: of each replica; one entry for each that there would be.
        num_threads: at most so many intra-op threads of each; 0 as planned.
        name: of the model, in the URLs of the Open Inference Protocol.
        lone_cores: that a request may use while no other one is at work; empty: its replica's.
        environment: variables of the replicas' processes.
    """

    bundle: Path | None
    target: Target | None
    num_replicas: int | None
    cores: tuple[tuple[int, ...], ...]
    num_threads: int
    name: str
    asked: CapsAsked
    lone_cores: tuple[int, ...]
    environment: Mapping[str, str]
    log_format: Format
