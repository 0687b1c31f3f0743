"""Values in messages carry a unit or are ratios, with the digits that mean something."""

import pytest

from torchproof.rules.wording import count, of_largest, ratio, seconds, some


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.62, "5.6 s"),
        (0.8421, "840 ms"),
        (0.00123, "1.2 ms"),
        (9.96, "10 s"),
        (129.0, "130 s"),
        (0.0, "0 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds_have_two_digits_and_a_readable_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_ratios_have_two_digits() -> None:
    assert [ratio(value) for value in (0.2944, 8.64e-08, 1.0)] == ["0.29", "8.6e-08", "1"]


def test_a_difference_says_what_it_is_relative_to() -> None:
    assert of_largest(0.2944) == "0.29 of the largest output"
    assert of_largest(1.0) == "1.0 of the largest output"
    assert of_largest(float("nan")) == "nan (one of the two is not finite)"


def test_many_names_are_cut_and_counted() -> None:
    assert some(["a"]) == "a"
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_one_thing_is_singular() -> None:
    assert [count(number, "frame") for number in (0, 1, 2)] == ["0 frames", "1 frame", "2 frames"]
