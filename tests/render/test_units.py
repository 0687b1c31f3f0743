"""Every number has a unit and only the digits that its interval supports."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.render import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 ms"),
        (0.0000213, "0.0213 ms"),
        (0.0145, "14.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (85.04, "85.0 s"),
        (119.94, "120 s"),
        (125.2, "2 min 5 s"),
        (7199.7, "2 h 0 min"),
        (3 * 3600 + 61, "3 h 1 min"),
        (math.inf, "inf s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (512 << 20, "512 MiB"),
        (1 << 30, "1.0 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),  # rounding crosses the unit
        (5 << 50, "5,120 TiB"),
    ],
)
def test_size(value: int, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("triple", "text"),
    [
        ((1.2, 1.14, 1.28), "1.20x [1.14, 1.28]"),
        ((1.5, 0.9, 2.2), "1.5x [0.9, 2.2]"),
        ((1.20412, 1.20399, 1.20421), "1.204x [1.204, 1.204]"),  # four digits at most
        ((12.0, 7.0, 30.0), "10x [10, 30]"),
        ((3.0, 1.0, 60.0), "3x [1, 60]"),  # a wide interval leaves the first digit
        ((1.0, 1.0, 1.0), "1.000x [1.000, 1.000]"),
    ],
)
def test_ratio_with_interval(triple: tuple[float, float, float], text: str) -> None:
    assert units.ratio(*triple) == text


def test_ratio_alone() -> None:
    assert units.ratio(1.2) == "1.20x"


@pytest.mark.parametrize(
    ("render", "triple", "text"),
    [
        (units.seconds, (0.0145, 0.0141, 0.0150), "14.5 ms [14.1, 15.0]"),
        (units.seconds, (150.0, 141.0, 160.0), "2.5 min [2.4, 2.7]"),
        (units.size, (1.5 * 2**30, 1.48 * 2**30, 1.53 * 2**30), "1.50 GiB [1.48, 1.53]"),
        (units.rate, (68.74, 67.9, 69.3), "68.7 req/s [67.9, 69.3]"),
        (units.rate, (6380.0, 6210.0, 6522.0), "6,400 req/s [6,200, 6,500]"),
    ],
)
def test_an_interval_has_the_unit_of_its_value(
    render: Callable[[float, float, float], str], triple: tuple[float, float, float], text: str
) -> None:
    assert render(*triple) == text


@given(value=st.floats(1e-6, 1e6), below=st.floats(0, 1), above=st.floats(0, 1))
def test_never_more_digits_than_four(value: float, below: float, above: float) -> None:
    text = units.ratio(value, value * (1 - below), value * (1 + above)).partition("x")[0]
    digits = text.replace(",", "").replace(".", "").lstrip("0")
    significant = digits.rstrip("0") if "." not in text else digits
    assert len(significant) <= 4


@given(st.floats(1e-7, 1e6))
def test_seconds_round_to_what_they_were(value: float) -> None:
    """Three digits are kept: what is read is within half a percent, or half a second, or half a minute."""
    scale = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    words = units.seconds(value).replace(",", "").split()
    read = sum(float(number) * scale[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    slack = 0.501 if 119 < value < 7200 else 30.01 if value >= 7199 else 0.0
    assert read == pytest.approx(value, rel=0.0051, abs=slack)
