# mypy: ignore-errors
"""BentoML with its adaptive batching on: ``bentoml serve bentoml_mlp:Classify``."""

import bentoml
import numpy as np
import torch
from models import MLP


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Classify:
    def __init__(self) -> None:
        self.mlp = MLP()

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=10000)
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return self.mlp.run(torch.as_tensor(inputs, dtype=torch.float32)).numpy()
