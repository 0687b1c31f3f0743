"""``torchproof check``: audit a model on its own samples."""

import contextlib
import shutil
import sys
from pathlib import Path

import click

from torchproof.cli.options import format_option
from torchproof.render import check as render
from torchproof.render.progress import Progress
from torchproof.target.resolve import resolve
from torchproof.types import encode

MAX_WIDTH = 100

EPILOG = """\b
Examples:
  torchproof check examples/minilm.py
  torchproof check app.py:Net --traffic requests.jsonl
  torchproof check model.pt2 --format json
"""


@click.command("check", epilog=EPILOG)
@click.argument("target")
@click.option("--traffic", type=click.Path(path_type=Path), help="Recorded requests, one JSON value to a line.")
@format_option
def command(target: str, traffic: Path | None, format_: str) -> int:
    """Run TARGET on its own samples and audit it.

    Is it in eval mode in effect, does it record autograd, does a forward change buffers, is a row's answer independent
    of its batch and of padding, is it finite and repeatable? Exit code 1: there are findings.
    """
    resolved = resolve(target)
    from torchproof.check import audit  # torch is imported here, once the arguments are known to be good

    with Progress() as progress, contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        progress(f"checking {target}", 0.0)
        report = audit(resolved, traffic).report
    if format_ == "json":
        click.echo(encode(report), nl=False)
    else:
        width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
        click.echo(render.text(report, width), nl=False)
    return 1 if any(finding.severity != "info" for finding in report.findings) else 0
