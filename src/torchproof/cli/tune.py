"""``torchproof tune``: measure the candidates, choose, write a proven bundle."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

from torchproof.cli.options import BYTE_SIZE, DURATION, MARGIN, TOLERANCE, format_option, refuse_given
from torchproof.errors import UsageError
from torchproof.render import findings, proof, trainplan
from torchproof.render.progress import Progress
from torchproof.target.resolve import resolve
from torchproof.types import Limits, Proof, Target, Tolerance, decode, encode
from torchproof.types.trainplan import TrainPlan

MAX_WIDTH = 120

EPILOG = """\b
Examples:
  torchproof tune examples/minilm.py -o minilm.tp
  torchproof tune app.py:Net --traffic requests.jsonl --budget 5m -o net.tp
  torchproof tune model.pt2 --p99 50ms --max-memory 2GiB -o model.tp
  torchproof tune app.py --tolerance 'max_rel<=0.01' -o strict.tp
  torchproof tune examples/digits.py -o digits.plan.json                  a recipe: how to load its data
  torchproof tune examples/digits.py --margin acc=0.005 --budget 30m -o digits.plan.json    and its precision
"""

OF_RECIPES = ("margins", "num_steps")
OF_MODELS = ("traffic", "p99", "max_memory", "max_cold_start", "tolerance")


@click.command("tune", epilog=EPILOG)
@click.argument("target")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle to write, a folder; or the plan."
)
@click.option("--traffic", type=click.Path(path_type=Path), help="Recorded requests, one JSON value to a line.")
@click.option("--budget", type=DURATION, default="2m", show_default=True, help="Time for the search.")
@click.option("--p99", type=DURATION, help="Limit on the 99th percentile of one request's time in the model.")
@click.option("--max-memory", type=BYTE_SIZE, help="Limit on the memory of one serving process.")
@click.option("--max-cold-start", type=DURATION, help="Limit on the time from start to first answer.")
@click.option(
    "--tolerance", type=TOLERANCE, default="cos>=0.999", show_default=True, help="Distance allowed from the golden set."
)
@click.option(
    "--margin",
    "margins",
    type=MARGIN,
    multiple=True,
    help="Of a recipe's metric, as in acc=0.005: a difference up to here doesn't matter.",
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    help="Of each training that a recipe's precisions are compared by.",
)
@format_option
def command(
    target: str,
    output: Path,
    traffic: Path | None,
    budget: float,
    p99: float | None,
    max_memory: int | None,
    max_cold_start: float | None,
    tolerance: Tolerance,
    margins: tuple[tuple[str, float], ...],
    num_steps: int | None,
    format_: str,
) -> None:
    """Measure how TARGET runs fastest on this machine within the limits, and write a proven bundle.

    TARGET is path/to/file.py[:Name], package.module:Name, a saved model (.pt2, TorchScript .pt, .onnx) or a Hugging
    Face model folder. Every candidate is measured in a fresh process, in turns with the eager baseline, and held to
    the golden set. Exit code 3: nothing met the limits.

    Of a tp.Recipe it measures how to load its data, and with --margin in which precision it trains as well, and writes
    a plan for train --plan.
    """
    resolved = resolve(target)
    if not _is_plan(output):
        from torchproof.bundle.write import check_destination  # safetensors is imported here

        check_destination(output)
    signal.signal(signal.SIGTERM, _stop)
    from torchproof.target.recipe import is_recipe  # torch is imported here, once the arguments are known to be good

    if is_recipe(resolved):
        refuse_given(OF_MODELS, "a model that is served, and this is a recipe")
        done = _tune_recipe(resolved, output, margins, num_steps, budget)
        _say(done, format_, lambda width: trainplan.text(done, str(output), width))
        return
    refuse_given(OF_RECIPES, "a recipe, and this is a model that is served")
    from torchproof.tune import TuneRequest, tune

    limits = Limits(p99_s=p99, max_memory_bytes=max_memory, max_cold_start_s=max_cold_start)
    request = TuneRequest(
        target=resolved, output=output, traffic=traffic, budget_s=budget, limits=limits, tolerance=tolerance
    )
    with Progress() as progress:
        found = tune(request, progress)
    _say(found, format_, lambda width: _bundle_text(found, str(output), width))


def _is_plan(path: Path) -> bool:
    """Whether an earlier call wrote it for a recipe."""
    try:
        decode(path.read_bytes(), TrainPlan, what=str(path))
    except (OSError, UsageError):
        return False
    return True


def _bundle_text(done: Proof, output: str, width: int) -> str:
    said = proof.text(done, output, width)
    return f"{findings.text(done.findings, width)}\n{said}" if done.findings else said


def _tune_recipe(
    target: Target, output: Path, margins: tuple[tuple[str, float], ...], num_steps: int | None, budget: float
) -> TrainPlan:
    if num_steps is not None and not margins:
        raise UsageError("--steps is of the precisions that --margin compares", help="give --margin METRIC=VALUE too")
    from torchproof.tune.recipe import tune_recipe

    with Progress() as progress:
        return tune_recipe(
            target, output, margins=dict(margins), num_steps=num_steps, budget_s=budget, progress=progress
        )


def _say(done: Proof | TrainPlan, format_: str, text: Callable[[int], str]) -> None:
    if format_ == "json":
        click.echo(encode(done), nl=False)
    else:
        click.echo(text(min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)), nl=False)


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends it as Ctrl-C does: its processes and folders are cleaned up on the way out."""
    raise SystemExit(128 + number)
