"""Multi-layer perceptrons as bare modules."""

import itertools

import torch
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, list[Tensor]]:
    """(B, 784) -> (B, 10) logits."""
    return _layers(784, 1024, 1024, 1024, 10)


def small() -> tuple[nn.Module, list[Tensor]]:
    """(B, 64) -> (B, 10) logits: a forward takes less than a hop to another process."""
    return _layers(64, 256, 256, 10)


def _layers(*sizes: int) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval(), [torch.randn(32, sizes[0])]
