# mypy: ignore-errors
"""LitServe with its batching on: ``python litserve_minilm.py PORT``."""

import sys

import litserve as ls
from models import MiniLM


class Api(ls.LitAPI):
    def setup(self, device):
        self.minilm = MiniLM()

    def decode_request(self, request):
        return self.minilm.encode(request["text"])

    def batch(self, inputs):
        return self.minilm.batch(inputs)

    def predict(self, x):
        return self.minilm.run(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"embedding": self.minilm.decode(output)}


if __name__ == "__main__":
    server = ls.LitServer(Api(max_batch_size=32, batch_timeout=0.005), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
