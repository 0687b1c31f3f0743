"""A small residual CNN as a bare module: a function that returns the module and example inputs."""

import torch
from torch import Tensor, nn


def conv(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), nn.Conv2d(channels, channels, 3, 1, 1, bias=False))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.body(x)))


def cnn() -> tuple[nn.Module, list[Tensor]]:
    """(B, 3, 96, 96) images -> (B, 100) logits."""
    torch.manual_seed(0)
    module = nn.Sequential(
        conv(3, 32, 2), Residual(32), conv(32, 64, 2), Residual(64), conv(64, 128, 2), Residual(128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100),
    ).eval()  # fmt: skip
    return module, [torch.randn(8, 3, 96, 96)]
