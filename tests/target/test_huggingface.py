"""A Hugging Face folder as a target: a tiny random BERT, made here, with nothing downloaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from torchproof.check import audit
from torchproof.errors import TargetError
from torchproof.target.huggingface import SAMPLES, HuggingFaceText, Text
from torchproof.target.resolve import resolve

transformers = pytest.importorskip("transformers")

WORDS = ("the", "a", "order", "was", "late", "where", "is", "my", "thanks", "!", "?", ".", ",")


def save(folder: Path, kind: str, *, tokenizer: bool = True, **config: Any) -> Path:
    """A model of two small layers, with at most 48 tokens to a text."""
    settings = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=48, **config,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, kind)(settings).save_pretrained(folder)
    if tokenizer:
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("encoder"), "BertModel")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {0: "calm", 1: "angry", 2: "lost"}
    return save(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", id2label=labels)


@pytest.mark.parametrize("kind", ["encoder", "classifier"])
def test_it_is_found_fit_to_be_batched_and_padded(request: pytest.FixtureRequest, kind: str) -> None:
    """Its own samples have several lengths, the longest cut to what the model takes, and its mask works."""
    report = audit(resolve(str(request.getfixturevalue(kind)))).report
    assert report.findings == ()
    assert (report.batching, report.padding, report.precision) == (True, True, "float64")
    assert report.traffic.num_requests == len(SAMPLES)
    assert report.traffic.sizes["length"][0] < report.traffic.sizes["length"][-1] == 48
    assert [spec.shape for spec in report.signature.outputs] == [(16,) if kind == "encoder" else (3,)]


def test_an_embedding_has_length_one(encoder: Path) -> None:
    answer = answered(encoder, "where is my order ?")
    assert list(answer) == ["embedding"]
    assert float(torch.tensor(answer["embedding"]).norm()) == pytest.approx(1, abs=1e-6)


def test_a_class_has_its_label_and_its_share(classifier: Path) -> None:
    answer = answered(classifier, "thanks !")
    assert answer["label"] in ("calm", "angry", "lost")
    assert 1 / 3 <= answer["score"] <= 1


def answered(folder: Path, text: str) -> dict[str, Any]:
    service = HuggingFaceText(folder)
    batch = {name: tensor.unsqueeze(0) for name, tensor in service.encode(Text(text)).items()}
    with torch.inference_mode():
        (row,) = service.load().eval()(**batch)
    return service.decode(row, Text(text))


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    """Before anything else of the folder is read: a model without a tokenizer is no text encoder either."""
    with pytest.raises(TargetError, match="a folder with BertForMaskedLM is not supported yet") as caught:
        HuggingFaceText(save(tmp_path, "BertForMaskedLM", tokenizer=False))
    assert caught.value.help == "write a Service whose load() returns the model"


def test_an_encoder_with_a_decoder_is_not_supported(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="a folder with BertModel is not supported yet"):
        HuggingFaceText(save(tmp_path, "BertModel", is_encoder_decoder=True))


def test_a_folder_that_is_not_whole(tmp_path: Path, encoder: Path) -> None:
    """No tokenizer, no weights, a broken config: one line, not the library's traceback."""
    with pytest.raises(TargetError, match="has no tokenizer"):
        HuggingFaceText(save(tmp_path / "a", "BertModel", tokenizer=False))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{")
    with pytest.raises(TargetError, match="not readable by AutoConfig"):
        HuggingFaceText(tmp_path / "b")
    weightless = tmp_path / "c"
    weightless.mkdir()
    for file in encoder.iterdir():
        if file.suffix != ".safetensors":
            (weightless / file.name).write_bytes(file.read_bytes())
    with pytest.raises(TargetError, match="holds no weights as safetensors"):
        HuggingFaceText(weightless)
    (weightless / "model.safetensors").write_bytes(b"{")
    with pytest.raises(TargetError, match="not readable by AutoModel"):
        HuggingFaceText(weightless).load()
