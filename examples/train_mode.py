"""A model that is served in train mode, with dropout: finding TP101. Its twin's load() calls eval()."""

import torch
from torch import Tensor, nn

import torchproof as tp


class TrainMode(tp.Service):
    """Sixteen numbers to four, dropping a tenth of the activations at random."""

    def load(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))  # eval() is missing

    def encode(self, request: list[float]) -> Tensor:
        return torch.tensor(request)

    def decode(self, outputs: Tensor, request: list[float]) -> list[float]:
        return outputs.tolist()

    def samples(self) -> list[list[float]]:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).tolist()


class EvalMode(TrainMode):
    """The same, put in eval mode where it is loaded."""

    def load(self) -> nn.Module:
        return super().load().eval()
