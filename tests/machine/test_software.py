"""Versions, extras and variables are read without importing anything; a broken torch becomes a line, not a crash."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from torchproof.machine import software, torch_settings
from torchproof.machine.environment import read_environment
from torchproof.types import Environment, decode, encode


def test_the_table_of_extras_is_that_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        name: tuple(re.split(r"\[|>=", requirement)[0] for requirement in requirements)
        for name, requirements in project["optional-dependencies"].items()
        if name != "dev"
    }
    assert software._extras_table() == declared


def test_extras_of_an_installed_torchproof(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["click>=8", 'pytest>=7; extra == "hf"', "no-such-package-xyz>=1; extra == 'hf'", "x; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    (extra,) = software.extras()
    assert (extra.name, extra.missing) == ("hf", ("no-such-package-xyz",))
    assert extra.install == "pip install 'torchproof[hf]'"


def test_variables_keep_empty_values_and_drop_others() -> None:
    environ = {"HOME": "/root", "TORCH_LOGS": "", "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": "1"}
    assert software.variables(environ) == {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "", "KMP_BLOCKTIME": "0"}


def test_compiler_is_the_one_that_torch_calls(tmp_path: Path) -> None:
    for name in ("g++", "clang++", "mycxx"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path)
    assert software.cxx_compiler({"PATH": path, "CXX": "mycxx"}) == f"{path}/mycxx"
    assert software.cxx_compiler({"PATH": path, "CXX": "none"}) is None  # torch looks no further
    assert software.cxx_compiler({"PATH": f"{path}/empty"}) is None


def test_environment_is_a_record_that_round_trips() -> None:
    environment = read_environment(usable_cores=1.3)
    assert environment.usable_cores == 1.3
    assert environment.num_cores >= 1
    assert environment.memory_bytes > 1 << 20
    assert decode(encode(environment), Environment, what="environment") == environment


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is one file: what it does at import is the test's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    return tmp_path / "torch.py"


def test_settings_of_a_torch_that_imports(fake_torch: Path) -> None:
    fake_torch.write_text(
        "print('hello from torch')\nget_num_threads = lambda: 3\nget_num_interop_threads = lambda: 2\n"
    )
    settings = torch_settings.torch_settings()
    assert settings is not None
    assert (settings.error, settings.num_threads, settings.num_interop_threads) == ("", 3, 2)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise AttributeError('no get_log_level_pairs\\nmore')", "AttributeError: no get_log_level_pairs"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "import torch was killed by SIGILL"),
        ("raise SystemExit(3)", "import torch ended with exit code 3"),
    ],
)
def test_a_broken_torch_becomes_a_line(fake_torch: Path, source: str, error: str) -> None:
    fake_torch.write_text(source)
    settings = torch_settings.torch_settings()
    assert settings is not None
    assert settings.error == error


def test_a_torch_that_hangs(fake_torch: Path) -> None:
    fake_torch.write_text("import threading; threading.Event().wait()")
    settings = torch_settings.torch_settings(timeout_s=0.3)
    assert settings is not None
    assert settings.error == "import torch did not end within 0.3 s"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert torch_settings.torch_settings() is None


def test_probes_import_nothing_heavy() -> None:
    software.versions()
    assert "openvino" not in sys.modules
    assert "torchao" not in sys.modules
