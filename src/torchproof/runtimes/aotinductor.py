"""torch.export and AOTInductor: compiled before deployment, loads without the user's code."""

from collections.abc import Mapping
from pathlib import Path

import torch

from torchproof.runtimes.base import Runtime, Source, named, set_torch_threads
from torchproof.runtimes.cache import fill_cache, use_cache
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
        fill_cache(folder)
        with torch.no_grad():
            program = torch.export.export(
                source.flat(), source.example(), dynamic_shapes=(source.dynamic_shapes(),), strict=False
            )
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))
        # The cache stays in the artifact: loading probes the CPU by compiling small programs with g++ (pytorch#191715),
        # and with their results at hand a start takes 1 s instead of 6.
        self._open(source, folder)
        return None

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        set_torch_threads(num_threads)
        use_cache(folder)
        return self._open(source, folder)

    def _open(self, source: Source, folder: Path) -> Run:
        run = named(torch._inductor.aoti_load_package(str(folder / FILE)), source.signature)
        run(stack(source.rows[:1], source.signature))
        return run
