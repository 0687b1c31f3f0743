"""Runs the user's code so that its errors look like the user's own."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType

import torchproof
from torchproof.errors import TargetError, TorchproofError, UserCodeError

OWN_FOLDER = str(Path(torchproof.__file__).parent)


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turns whatever the user's code raises into a ``UserCodeError`` that carries the user's part of the traceback.

    Args:
        doing: what torchproof was about, for the last line: ``"importing app.py"``.
    """
    try:
        yield
    except (TorchproofError, UserCodeError):
        raise
    except SystemExit as exc:
        raise UserCodeError(f"{doing}: the code called sys.exit({exc.code!r})", user_trace(exc)) from None
    except Exception as exc:  # noqa: BLE001  the user's code may raise anything
        raise UserCodeError(f"{doing} raised {type(exc).__name__}", user_trace(exc)) from None


def user_trace(exc: BaseException) -> str:
    """The traceback without the frames of torchproof and of the import system that lead to the user's code."""
    trace = exc.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(exc), exc, trace))


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith((OWN_FOLDER, "<frozen importlib")) or "/importlib/__init__.py" in file


def first_line(exc: BaseException) -> str:
    """``ValueError: what it said``, one line: how an error reads in a table."""
    text = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def import_file(path: Path) -> ModuleType:
    """Imports a file as ``python file.py`` would: its folder comes first on ``sys.path``."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"torchproof_target_{name}"  # app.py must not replace an installed package of that name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file", help="name a .py file, or a saved model")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(f"importing {path.name}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def import_module(name: str) -> ModuleType:
    """Imports ``package.module``; tells a module that isn't there from an error inside it."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise TargetError(f"there is no module {name!r}", help="check the name, or name the file: path/to/app.py:Name")
    with user_code(f"importing {name}"):
        return importlib.import_module(name)
