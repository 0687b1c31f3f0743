"""How often ranks tell each other."""

import pytest

from torchproof.train.loop import MAX_STEPS_BETWEEN, TELL_S, steps_between


@pytest.mark.parametrize(
    ("step_s", "before", "save_every_s", "expected"),
    [
        (TELL_S * 3, 1, 300.0, 1),  # slow steps: after each
        (TELL_S / 10, 8, 300.0, 10),
        (TELL_S / 10, 2, 300.0, 4),  # one fast measurement doesn't keep a stop waiting for long
        (TELL_S / 10, 64, 300.0, 10),
        (TELL_S / 1e6, 64, 300.0, MAX_STEPS_BETWEEN),
        (0.0, 64, 300.0, MAX_STEPS_BETWEEN),
        (TELL_S / 10, 8, TELL_S / 100, 1),  # a checkpoint is wanted after each step
    ],
)
def test_steps_between(step_s: float, before: int, save_every_s: float, expected: int) -> None:
    assert steps_between(step_s, before, save_every_s) == expected
