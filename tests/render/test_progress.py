"""A bar in a terminal; plain lines elsewhere, each thing once."""

import contextlib
import io
import re

import pytest

from torchproof.render.progress import CLEAR, Progress


class Stream(io.StringIO):
    """A stream that is, or isn't, a terminal, and counts what is flushed."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.flushed = ""

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_elsewhere_than_in_a_terminal_a_line_when_the_text_changes() -> None:
    stream = Stream(terminal=False)
    with Progress(stream) as progress:
        for text, share in (("checking", 0.0), ("measuring eager", 0.1), ("measuring eager", 0.2), ("checking", 0.3)):
            progress(text, share)
            assert stream.flushed == stream.getvalue(), "a line is seen at once"
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"^ *\d+ s  ", "", line) for line in lines] == ["checking", "measuring eager", "checking"]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize(("share", "bar"), [(0.0, "." * 20), (0.5, "#" * 10 + "." * 10), (1.0, "#" * 20)])
def test_in_a_terminal_a_bar_that_is_drawn_over_itself(share: float, bar: str) -> None:
    stream = Stream(terminal=True)
    Progress(stream)("measuring eager", share)
    assert stream.getvalue().startswith(f"{CLEAR}[{bar}]")
    assert stream.getvalue().endswith("  measuring eager")
    assert "\n" not in stream.getvalue()
    assert stream.flushed == stream.getvalue()


def test_in_a_terminal_it_moves_although_the_text_stays() -> None:
    stream = Stream(terminal=True)
    with Progress(stream) as progress:
        progress("building", 0.25)
        progress("building", 0.75)
    assert stream.getvalue().count("building") == 2
    assert stream.getvalue().endswith(CLEAR), "the bar is gone when the result is printed"


def test_the_bar_fits_80_columns() -> None:
    """One that wraps could not be drawn over."""
    stream = Stream(terminal=True)
    Progress(stream)("building " + ", ".join(["torchscript", "onnxruntime", "inductor", "aotinductor"] * 3), 0.5)
    assert len(stream.getvalue().removeprefix(CLEAR)) <= 80


@pytest.mark.parametrize("terminal", [True, False])
def test_where_nothing_was_done_nothing_is_written(terminal: bool) -> None:
    stream = Stream(terminal=terminal)
    with Progress(stream):
        pass
    assert stream.getvalue() == ""


def test_an_error_clears_the_bar_too() -> None:
    stream = Stream(terminal=True)
    progress = Progress(stream)
    progress("building", 0.5)
    with contextlib.suppress(RuntimeError), progress:
        raise RuntimeError
    assert stream.getvalue().endswith(CLEAR)
