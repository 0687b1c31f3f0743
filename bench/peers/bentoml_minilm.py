# mypy: ignore-errors
"""BentoML with its adaptive batching on: ``bentoml serve bentoml_minilm:Embed``."""

import bentoml
from models import MiniLM


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Embed:
    def __init__(self) -> None:
        self.minilm = MiniLM()

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=10000)
    def predict(self, texts: list[str]) -> list[list[float]]:
        outputs = self.minilm.run(self.minilm.batch([self.minilm.encode(text) for text in texts]))
        return [self.minilm.decode(row) for row in outputs]
