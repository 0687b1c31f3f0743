"""Values on the command line: durations, byte sizes, tolerances; and the options that commands share."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click

from torchproof.errors import UsageError
from torchproof.types import Tolerance

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|us|m|s)")

_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)")

_TOLERANCE = re.compile(r"\s*([A-Za-z_]\w*)\s*([<>]=?|==?)\s*(\S+)\s*")
_TOLERANCES = "cos>=0.999, max_abs<=1e-3 or max_rel<=0.01"

F = TypeVar("F", bound=Callable[..., Any])


def parse_duration(text: str) -> float:
    """Seconds of ``50ms``, ``90s``, ``2m`` or ``1m30s``.

    Raises:
        ValueError: not a duration, or not above zero; says what to write.
    """
    text = text.strip()
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            raise ValueError(f"{text!r} has no unit: write {text}s, {text}ms or {text}m")
        raise ValueError(f"{text!r} is not a duration: write 50ms, 90s, 2m, 1m30s or 1h")
    units = [unit for _, unit in parts]
    if units != sorted(set(units), key=list(_SECONDS).index):
        raise ValueError(f"{text!r} is not a duration: each unit once, the largest first, as in 1h5m30s")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all: write a duration above zero")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of ``512MiB``, ``2GiB`` (powers of 1024) or ``1.5GB`` (powers of 1000), rounded to whole bytes.

    Raises:
        ValueError: not a size, or not above zero; says what to write.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 512MiB, 2GiB or 1.5GB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit: write {number}MiB, {number}GiB or {number}B")
    if unit.upper() not in _BYTES:
        letter = unit[0].upper()
        hint = f"{number}{letter}iB or {number}{letter}B" if letter in "KMGT" else "512MiB, 2GiB or 1.5GB"
        raise ValueError(f"{text!r} has an unknown unit {unit!r}: write {hint}")
    size = round(float(number) * _BYTES[unit.upper()])
    if size <= 0:
        raise ValueError(f"{text!r} is no memory at all: write a size above zero")
    return size


def parse_tolerance(text: str) -> Tolerance:
    """``cos>=0.999``, ``max_abs<=1e-3`` or ``max_rel<=0.01``.

    Raises:
        ValueError: not of this form, an unknown metric, the wrong direction or a bound that means nothing.
    """
    match = _TOLERANCE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a tolerance: write {_TOLERANCES}")
    metric, sign, number = match.groups()
    try:
        bound = float(number)
    except ValueError:
        raise ValueError(f"the bound {number!r} in {text!r} is not a number: write {_TOLERANCES}") from None
    if metric == "cos":
        if sign != ">=":
            raise ValueError(f"cos is 1 for equal outputs, so its bound is a lower one: write cos>={number}")
        if not -1 <= bound <= 1:
            raise ValueError(f"a cosine is between -1 and 1, and {number} is not: write cos>=0.999")
        return Tolerance(metric="cos", bound=bound)
    if metric not in ("max_abs", "max_rel"):
        raise ValueError(f"there is no metric {metric!r}: write {_TOLERANCES}")
    name: Literal["max_abs", "max_rel"] = "max_abs" if metric == "max_abs" else "max_rel"
    if sign != "<=":
        raise ValueError(f"{metric} is 0 for equal outputs, so its bound is an upper one: write {metric}<={number}")
    if not 0 <= bound < float("inf"):
        raise ValueError(f"{metric} is a difference, and {number} bounds none: write {metric}<=1e-3")
    return Tolerance(metric=name, bound=bound)


def parse_margin(text: str) -> tuple[str, float]:
    """Metric and margin of ``acc=0.005``.

    Raises:
        ValueError: not of this form, or not above zero.
    """
    name, sign, number = text.strip().rpartition("=")
    if not sign or not name:
        raise ValueError(f"{text!r} is not a margin: write acc=0.005, with a name that metrics() returns")
    try:
        margin = float(number)
    except ValueError:
        raise ValueError(f"the margin {number!r} in {text!r} is not a number: write {name}=0.005") from None
    if not 0 < margin < float("inf"):
        raise ValueError(f"a margin is above 0, and {number} is not: within it, a difference doesn't matter")
    return name.strip(), margin


class _Parsed(click.ParamType):  # type: ignore[type-arg] # subscriptable from click 8.4 on; the floor is 8.1
    """A type given by a parser that raises ValueError. A default that is a value already stays as it is."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


DURATION = _Parsed("duration", parse_duration)  # -> float, seconds
BYTE_SIZE = _Parsed("size", parse_size)  # -> int, bytes
MARGIN = _Parsed("margin", parse_margin)  # -> tuple[str, float]
TOLERANCE = _Parsed("tolerance", parse_tolerance)  # -> Tolerance


def format_option(function: F) -> F:
    """Adds ``--format text|json``, passed as ``format_``."""
    return click.option(
        "--format",
        "format_",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Form of the output.",
    )(function)


def refuse_given(names: Sequence[str], whose: str) -> None:
    """Raises UsageError where one of these options stands on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} is of {whose}", help=f"leave out {parameter.opts[0]}")
