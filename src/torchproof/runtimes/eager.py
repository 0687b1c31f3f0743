"""The module itself: the baseline, the fallback that always works, and bf16 weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchproof.runtimes.base import Runtime, Source, set_torch_threads
from torchproof.target.rows import Batch, Run, eager
from torchproof.types import CompileSeen, Environment, Precision, Target

# Without one of these, bf16 arithmetic is emulated and slower than float32.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


class Eager(Runtime):
    """Eager PyTorch under ``torch.inference_mode()``."""

    name = "eager"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "bfloat16")
    simplicity = 0
    builds = False
    needs_module = True

    def unsupported(self, precision: Precision, environment: Environment, target: Target) -> str:
        if precision == "float32":
            return ""  # an ONNX file too: there it stands for ONNX Runtime with its default settings
        if not BF16_FLAGS & set(environment.cpu_flags):
            return "this CPU has no bf16 arithmetic"
        return super().unsupported(precision, environment, target)

    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        """Nothing to build: the code and the weights are in the bundle anyway."""
        return None

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        set_torch_threads(num_threads)
        module = source.module()
        if precision == "float32":
            run = eager(module, source.signature)
        else:
            low = eager(module.bfloat16(), source.signature, torch.bfloat16)
            dtypes = {spec.name: getattr(torch, spec.dtype) for spec in source.signature.outputs}

            def run(batch: Batch) -> Batch:
                return {name: _to(tensor, dtypes[name]) for name, tensor in low(batch).items()}

        return run


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)
