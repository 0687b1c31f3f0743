"""A Hugging Face model folder as a target: text in, an embedding or class scores out."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from torchproof.errors import TargetError
from torchproof.target.service import Service
from torchproof.target.usercode import first_line

# Of several lengths, so that a model can be tried without a traffic file; the report says that they were used.
SAMPLES = (
    "Thanks!",
    "Where is my order?",
    "The package arrived two days late and the box was open.",
    "Return a list of the words in the string, using sep as the delimiter string.",
    "Please cancel my subscription at the end of this month and confirm by mail that no further payment will be taken.",
    "The committee met on Tuesday to discuss the budget for the coming year. Members agreed that the library should "
    "stay open on Sundays, that the bus line to the hospital be extended, and that the decision about the new school "
    "be put off until the figures for the last quarter are known.",
    "We stayed for four nights in a room on the second floor. The staff were friendly and breakfast was good, but the "
    "street below was loud until two in the morning, the lift was out of order for most of our stay, and nobody could "
    "tell us when it would be repaired. On the last day we were asked to leave by ten although the website promises "
    "eleven. The beach is a short walk away and clean. We would come again in spring, when there is less traffic, "
    "and ask for a room that faces the garden.",
)


class Text(msgspec.Struct):
    """One request."""

    text: str


class HuggingFaceText(Service):
    """Tokenizes a text, runs the encoder, and returns its embedding or its class scores.

    The embedding is the mean over the tokens, of length 1; the pooling of most sentence encoders.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise TargetError(f"{folder} needs transformers", help="pip install 'torchproof[hf]'")
        self.folder = folder
        self.transformers = importlib.import_module("transformers")
        self.config = self._read("AutoConfig")
        self.architecture = next(iter(self.config.architectures or ["an unnamed model"]))
        self.classifies = self.architecture.endswith("ForSequenceClassification")
        if self.config.is_encoder_decoder or not (self.classifies or self.architecture.endswith("Model")):
            raise TargetError(
                f"{folder}: a folder with {self.architecture} is not supported yet, only text encoders and "
                "sequence classifiers",
                help="write a Service whose load() returns the model",
            )
        self.tokenizer = self._read("AutoTokenizer")
        if len(self.tokenizer) <= len(self.tokenizer.all_special_tokens):  # what transformers makes of no file at all
            raise TargetError(f"{folder} has no tokenizer", help="save the tokenizer into the same folder")
        longest = self.tokenizer.model_max_length  # 1e30 where the tokenizer was saved without it
        self.max_length = min(longest, getattr(self.config, "max_position_embeddings", longest))
        names = [n for n in self.tokenizer.model_input_names if n in ("input_ids", "attention_mask", "token_type_ids")]
        self.names = names
        self.variable_dims = {name: {0: "length"} for name in names}  # type: ignore[misc]
        self.pad_values = {"input_ids": float(self.tokenizer.pad_token_id or 0)}  # type: ignore[misc]
        if not any(folder.glob("*.safetensors")):
            raise TargetError(
                f"{folder} holds no weights as safetensors",
                help="load the model once and write it again with save_pretrained(): a bundle holds no pickles",
            )

    def load(self) -> nn.Module:
        kind = "AutoModelForSequenceClassification" if self.classifies else "AutoModel"
        model = self._read(kind)
        return Classifier(model) if self.classifies else Embedder(model)

    def encode(self, request: Text) -> dict[str, Tensor]:
        tokens = self.tokenizer(request.text, truncation=True, max_length=self.max_length, return_tensors="pt")
        return {name: tokens[name][0] for name in self.names}

    def decode(self, outputs: Any, request: Text) -> dict[str, Any]:
        if not self.classifies:
            return {"embedding": outputs.tolist()}
        scores = outputs.softmax(-1)
        best = int(scores.argmax())
        return {"label": self.config.id2label.get(best, str(best)), "score": float(scores[best])}

    def samples(self) -> list[Text]:
        return [Text(text) for text in SAMPLES]

    def _read(self, kind: str) -> Any:
        try:
            return getattr(self.transformers, kind).from_pretrained(self.folder, local_files_only=True)
        except Exception as exc:  # noqa: BLE001  transformers raises whatever its parsers do
            raise TargetError(
                f"{self.folder}: not readable by {kind}: {first_line(exc)}", help="save model and tokenizer again"
            ) from None


class Embedder(nn.Module):
    """(B, L) tokens -> (B, D): the mean over the tokens that the mask keeps, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Token ids and mask, (B, L) int64."""
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **extra).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)


class Classifier(nn.Module):
    """(B, L) tokens -> (B, C) logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Token ids and mask, (B, L) int64."""
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra).logits
        return logits
