"""The name that a target has, in the user's module."""

import difflib
import inspect
from types import ModuleType
from typing import Any

from torch import nn

from torchproof.errors import TargetError
from torchproof.target.usercode import user_code
from torchproof.types import Target


def find(module: ModuleType, target: Target, base: type) -> tuple[str, Any]:
    """The name and its value: the one that was named, or the only one of this class.

    Args:
        base: ``Service`` or ``Recipe``.

    Raises:
        TargetError: there is no such name, or none or several of the class.
    """
    public = _public(module, base)
    of_class = [name for name, value in public.items() if is_of_class(value, base)]
    name = target.name
    if name is None:
        if len(of_class) != 1:
            found = f"defines {', '.join(of_class)}" if of_class else f"defines no tp.{base.__name__}"
            names = ", ".join(of_class or [n for n, value in public.items() if callable(value)]) or "none"
            raise TargetError(
                f"{target.reference} {found}", help=f"name one after a colon: {target.reference}:NAME (there: {names})"
            )
        (name,) = of_class
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TargetError(
            f"{target.path or target.module} has no {name!r}", help=f"{hint}names there: {', '.join(public) or 'none'}"
        )
    return name, getattr(module, name)


def defines(module: ModuleType, base: type) -> bool:
    """Whether the module has something of this class under a public name."""
    return any(is_of_class(value, base) for value in _public(module, base).values())


def is_of_class(value: object, base: type) -> bool:
    """Whether it is a subclass of it, or made by one."""
    return isinstance(value, base) or (inspect.isclass(value) and issubclass(value, base))


def _public(module: ModuleType, base: type) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if not n.startswith("_") and _defined_in(v, module, base)}


def call(value: Any, name: str, target: Target) -> Any:
    """What it gives when it is called without arguments.

    Raises:
        TargetError: it needs some.
        UserCodeError: it raised.
    """
    if needed := _arguments(value):
        raise TargetError(
            f"{target.reference} takes arguments: {', '.join(needed)}",
            help="give them defaults, or name a function without arguments that returns it",
        )
    with user_code(f"calling {name}()"):
        return value()


def check_complete(made: Any, name: str, base: type, required: tuple[str, ...], help: str) -> None:
    """Raises TargetError where a required method of the base class is not overridden."""
    missing = [method for method in required if is_missing(made, method, base)]
    if missing:
        raise TargetError(
            f"{name} has no {' and no '.join(f'{method}()' for method in missing)}",
            help=help,
        )


def is_missing(made: Any, method: str, base: type) -> bool:
    """Whether the method is still the base class's own."""
    return getattr(getattr(made, method), "__func__", None) is getattr(base, method)


def _arguments(value: Any) -> list[str]:
    """The arguments that calling it needs; empty where they can't be read."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _defined_in(value: object, module: ModuleType, base: type) -> bool:
    if inspect.ismodule(value):
        return False
    return getattr(value, "__module__", module.__name__) == module.__name__ or isinstance(value, (base, nn.Module))
