"""The interface that every runtime fills. A new runtime is one new file and one line in ``RUNTIMES``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchproof.target.rows import FlatModule, Row, Run, sizes_of, stack, volume
from torchproof.types import CompileSeen, Environment, Precision, Signature, Target


@dataclass(frozen=True)
class Source:
    """What a runtime builds from and loads with.

    Attributes:
        module: makes the user's module with the stored weights, in eval mode; slow, so called only where needed.
        rows: sampled requests, ascending by size: examples to export with and to warm up on.
        batching, padding: what ``check`` proved; a runtime builds for one row at a time where batching is not safe.
        onnx_path: the user's own ONNX file, where that is the target.
    """

    module: Callable[[], nn.Module]
    signature: Signature
    rows: Sequence[Row]
    batching: bool
    padding: bool
    max_batch_size: int
    onnx_path: Path | None = None

    def flat(self) -> FlatModule:
        """The module with tensors in and a tuple of tensors out, in eval mode."""
        return FlatModule(self.module(), self.signature).eval()

    def example(self) -> tuple[Tensor, ...]:
        """Inputs to trace with: the largest row, twice where rows may share a batch.

        Sizes 0 and 1 are special to exporters: a dim that is 1 in the example stays 1 for ever.
        """
        row = self.rows[-1]
        copies = 2 if self.batching and self.signature.batched else 1
        return tuple(stack([row] * copies, self.signature).values())

    def dynamic_shapes(self) -> tuple[dict[int, object], ...]:
        """For ``torch.export``: the batch dim where rows may share a batch, and the declared variable dims."""
        offset = 1 if self.signature.batched else 0
        batch = {0: torch.export.Dim.DYNAMIC} if self.signature.batched and self.batching else {}
        return tuple(
            batch | {i + offset: torch.export.Dim.DYNAMIC for i, dim in enumerate(spec.shape) if isinstance(dim, str)}
            for spec in self.signature.inputs
        )

    def warm_up_batches(self) -> list[list[Row]]:
        """Rows for each size and batch size at which a compiled model may have a guard: 1 and the largest of each."""
        smallest, largest = self.rows[0], self.rows[-1]
        ones = [[largest], [smallest]] if volume(self._sizes(smallest)) != volume(self._sizes(largest)) else [[largest]]
        if self.max_batch_size == 1 or not self.batching:
            return ones
        return [[largest] * self.max_batch_size, *ones]

    def _sizes(self, row: Row) -> dict[str, int]:
        return sizes_of(row, self.signature.inputs)


class Runtime(ABC):
    """Executes the model from an artifact.

    Attributes:
        name: in the table of runtimes, and in reports.
        precisions: that it offers, the plainest first.
        simplicity: rank of what there is to understand and to install; a difference that can't be told apart goes to
            the lower.
        extra: the torchproof extra that it needs.
        modules: importable names that loading needs; ``build_modules`` those that building needs besides.
        builds: whether it has an artifact of its own.
        native: whether its artifacts hold machine code for this CPU.
        threads_built_in: whether the thread count is fixed when the artifact is built.
        needs_module: whether loading it calls the user's ``load()``.
    """

    name: ClassVar[str]
    precisions: ClassVar[tuple[Precision, ...]] = ("float32",)
    simplicity: ClassVar[int]
    extra: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ()
    build_modules: ClassVar[tuple[str, ...]] = ()
    builds: ClassVar[bool] = True
    native: ClassVar[bool] = False
    threads_built_in: ClassVar[bool] = False
    needs_module: ClassVar[bool] = False

    def unsupported(self, precision: Precision, environment: Environment, target: Target) -> str:
        """Why this machine, or this kind of target, can't be run; empty when it can."""
        return "the target is an ONNX file, not a module" if target.kind == "onnx" else ""

    @abstractmethod
    def build(
        self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]
    ) -> CompileSeen | None:
        """Writes the artifact into ``folder``; raises whatever the exporter raises.

        Args:
            built: folders of the precisions that this runtime built before, in the same process.
        """

    @abstractmethod
    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        """The artifact, ready to answer, warm-up included.

        Args:
            num_threads: intra-op threads; 0 leaves the default.
        """

    def with_threads(self, run: Run, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        """A loaded artifact with another number of threads, where they are not built in."""
        set_torch_threads(num_threads)
        return run


def set_torch_threads(num_threads: int) -> None:
    """Intra-op threads of torch in this process; 0 leaves the default."""
    if num_threads:
        torch.set_num_threads(num_threads)


def named(function: Callable[..., Sequence[Tensor]], signature: Signature) -> Run:
    """A function on tensors in order, as a runtime on named tensors, under inference mode."""
    names = tuple(spec.name for spec in signature.outputs)

    def run(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            return dict(zip(names, function(*batch.values()), strict=True))

    return run
