"""Numbers as people read them: a unit on each, and only the digits that its interval supports."""

import math

_MAX_DIGITS = 4  # more significant digits than this are never stable from one run to the next
_DIGITS = 3  # where no interval says how many there are

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def decimals(value: float, low: float | None = None, high: float | None = None) -> int:
    """Decimal places to print ``value`` with; negative rounds to tens or hundreds.

    With an interval, down to the first digit of its half-width: the digits below it would be other ones in the next
    run. Never more than 4 significant digits; 3 without an interval.
    """
    if not math.isfinite(value):
        return 0
    magnitude = _magnitude(value)
    half_width = (high - low) / 2 if low is not None and high is not None else math.nan
    if not math.isfinite(half_width):
        return _DIGITS - 1 - magnitude
    most = _MAX_DIGITS - 1 - magnitude
    if half_width <= 0:
        return most
    # At least the first digit of the value, however wide the interval.
    return max(-magnitude, min(most, -_magnitude(half_width)))


def number(value: float, places: int) -> str:
    """``value`` rounded to ``places`` decimals, with thousands separators: ``6,380``; negative places round tens."""
    if not math.isfinite(value):
        return str(value)
    return f"{round(value, places) + 0.0:,.{max(0, places)}f}"  # + 0.0: no "-0"


def seconds(value: float, low: float | None = None, high: float | None = None) -> str:
    """``0.0213 ms``, ``14.5 ms``, ``85.0 s``, ``2 min 5 s``; with an interval ``14.5 ms [14.1, 15.0]``."""
    if not math.isfinite(value):
        return f"{value} s"
    interval = low is not None and high is not None
    if abs(value) >= 119.95 and not interval:  # what would read "120.0 s"
        return _minutes(value)
    scale, unit = (1e3, "ms") if abs(value) < 0.9995 else (1.0, "s") if abs(value) < 119.95 else (1 / 60, "min")
    return _scaled(value, low, high, scale, f" {unit}")


def size(value: float, low: float | None = None, high: float | None = None) -> str:
    """Bytes as ``512 B``, ``1.5 KiB``, ``8.0 GiB``, ``512 MiB``; with an interval ``1.50 GiB [1.48, 1.53]``."""
    if not math.isfinite(value):
        return f"{value} B"
    scaled, power = abs(value), 0
    while scaled >= 1023.5 and power < len(_BYTE_UNITS) - 1:
        scaled, power = scaled / 1024, power + 1
    unit = f" {_BYTE_UNITS[power]}"
    if low is not None and high is not None:
        return _scaled(value, low, high, 1 / 1024**power, unit)
    places = 0 if power == 0 or scaled >= 99.95 else 1
    return number(value / 1024**power, places) + unit


def ratio(value: float, low: float | None = None, high: float | None = None) -> str:
    """``1.20x``; with an interval ``1.20x [1.14, 1.28]``."""
    return _scaled(value, low, high, 1.0, "x")


def rate(value: float, low: float | None = None, high: float | None = None) -> str:
    """Requests per second: ``68.7 req/s``; with an interval ``68.7 req/s [67.9, 69.3]``."""
    return _scaled(value, low, high, 1.0, " req/s")


def _scaled(value: float, low: float | None, high: float | None, scale: float, unit: str) -> str:
    value *= scale
    if low is None or high is None:
        return number(value, decimals(value)) + unit
    low, high = low * scale, high * scale
    places = decimals(value, low, high)
    return f"{number(value, places)}{unit} [{number(low, places)}, {number(high, places)}]"


def _minutes(value: float) -> str:
    total = round(abs(value))
    sign = "-" if value < 0 else ""
    if total < 2 * 3600:
        return f"{sign}{total // 60} min {total % 60} s"
    minutes = round(abs(value) / 60)
    return f"{sign}{minutes // 60:,} h {minutes % 60} min"


def _magnitude(value: float) -> int:
    """Power of ten of the first digit after rounding: 9.996 to three digits is 10.0."""
    if value == 0 or not math.isfinite(value):
        return 0
    return int(f"{abs(value):.2e}".partition("e")[2])
