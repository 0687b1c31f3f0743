"""torch.export and AOTInductor: compiled before deployment, loads without the user's code."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from torchproof.runtimes.base import Runtime, Source, named, set_torch_threads
from torchproof.target.rows import Run, stack
from torchproof.types import CompileSeen, Precision

FILE = "model.pt2"


class AOTInductor(Runtime):
    """A shared library in a ``.pt2`` package. It holds machine code for the CPU that built it."""

    name = "aotinductor"
    simplicity = 5
    native = True
    threads_built_in = True

    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "build")
        with torch.no_grad():
            program = torch.export.export(
                source.flat(), source.example(), dynamic_shapes=(source.dynamic_shapes(),), strict=False
            )
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))
        shutil.rmtree(folder / "build", ignore_errors=True)
        # Loading probes the CPU by compiling small programs with g++ (pytorch#191715); with their cache in the
        # artifact a start takes 1 s instead of 6.
        self.load(source, precision, folder, 0)
        return None

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        set_torch_threads(num_threads)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
        run = named(torch._inductor.aoti_load_package(str(folder / FILE)), source.signature)
        run(stack(source.rows[:1], source.signature))
        return run
