"""torch.compile with inductor; the artifact is its cache folder."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from torchproof.runtimes.base import Runtime, Source, named, set_torch_threads
from torchproof.runtimes.cache import fill_cache, use_cache
from torchproof.runtimes.fallbacks import CountedModule
from torchproof.target.rows import Run, stack
from torchproof.types import CompileSeen, Precision


class Inductor(Runtime):
    """``torch.compile(dynamic=True)``, warmed up and then sealed.

    What ships is the cache folder: on CPU the portable cache (``save_cache_artifacts``) still rebuilt kernels in a
    fresh process (measured: it saved a third of a cold start where the folder saved three quarters).
    """

    name = "inductor"
    simplicity = 4
    native = True
    threads_built_in = True
    needs_module = True

    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        fill_cache(folder)
        counters.clear()
        self._compile(source)
        return seen(self.name)

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        set_torch_threads(num_threads)
        use_cache(folder)
        run = self._compile(source)
        # An input that would need another graph now runs eagerly instead of stalling a request for seconds.
        torch.compiler.set_stance("eager_on_recompile")
        return run

    def _compile(self, source: Source) -> Run:
        module = CountedModule(source.module(), source.signature).eval()
        run = named(torch.compile(module, dynamic=True), source.signature)
        for rows in source.warm_up_batches():
            run(stack(rows, source.signature))
        return run


def seen(name: str) -> CompileSeen:
    """What torch.compile did in this process, from dynamo's counters."""
    return CompileSeen(
        target=name,
        num_graphs=counters["stats"].get("unique_graphs", 0),
        num_graph_breaks=sum(counters["graph_break"].values()),
        num_frames=counters["frames"].get("total", 0),
        reasons=tuple(reason.splitlines()[0] for reason in list(counters["graph_break"])[:8]),
    )
