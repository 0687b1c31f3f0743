"""A small CNN on scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, no download."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import torchproof as tp

NUM_TEST = 297


class Digits(tp.Recipe):
    """(B, 1, 8, 8) -> (B, 10) logits."""

    batch_size = 64
    num_epochs = 5

    def __init__(self) -> None:
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = images[order], torch.tensor(digits.target)[order]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(32 * 4 * 4, 10),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def train_data(self) -> TensorDataset:
        return TensorDataset(self.images[NUM_TEST:], self.labels[NUM_TEST:])

    def eval_data(self) -> TensorDataset:
        return TensorDataset(self.images[:NUM_TEST], self.labels[:NUM_TEST])

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "acc": (logits.argmax(1) == labels).float().mean(),
            "nll": nn.functional.cross_entropy(logits, labels),
        }
