# mypy: ignore-errors
"""LitServe with its batching on: ``python litserve_mlp.py PORT``."""

import sys

import litserve as ls
import torch
from models import MLP


class Api(ls.LitAPI):
    def setup(self, device):
        self.mlp = MLP()

    def decode_request(self, request):
        return torch.tensor(request["input"])

    def predict(self, x):
        return self.mlp.run(x)  # stacked by LitServe

    def encode_response(self, output):
        return output.tolist()


if __name__ == "__main__":
    server = ls.LitServer(Api(max_batch_size=32, batch_timeout=0.005), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
