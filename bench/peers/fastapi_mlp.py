# mypy: ignore-errors
"""Plain FastAPI, as its tutorial has it: a ``def`` endpoint, which runs in the thread pool. No batching."""

import torch
from fastapi import FastAPI
from models import MLP
from pydantic import BaseModel


class Input(BaseModel):
    input: list[float]


app = FastAPI()
model = MLP()


@app.post("/predict")
def predict(request: Input) -> list[float]:
    return model.run(torch.tensor([request.input]))[0].tolist()
