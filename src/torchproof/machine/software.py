"""Installed software that changes a timing or an answer: versions, extras, variables, compilers. Imports none of it."""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from torchproof.types.doctor import Extra

_PACKAGES = (
    "torch",
    "numpy",
    "onnx",
    "onnxruntime",
    "openvino",
    "torchao",
    "transformers",
    "safetensors",
    "starlette",
    "uvicorn",
)

# The extras of pyproject.toml, for a source tree that is run without being installed; a test keeps the two equal.
_EXTRAS = {
    "torch": ("torch", "numpy", "safetensors"),
    "serve": ("starlette", "uvicorn", "swagger-ui-bundle", "httptools", "uvloop", "prometheus-client"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "hf": ("transformers",),
    "tensorboard": ("tensorboard",),
    "ray": ("ray",),
}

# Each of these changes the threads, the allocator, the logging or the compile cache of torch or its libraries.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "TORCH_LOGS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "TORCHINDUCTOR_CACHE_DIR",
)
_VARIABLE_PREFIXES = ("KMP_",)  # Intel's OpenMP: KMP_BLOCKTIME, KMP_AFFINITY and a hundred more


def versions() -> dict[str, str]:
    """Version of each installed package that matters to a measurement, in a fixed order."""
    return {name: version for name in _PACKAGES if (version := _version(name)) is not None}


def extras() -> tuple[Extra, ...]:
    """The extras that users install, what each still lacks, and the command that installs it."""
    return tuple(
        Extra(
            name=name,
            missing=tuple(package for package in packages if _version(package) is None),
            install=f"pip install 'torchproof[{name}]'",
        )
        for name, packages in _extras_table().items()
        if name != "dev"
    )


def variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that steer threads and allocators, where set, an empty value included."""
    environ = os.environ if environ is None else environ
    named = {name: environ[name] for name in _VARIABLES if name in environ}
    return named | {name: environ[name] for name in sorted(environ) if name.startswith(_VARIABLE_PREFIXES)}


def cxx_compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """Path of the C++ compiler that torch.compile and AOTInductor would call; None when there is none.

    torch looks for ``$CXX``, else for ``g++`` (``clang++`` on macOS) and for nothing else (torch 2.13,
    ``torch/_inductor/config.py``).
    """
    environ = os.environ if environ is None else environ
    return shutil.which(
        environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"), path=environ.get("PATH")
    )


def python_header() -> str | None:
    """Path of ``Python.h``, which torch.compile and AOTInductor compile against; None when it is not installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return str(header) if header.is_file() else None


def _extras_table() -> dict[str, tuple[str, ...]]:
    try:
        requires = metadata.requires("torchproof") or []
    except metadata.PackageNotFoundError:
        return _EXTRAS
    table: dict[str, tuple[str, ...]] = {}
    for requirement in requires:
        # 'onnx>=1.18; extra == "onnx"'
        package = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", requirement)
        if package and extra:
            table[extra[1]] = (*table.get(extra[1], ()), package[0])
    return table or _EXTRAS


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
