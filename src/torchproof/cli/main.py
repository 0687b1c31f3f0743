"""The ``torchproof`` command: finds the subcommand, runs it, and turns every way it can end into an exit code.

Subcommands load when they are called, so that ``--help`` and ``--version`` start at once and without torch.

Exit codes: 0 fine, 1 findings, refused or our own bug, 2 wrong use, 3 nothing met the limits, 130 interrupted.
"""

import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from torchproof import __version__
from torchproof.cli import stderr
from torchproof.errors import TorchproofError, UsageError, UserCodeError


class Entry(NamedTuple):
    """Where a subcommand is (``module.command``), and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "check": Entry("torchproof.cli.check", "Audit a model on its own samples."),
    "tune": Entry("torchproof.cli.tune", "Measure the candidates, choose, write a bundle."),
    "train": Entry("torchproof.cli.train", "Train a recipe on one process or many, resumable."),
    "serve": Entry("torchproof.cli.serve", "Run the decision behind HTTP, guarded."),
    "explain": Entry("torchproof.cli.explain", "Say what a finding means and how to fix it."),
    "doctor": Entry("torchproof.cli.doctor", "Show what this machine really offers."),
}

# The packages that the base install leaves to the user, and the extra that brings each.
_EXTRA_OF = {
    "torch": "torch",
    "numpy": "torch",
    "safetensors": "torch",
    "starlette": "serve",
    "uvicorn": "serve",
    "swagger_ui_bundle": "serve",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "transformers": "hf",
}

_OUTPUT_MODULES = ("click.utils", "rich.console", "rich.file_proxy")  # what a subcommand writes its result through
_NO_ARGS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2 on; before, the help is all there is
_SIGPIPE_EXIT = 141  # 128 + SIGPIPE: what a shell shows for any program whose reader went away


class CommandTable(click.Group):
    """A group that knows its subcommands by name and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name].module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean `torchproof {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
            raise UsageError(f"there is no command {name!r}", help=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


EPILOG = """\b
Examples:
  torchproof doctor
  torchproof check app.py:Net
  torchproof tune app.py:Net --traffic requests.jsonl -o net.tp
  torchproof serve net.tp
"""


@click.group(
    "torchproof",
    cls=CommandTable,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="torchproof %(version)s")
def cli() -> None:
    """Measure every production decision about a PyTorch model on that model.

    It is measured in fresh processes, written down with its evidence, and checked again at every start.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default the process's own.

    Returns:
        The exit code; everything that went wrong has been said on stderr.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _invoke(args)
        sys.stdout.flush()
        return code
    except _NO_ARGS as exc:
        click.echo(exc.format_message(), err=True)
        return 2
    except click.UsageError as exc:
        _say_usage(exc, args)
        return exc.exit_code
    except click.ClickException as exc:
        stderr.error(_sentence(exc.format_message()))
        return exc.exit_code
    except UserCodeError as exc:
        stderr.verbatim(exc.trace)
        stderr.error(exc.doing)
        return exc.exit_code
    except TorchproofError as exc:
        stderr.error(str(exc), help=exc.help)
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        stderr.line("interrupted")
        return 130
    except BrokenPipeError as exc:
        return _SIGPIPE_EXIT if _is_output(exc) else _say_bug(exc)
    except OSError as exc:
        return _say_no_output(exc) if _is_output(exc) else _say_bug(exc)
    except Exception as exc:  # noqa: BLE001 - the outermost frame: what arrives here is our bug, and is said to be
        return _say_missing(exc) or _say_torch_broken(exc) or _say_bug(exc)


def _invoke(args: list[str]) -> int:
    try:
        with cli.make_context("torchproof", args) as ctx:
            result = cli.invoke(ctx)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    return result if isinstance(result, int) else 0


def _say_usage(exc: click.UsageError, args: Sequence[str]) -> None:
    """click's own complaint in our form, with the command's usage."""
    if isinstance(exc, click.BadParameter) and not isinstance(exc, click.MissingParameter) and exc.param is not None:
        message = f"{exc.param.get_error_hint(exc.ctx).replace(chr(39), '')}: {exc.message}"  # --budget: …
    else:
        message = exc.format_message()
    if exc.ctx is None:  # click's parser leaves it out for an option without its value
        path = " ".join(["torchproof", *(name for name in args[:1] if name in COMMANDS)])
        stderr.error(_sentence(message), help=f"more with `{path} --help`")
        return
    usage = " ".join(exc.ctx.get_usage().partition(":")[2].split())
    stderr.error(_sentence(message), help=f"usage: {usage}; more with `{exc.ctx.command_path} --help`")


def _sentence(message: str) -> str:
    """click's sentence as we write it: lower case, without the full stop."""
    message = re.sub(r"\.(?= \(?Did you mean)", ";", " ".join(message.split())).replace("; Did", "; did")
    return message[:1].lower() + message[1:].removesuffix(".")


def _say_missing(exc: Exception) -> int:
    """2 when what is missing is a package that the base install leaves out, else 0."""
    package = (exc.name or "").partition(".")[0] if isinstance(exc, ModuleNotFoundError) else ""
    if package not in _EXTRA_OF:
        return 0
    help = f"pip install 'torchproof[{_EXTRA_OF[package]}]'"
    if package == "torch":
        help += ", or the build of torch that fits your machine from https://pytorch.org"
    stderr.error(f"this command needs {package}, which is not installed", help=help)
    return 2


def _say_torch_broken(exc: Exception) -> int:
    """2 when the exception comes from inside ``import torch`` (a broken install, ``TORCH_LOGS`` set empty), else 0."""
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        if frame.f_globals.get("__name__") == "torch" and frame.f_code.co_name == "<module>":
            first_line = str(exc).partition("\n")[0]
            stderr.error(f"`import torch` raises {type(exc).__name__}: {first_line}", help="torchproof doctor says why")
            return 2
    return 0


def _say_no_output(exc: OSError) -> int:
    stderr.error(
        f"stdout can't be written: {(exc.strerror or str(exc)).lower()}",
        help="free some space, or send the output elsewhere",
    )
    return 2


def _say_bug(exc: Exception) -> int:
    stderr.verbatim("".join(traceback.format_exception(exc)))
    stderr.error(
        f"this is a bug in torchproof {__version__}, not in your code ({type(exc).__name__})",
        help="report it with the traceback above and the output of `torchproof doctor`",
    )
    return 1


def _is_output(exc: OSError) -> bool:
    """Whether it was the result that could not be written; if so, nothing writes to stdout again."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(exc.__traceback__)]
    last_is_ours = modules[-1:] == [__name__]  # the flush in main()
    if not last_is_ours and not any(module in _OUTPUT_MODULES for module in modules):
        return False
    stderr.discard_stdout()
    return True
