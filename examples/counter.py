"""A model that changes a buffer at every request: finding TP104. Its twin reads the buffer and leaves it."""

import torch
from torch import Tensor, nn

import torchproof as tp


class Normalizer(nn.Module):
    mean: Tensor

    def __init__(self, *, updates: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.updates = updates

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) -> (B, 4), after subtracting a mean."""
        if self.updates:
            self.mean.mul_(0.99).add_(0.01 * x.mean(0))
        return self.linear(x - self.mean)


class RunningMean(tp.Service):
    """Keeps a running mean of the requests, in eval mode too."""

    updates = True

    def load(self) -> nn.Module:
        torch.manual_seed(0)
        return Normalizer(updates=self.updates).eval()

    def encode(self, request: list[float]) -> Tensor:
        return torch.tensor(request)

    def decode(self, outputs: Tensor, request: list[float]) -> list[float]:
        return outputs.tolist()

    def samples(self) -> list[list[float]]:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).tolist()


class FixedMean(RunningMean):
    """Subtracts the mean that training left."""

    updates = False
