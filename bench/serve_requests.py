"""What bench/serve.py asks the servers, and whether they answer rightly."""

import bisect
import importlib
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from bench.load import Sample

MIN_COS = 0.999
NUM_REQUESTS = 256
# Of the texts, in tokens: most requests are short, and a few are long.
MEDIAN_LENGTH, LENGTH_SIGMA, MAX_LENGTH = 20, 0.85, 150


class WrongAnswerError(Exception):
    pass


class Asked:
    """The requests of a model, and what it answers when it is called by itself."""

    def __init__(self, model: str) -> None:
        module: Any = importlib.import_module(model)
        if model == "minilm":
            service = module.MiniLM()
            network = service.load()
            texts = _texts(service.tokenizer)
            rows = [{name: row[None] for name, row in service.encode(module.Text(text)).items()} for text in texts]
            self.values: list[Any] = [{"text": text} for text in texts]
            self.batched = [{"texts": [text]} for text in texts]
            with torch.inference_mode():
                self.expected = [network(**row)[0].tolist() for row in rows]
        else:
            network, (examples,) = module.small()
            inputs = torch.randn(NUM_REQUESTS, examples.shape[1], generator=torch.Generator().manual_seed(1))
            self.values = [{"input": row} for row in inputs.tolist()]
            self.batched = [{"inputs": [row]} for row in inputs.tolist()]
            with torch.inference_mode():
                self.expected = network(inputs).tolist()
        self.network = network

    def bodies(self, server: str) -> list[bytes]:
        """BentoML's batching takes lists."""
        return [json.dumps(v).encode() for v in (self.batched if server.startswith("bentoml") else self.values)]

    def check(self, samples: Sequence[Sample], server: str) -> None:
        """Raises WrongAnswerError if one of the answers isn't the model's."""
        for index, body in {(s.request_index, s.body) for s in samples if s.status == 200 and not s.error}:
            cos = _cos(_row(body), self.expected[index])
            if not cos >= MIN_COS:
                raise WrongAnswerError(f"{server} answers request {index} with cos {cos}: {body[:200]!r}")


def _texts(tokenizer: Any) -> list[str]:
    """Docstrings of Python's library, with lengths that are drawn from a log-normal distribution."""
    docstrings: Any = importlib.import_module("docstrings")
    texts = sorted(set(docstrings.first_paragraphs().values()))
    by_length = sorted(zip(map(len, tokenizer(texts)["input_ids"]), texts, strict=True))
    rng = random.Random(0)
    wanted = (rng.lognormvariate(math.log(MEDIAN_LENGTH), LENGTH_SIGMA) for _ in range(NUM_REQUESTS))
    del by_length[bisect.bisect(by_length, (MAX_LENGTH + 1, "")) :]
    places = (bisect.bisect(by_length, (round(length), "")) for length in wanted)
    return [by_length.pop(min(place, len(by_length) - 1))[1] for place in places]


def _row(body: bytes) -> list[float]:
    value = msgspec.json.decode(body)
    if isinstance(value, dict):
        value = value["embedding"]
    return value[0] if isinstance(value[0], list) else value


def _cos(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return math.nan
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b) or math.nan)
