"""What many tests share: one torch thread, imports undone, and a way to write the user's file."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

HEADER = """
import torch
from torch import nn
import torchproof as tp
"""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small models are slower on many threads, and other work runs on the same cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _imports_undone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's file of one test is not found by the next."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    known = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file that the user might have written; by default ``app.py``, which starts with the usual imports."""

    def written(code: str, name: str = "app.py", *, header: str = HEADER) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + dedent(code))
        return path

    return written
