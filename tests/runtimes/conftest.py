"""The bench of this folder, in this process or in a fresh one."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from torchproof.machine.threads import thread_environment
from torchproof.measure.process import FreshProcess

HERE = Path(__file__).parent
TIMEOUT_S = 240.0  # compiling on a busy machine


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A ``Bench`` in this process, for the runtimes that leave nothing behind in it but a thread count."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(HERE))
    yield __import__("runtime_bench").Bench()
    torch.set_num_threads(threads)
    sys.modules.pop("runtime_bench", None)


@pytest.fixture
def fresh() -> Iterator[Callable[[], Callable[..., Any]]]:
    """A ``Bench`` in a fresh process at each call; gives what calls its methods."""
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
    with ExitStack() as stack:

        def started() -> Callable[..., Any]:
            environment = {"PYTHONPATH": path, **thread_environment(1)}
            process = stack.enter_context(FreshProcess("runtime_bench:Bench", environment=environment))
            return lambda method, **arguments: process.call(method, timeout_s=TIMEOUT_S, **arguments)

        yield started
