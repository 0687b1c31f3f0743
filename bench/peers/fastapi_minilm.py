# mypy: ignore-errors
"""Plain FastAPI, as its tutorial has it: a ``def`` endpoint, which runs in the thread pool. No batching."""

from fastapi import FastAPI
from minilm import Embedding, Text
from models import MiniLM

app = FastAPI()
model = MiniLM()


@app.post("/predict")
def predict(request: Text) -> Embedding:
    outputs = model.run(model.batch([model.encode(request.text)]))
    return Embedding(model.decode(outputs[0]))
