"""What a command says beside its result: errors with their cure, in one form, on stderr."""

import os
import shutil
import sys
import textwrap

import click

_MAX_WIDTH = 100  # longer lines are hard to read
_FALLBACK_WIDTH = 80  # where stderr is no terminal


def error(message: str, help: str = "") -> None:
    """``error: …`` and, below it, ``  help: …``; wrapped at words, so that a path stays in one piece."""
    line("error: " + message, indent=7)
    if help:
        line("  help: " + help, indent=8)


def line(text: str, indent: int = 0) -> None:
    """One message; lines that go on start ``indent`` columns to the right. Its own line breaks are kept."""
    width = max(40, min(shutil.get_terminal_size((_FALLBACK_WIDTH, 24)).columns, _MAX_WIDTH))
    wrapped: list[str] = []
    for part in text.splitlines() or [""]:
        first = " " * indent if wrapped else ""
        wrapped += textwrap.wrap(
            part,
            width,
            initial_indent=first,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        ) or [""]
    out = "\n".join(wrapped)
    label, colon, rest = out.partition(":")
    if _coloured() and label in ("error", "  help"):
        out = click.style(label + colon, bold=True, fg="red" if label == "error" else None) + rest
    _write(out + "\n")


def verbatim(text: str) -> None:
    """A traceback or other text of many lines, unchanged."""
    _write(text.rstrip("\n") + "\n")


def discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail a second time."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's buffer has none
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _coloured() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write(text: str) -> None:
    try:
        click.echo(text, err=True, nl=False)
    except OSError:  # stderr is closed or full: nobody can be told, and the exit code still says it
        return
