"""A two-layer LSTM over token ids. torch.compile compiles nothing of it, without a word: finding TP301."""

import torch
from torch import Tensor, nn

import torchproof as tp


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        """(B, L) ids and (B,) lengths -> (B, 32) logits, from the state at each row's last token."""
        hidden, _ = self.lstm(self.embedding(ids))
        last = (length - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        return self.head(hidden.gather(1, last)[:, 0])


class LSTM(tp.Service):
    """Token ids to 32 logits."""

    variable_dims = {"ids": {0: "length"}}

    def load(self) -> nn.Module:
        torch.manual_seed(0)
        return Classifier().eval()

    def encode(self, request: list[int]) -> dict[str, Tensor]:
        return {"ids": torch.tensor(request), "length": torch.tensor(len(request))}

    def decode(self, outputs: Tensor, request: list[int]) -> list[float]:
        return outputs.tolist()

    def samples(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 128, (64,), generator=generator).tolist()
        return [torch.randint(0, 5000, (length,), generator=generator).tolist() for length in lengths]
