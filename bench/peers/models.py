# mypy: ignore-errors
"""The models as a peer's user would hold them: the examples' own load, encode and decode, and batches that are padded.

The peers run in an environment of their own, with examples/ and src/ on the path.
"""

import minilm
import mlp
import torch
from torch import Tensor, nn


class MiniLM:
    """Sentence embeddings; a batch is padded to its longest row, and the attention mask says what is padding."""

    def __init__(self) -> None:
        self.service = minilm.MiniLM()
        self.model = self.service.load()

    def encode(self, text: str) -> dict[str, Tensor]:
        return self.service.encode(minilm.Text(text))

    def batch(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}

    @torch.inference_mode()
    def run(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch)

    def decode(self, row: Tensor) -> list[float]:
        return self.service.decode(row, minilm.Text("")).embedding


class MLP:
    """The bare module."""

    def __init__(self) -> None:
        self.model, _ = mlp.small()

    @torch.inference_mode()
    def run(self, batch: Tensor) -> Tensor:
        return self.model(batch)
