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
from torchproof.types import Target

OWN_FOLDER = str(Path(torchproof.__file__).parent)
TORCH_CALL = "/torch/nn/modules/module.py"  # from a module's call to its forward


@contextmanager
def user_code(doing: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns whatever the user's code raises into a ``UserCodeError`` that carries the user's part of the traceback.

    Args:
        doing: what torchproof was about, for the last line: ``"importing app.py"``.
        but: what is raised as it is.
    """
    try:
        yield
    except (TorchproofError, UserCodeError):
        raise
    except but:
        raise
    except SystemExit as exc:
        raise UserCodeError(f"{doing}: the code called sys.exit({exc.code!r})", user_trace(exc)) from None
    except Exception as exc:  # noqa: BLE001  the user's code may raise anything
        raise UserCodeError(f"{doing} raised {type(exc).__name__}", user_trace(exc)) from None


def user_trace(exc: BaseException) -> str:
    """The traceback without the frames that lead to the user's code: ours, the import system's, a module's call."""
    trace = exc.__traceback__
    while trace is not None and _leads_to_users(trace):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(exc), exc, trace))


def _leads_to_users(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith((OWN_FOLDER, "<frozen importlib")) or file.endswith(("/importlib/__init__.py", TORCH_CALL))


def first_line(exc: BaseException) -> str:
    """``ValueError: what it said``, one line: how an error reads in a table."""
    text = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def import_target(target: Target) -> ModuleType:
    """The user's module.

    Raises:
        TargetError: it isn't there.
        UserCodeError: it raised.
    """
    return import_file(Path(target.path)) if target.path else import_module(target.module or "")


def import_file(path: Path) -> ModuleType:
    """Imports a file as ``python file.py`` would: its folder comes first on ``sys.path``."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem
    alias = f"torchproof_target_{name}"  # app.py must not replace another module of that name
    for known in (sys.modules.get(name), sys.modules.get(alias)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    if name in sys.modules:
        name = alias
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file", help="name a .py file, or a saved model")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(f"importing {path.name}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    return module


def import_module(name: str) -> ModuleType:
    """Imports ``package.module``; tells a module that isn't there from an error inside it."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    with user_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if not f"{name}.".startswith(f"{exc.name}."):
                raise  # one that the user's code imports
            raise TargetError(
                f"there is no module {name!r}", help="check the name, or name the file: path/to/app.py:Name"
            ) from None
