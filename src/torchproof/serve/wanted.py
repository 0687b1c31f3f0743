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
        environment: variables of the replicas' processes.
    """

    bundle: Path | None
    target: Target | None
    num_replicas: int | None
    cores: tuple[tuple[int, ...], ...]
    num_threads: int
    name: str
    asked: CapsAsked
    environment: Mapping[str, str]
    log_format: Format
