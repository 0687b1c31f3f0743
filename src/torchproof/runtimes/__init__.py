"""What executes a model: a table of names, each imported only when it is used."""

from importlib import import_module
from importlib.util import find_spec

from torchproof.runtimes.base import Runtime, Source
from torchproof.types import Environment, Precision, Target

# "module:Class" by name, in the order in which reports list them.
RUNTIMES: dict[str, str] = {
    "eager": "torchproof.runtimes.eager:Eager",
    "torchscript": "torchproof.runtimes.torchscript:TorchScript",
    "onnxruntime": "torchproof.runtimes.onnxruntime:OnnxRuntime",
    "inductor": "torchproof.runtimes.inductor:Inductor",
    "aotinductor": "torchproof.runtimes.aotinductor:AOTInductor",
}


def open_runtime(path: str) -> Runtime:
    """The runtime of a ``module:Class`` in the table."""
    module, _, name = path.partition(":")
    runtime: Runtime = getattr(import_module(module), name)()
    return runtime


def skip_reason(
    runtime: Runtime, precision: Precision, environment: Environment, target: Target, *, to_build: bool
) -> str:
    """Why a candidate can't be built, or only loaded, here; empty when it can."""
    needed = (*runtime.modules, *(runtime.build_modules if to_build else ()))
    missing = [module for module in needed if find_spec(module) is None]
    if missing:
        return f"needs {', '.join(missing)}: pip install 'torchproof[{runtime.extra}]'"
    return runtime.unsupported(precision, environment, target)


__all__ = ["RUNTIMES", "Runtime", "Source", "open_runtime", "skip_reason"]
