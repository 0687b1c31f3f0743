"""TorchScript: traced and frozen."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from torchproof.runtimes.base import Runtime, Source, named, set_torch_threads
from torchproof.target.rows import Run, stack
from torchproof.types import CompileSeen, Precision

FILE = "model.ts"


class TorchScript(Runtime):
    """``torch.jit.trace`` and ``torch.jit.freeze``: loads without the user's code."""

    name = "torchscript"
    simplicity = 2

    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        module: nn.Module = source.flat()
        with torch.no_grad():
            traced = torch.jit.trace(module, source.example(), check_trace=False)  # type: ignore[no-untyped-call]
            torch.jit.freeze(traced).save(folder / FILE)
        return None

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        set_torch_threads(num_threads)
        run = named(torch.jit.load(folder / FILE), source.signature)  # type: ignore[no-untyped-call]
        for rows in source.warm_up_batches() * 2:  # the profiling executor optimises on the second call
            run(stack(rows, source.signature))
        return run
