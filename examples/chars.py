"""A small transformer that learns to write the licence of this repository, one character after the other."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import Dataset

import torchproof as tp

TEXT = Path(__file__).parents[1] / "LICENSE"
CONTEXT = 64  # characters that it sees


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Each stretch of CONTEXT characters, and the same one further on."""

    def __init__(self, ids: Tensor, stride: int) -> None:
        self.ids, self.stride = ids, stride

    def __len__(self) -> int:
        return (len(self.ids) - CONTEXT - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        return self.ids[start : start + CONTEXT], self.ids[start + 1 : start + CONTEXT + 1]


class Block(nn.Module):
    """(B, L, W) -> (B, L, W)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Writer(nn.Module):
    """(B, L) characters -> (B, L, V) logits of the next ones."""

    def __init__(self, num_chars: int, width: int = 64, num_blocks: int = 2) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(num_chars, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_chars)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.chars(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Chars(tp.Recipe):
    batch_size = 32
    num_epochs = 3
    max_grad_norm = 1.0

    def __init__(self) -> None:
        text = TEXT.read_text()
        self.alphabet = sorted(set(text))
        ids = torch.tensor([self.alphabet.index(char) for char in text])
        self.train_ids, self.eval_ids = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]

    def model(self) -> nn.Module:
        return Writer(len(self.alphabet))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        num_steps = self.num_epochs * -(-len(self.train_data()) // self.batch_size)
        return OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps + 1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, following = batch
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())

    def train_data(self) -> Windows:
        return Windows(self.train_ids, stride=4)

    def eval_data(self) -> Windows:
        return Windows(self.eval_ids, stride=CONTEXT)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        ids, following = batch
        logits = model(ids)
        return {
            "nll": nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()),
            "acc": (logits.argmax(-1) == following).float().mean(),
        }
