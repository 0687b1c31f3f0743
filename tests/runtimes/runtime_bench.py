"""Twenty-line models, and a handler that builds a runtime's artifact and compares what it answers with eager.

Shape legend: B requests in a batch, L tokens, D features.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchproof.runtimes import RUNTIMES, Source, open_runtime
from torchproof.target.rows import Row, Run, eager, stack
from torchproof.target.service import Service
from torchproof.target.signature import read_signature
from torchproof.types import Precision

LENGTHS = (3, 7, 12)  # of the samples: the largest is the example that is exported


class Masked(nn.Module):
    """ids and mask (B, L) -> the masked mean (B, D) and every token (B, L, D)."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 8)
        self.returns = returns

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        tokens = self.linear(self.embedding(ids)).tanh()
        weights = mask.unsqueeze(-1).to(tokens.dtype)
        pooled = (tokens * weights).sum(1) / weights.sum(1)
        if self.returns == "tensor":
            return pooled
        if self.returns == "tuple":
            return pooled, tokens
        # The same tensor twice, an integer output, and a name that no file format likes.
        return {"pooled": pooled, "tokens/all": tokens, "again": pooled, "kept": mask.sum(1)}


class Texts(Service):
    variable_dims = {"ids": {0: "length"}, "mask": {0: "length"}}


def row(length: int, seed: int = 0) -> Row:
    generator = torch.Generator().manual_seed(100 * length + seed)
    mask = torch.ones(length, dtype=torch.int64)
    mask[length // 2 + 1 :] = 0
    return {"ids": torch.randint(0, 50, (length,), generator=generator), "mask": mask}


class Bench:
    """One model with one runtime; its public methods answer ``FreshProcess.call``."""

    def open(self, returns: str, batching: bool) -> None:
        torch.manual_seed(0)
        self.module = Masked(returns).eval()
        self.signature = read_signature(self.module, [row(n) for n in LENGTHS], Texts())
        self.source = Source(
            module=lambda: copy.deepcopy(self.module),  # loading bf16 changes it
            signature=self.signature,
            rows=[row(n) for n in LENGTHS],
            batching=batching,
            padding=False,
            max_batch_size=4 if batching else 1,
        )

    def build(self, runtime: str, precision: Precision, folder: str, built: dict[Precision, str]) -> None:
        Path(folder).mkdir(parents=True)
        folders = {name: Path(path) for name, path in built.items()}
        open_runtime(RUNTIMES[runtime]).build(self.source, precision, Path(folder), folders)

    def load(self, runtime: str, precision: Precision, folder: str, num_threads: int) -> None:
        self.runtime, self.precision, self.folder = open_runtime(RUNTIMES[runtime]), precision, Path(folder)
        self.run: Run = self.runtime.load(self.source, precision, self.folder, num_threads)

    def set_threads(self, num_threads: int) -> None:
        self.run = self.runtime.with_threads(self.run, self.source, self.precision, self.folder, num_threads)

    def errors(self, shapes: Sequence[Sequence[int]]) -> dict[str, float]:
        """Largest difference from eager float32 at each (B, L), over all outputs, relative to the largest value.

        Raises:
            AssertionError: names, dtypes, shapes or order differ.
        """
        reference = eager(self.module, self.signature)
        return {f"{size}x{length}": _worst(reference, self.run, self._batch(size, length)) for size, length in shapes}

    def needs_grad(self) -> bool:
        return any(t.requires_grad for t in self.run(self._batch(2, 7)).values())

    def _batch(self, size: int, length: int) -> Row:
        return stack([row(length, seed) for seed in range(size)], self.signature)


def _worst(reference: Callable[[Row], Row], run: Run, batch: Row) -> float:
    kept = {name: tensor.clone() for name, tensor in batch.items()}
    outputs, wanted = run(batch), reference(kept)
    assert list(outputs) == list(wanted)
    worst = 0.0
    for name, tensor in wanted.items():
        assert outputs[name].dtype == tensor.dtype, f"{name} is {outputs[name].dtype}"
        assert outputs[name].shape == tensor.shape, f"{name} is {tuple(outputs[name].shape)}"
        diff = (outputs[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
        worst = max(worst, float(diff))
    return worst
