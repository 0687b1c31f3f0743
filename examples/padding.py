"""A model whose answer changes with padding: finding TP702. Its twin masks what was padded."""

import torch
from torch import Tensor, nn

import torchproof as tp


class MeanPool(nn.Module):
    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.masked = masked

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) ids, 0 where padded -> (B, 16): the mean over the tokens."""
        vectors = self.embedding(ids)
        if not self.masked:
            return vectors.mean(1)
        mask = (ids != 0).unsqueeze(-1)
        return (vectors * mask).sum(1) / mask.sum(1)


class Unmasked(tp.Service):
    """The mean over all tokens, padded ones too."""

    variable_dims = {"ids": {0: "length"}}
    masked = False

    def load(self) -> nn.Module:
        torch.manual_seed(0)
        return MeanPool(masked=self.masked).eval()

    def encode(self, request: list[int]) -> dict[str, Tensor]:
        return {"ids": torch.tensor(request)}

    def decode(self, outputs: Tensor, request: list[int]) -> list[float]:
        return outputs.tolist()

    def samples(self) -> list[list[int]]:
        return [list(range(1, length)) for length in (4, 8, 8, 13, 21, 34)]


class Masked(Unmasked):
    """The mean over the tokens that are there."""

    masked = True
