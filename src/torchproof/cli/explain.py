"""``torchproof explain``: what a finding means, how it is detected, how it is fixed."""

import shutil
import sys

import click

from torchproof.cli.options import format_option
from torchproof.render import rule as render
from torchproof.rules import registry

MAX_WIDTH = 100  # longer lines are hard to read

EPILOG = """\b
Examples:
  torchproof explain TP101
  torchproof explain tp701 tp702
  torchproof explain                        the list of all rules
  torchproof explain TP301 --format json
"""


@click.command("explain", epilog=EPILOG)
@click.argument("codes", metavar="[CODE]...", nargs=-1)
@format_option
def command(codes: tuple[str, ...], format_: str) -> None:
    """Say what a finding means, how it is detected and how it is fixed.

    CODE is a rule's code or name, in upper or lower case. Without one, all rules are listed.
    """
    docs = [rule.doc() for rule in dict.fromkeys(map(registry.rule, codes)) or registry.all_rules()]
    columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns
    if format_ == "json":
        click.echo(render.json(docs), nl=False)
    elif codes:
        click.echo("\n\n".join(render.text(doc, min(columns, MAX_WIDTH)) for doc in docs), nl=False)
    else:  # one line to a rule where another program reads it
        click.echo(render.table(docs, columns if sys.stdout.isatty() else None), nl=False)
