"""What ``tune`` finds for a recipe, and ``train --plan`` runs."""

from torchproof.types.environment import Environment
from torchproof.types.loading import LoadingProof
from torchproof.types.precision import PrecisionProof
from torchproof.types.record import Record
from torchproof.types.target import Target


class TrainPlan(Record):
    """The settings to train a recipe with, and the evidence for them.

    Attributes:
        schema, torchproof, created: version of this form, of torchproof, and when it was made (UTC).
        holds_while: by name, what a machine and its software must have for the measurements to be theirs.
        precision: None where it was not compared: without a margin nothing can be decided, and 32-true stays.
        search_s: wall seconds for all of it.
    """

    schema: int
    torchproof: str
    created: str
    target: Target
    environment: Environment
    holds_while: dict[str, str]
    loading: LoadingProof
    precision: PrecisionProof | None
    search_s: float
