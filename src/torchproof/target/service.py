"""What the user writes for inference: four methods around an ``nn.Module``."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn


class Service:
    """A model with the code around it. Subclass it, override four methods, and add nothing else.

    Whatever ``encode`` and ``decode`` need (a tokenizer, labels) belongs in ``__init__``, which takes no arguments.
    ``load`` only builds the network: a bundle with an exported artifact never calls it.

    Attributes:
        variable_dims: for each input, the dims whose size differs between requests, and a name for each. Dims are
            counted without the batch dim; dims of one name have one size: ``{"input_ids": {0: "length"}}``.
        pad_values: what to fill a variable dim with where padding is proven safe; 0 for inputs not named.
        idempotent: whether a request may be answered again by another process where the first one ended, as it may for
            all code that only computes.
        files: files that the code reads, relative to its own folder, to take along into a bundle; globs are allowed.
    """

    variable_dims: ClassVar[Mapping[str, Mapping[int, str]]] = {}
    pad_values: ClassVar[Mapping[str, float]] = {}
    idempotent: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ()

    def load(self) -> "nn.Module":
        """The network. torchproof calls ``eval()`` on it and runs it under ``torch.inference_mode()``."""
        raise NotImplementedError

    def encode(self, request: Any) -> Any:
        """One request to the model's inputs, without a batch dim.

        Returns:
            ``{"input_ids": Tensor[length], ...}`` with the names that ``forward`` takes; or a tensor, or a tuple
            of tensors, in the order of ``forward``.

        Raises:
            torchproof.RequestError: the request can't be taken; the message goes to the client.
        """
        raise NotImplementedError

    def decode(self, outputs: Any, request: Any) -> Any:
        """One row of the outputs to the response, which must be JSON-serialisable.

        Args:
            outputs: a tensor, a tuple or a dict of tensors, as the model returns (a dataclass comes as a dict),
                without the batch dim.
            request: what ``encode`` got.
        """
        raise NotImplementedError

    def samples(self) -> Iterable[Any]:
        """Representative requests: recorded traffic, or a few examples."""
        raise NotImplementedError
