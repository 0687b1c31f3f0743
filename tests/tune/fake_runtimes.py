"""Runtimes that do every wrong thing, and one that is faster for a good reason."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchproof.errors import TargetError
from torchproof.runtimes.base import Source
from torchproof.runtimes.eager import Eager
from torchproof.target.rows import Batch, Run
from torchproof.types import Precision

# Calls before it happens: after the golden set, in the middle of the timing.
CALLS = 60


def segfault() -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError


def hang() -> NoReturn:
    threading.Event().wait()
    raise AssertionError


def eat() -> NoReturn:
    eaten = []
    while True:
        eaten.append(bytearray(b"x") * (64 << 20))


def wait_to_be_killed() -> NoReturn:
    """Says where it is, and stays."""
    ready = Path(os.environ["TORCHPROOF_TEST_VICTIM"])
    ready.with_suffix(".new").write_text(str(os.getpid()))
    ready.with_suffix(".new").rename(ready)
    signal.pause()
    raise AssertionError


class Fake(Eager):
    """Eager in all but what a subclass does wrong."""

    precisions = ("float32",)
    simplicity = 9
    threads_built_in = True

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        self.calls = 0
        run = super().load(source, precision, folder, num_threads)

        def changed(batch: Batch) -> Batch:
            self.calls += 1
            return {name: self.change(tensor) for name, tensor in run(batch).items()}

        return changed

    def change(self, output: torch.Tensor) -> torch.Tensor:
        return output


def in_load(action: Callable[[], NoReturn]) -> type[Fake]:
    class InLoad(Fake):
        def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
            action()

    return InLoad


def in_run(action: Callable[[], NoReturn]) -> type[Fake]:
    class InRun(Fake):
        def change(self, output: torch.Tensor) -> torch.Tensor:
            if self.calls > CALLS:
                action()
            return output

    return InRun


def in_build(action: Callable[[], NoReturn]) -> type[Fake]:
    class InBuild(Fake):
        builds = True

        def build(self, source: Source, precision: Precision, folder: Path, built: Mapping[Precision, Path]) -> None:
            (folder / "half").write_text("an artifact that was never finished")
            action()

    return InBuild


def unsupported() -> NoReturn:
    raise RuntimeError("\nunsupported operator aten::magic\n  and a page of advice")


def refuse() -> NoReturn:
    raise TargetError("the exporter saw a list where eager saw a tensor", help="none")


CrashInLoad, CrashInRun, CrashInBuild = in_load(segfault), in_run(segfault), in_build(segfault)
HangInLoad, HangInRun, HangInBuild = in_load(hang), in_run(hang), in_build(hang)
Eater, Victim = in_run(eat), in_run(wait_to_be_killed)
ExportFails, ExportRefuses, LoadRefuses = in_build(unsupported), in_build(refuse), in_load(refuse)


class Scaled(Fake):
    def change(self, output: torch.Tensor) -> torch.Tensor:
        return output * 2


class NotFinite(Fake):
    def change(self, output: torch.Tensor) -> torch.Tensor:
        return output / 0


class Noisy(Fake):
    def change(self, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return output + noise * output.std() * 0.1


class Fast(Fake):
    """Does once what the model does again and again."""

    def load(self, source: Source, precision: Precision, folder: Path, num_threads: int) -> Run:
        torch.set_num_threads(num_threads)
        linear: Any = source.module().linear

        def run(batch: Batch) -> Batch:
            with torch.inference_mode():
                return {"output": linear(batch["x"])}

        return run
