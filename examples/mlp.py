"""A multi-layer perceptron as a bare module."""

import torch
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, list[Tensor]]:
    """(B, 784) -> (B, 10) logits."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size_in, size_out in ((784, 1024), (1024, 1024), (1024, 1024)):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(1024, 10)).eval()
    return module, [torch.randn(32, 784)]
