"""``torchproof tune``: measure the candidates, choose, write a proven bundle."""

import shutil
import signal
from pathlib import Path
from types import FrameType

import click

from torchproof.cli.options import BYTE_SIZE, DURATION, TOLERANCE, format_option
from torchproof.render import findings, proof
from torchproof.render.progress import Progress
from torchproof.target.resolve import resolve
from torchproof.types import Limits, Tolerance, encode

MAX_WIDTH = 120

EPILOG = """\b
Examples:
  torchproof tune examples/minilm.py -o minilm.tp
  torchproof tune app.py:Net --traffic requests.jsonl --budget 5m -o net.tp
  torchproof tune model.pt2 --p99 50ms --max-memory 2GiB -o model.tp
  torchproof tune app.py --tolerance 'max_rel<=0.01' -o strict.tp
"""


@click.command("tune", epilog=EPILOG)
@click.argument("target")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle to write: a folder.")
@click.option("--traffic", type=click.Path(path_type=Path), help="Recorded requests, one JSON value to a line.")
@click.option("--budget", type=DURATION, default="2m", show_default=True, help="Time for the search.")
@click.option("--p99", type=DURATION, help="Limit on the 99th percentile of one request's time in the model.")
@click.option("--max-memory", type=BYTE_SIZE, help="Limit on the memory of one serving process.")
@click.option("--max-cold-start", type=DURATION, help="Limit on the time from start to first answer.")
@click.option(
    "--tolerance", type=TOLERANCE, default="cos>=0.999", show_default=True, help="Distance allowed from the golden set."
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
    format_: str,
) -> None:
    """Measure how TARGET runs fastest on this machine within the limits, and write a proven bundle.

    TARGET is path/to/file.py[:Name], package.module:Name, a saved model (.pt2, TorchScript .pt, .onnx) or a Hugging
    Face model folder. Every candidate is measured in a fresh process, in turns with the eager baseline, and held to
    the golden set. Exit code 3: nothing met the limits.
    """
    resolved = resolve(target)
    from torchproof.tune import TuneRequest, tune  # torch is imported here, once the arguments are known to be good

    limits = Limits(p99_s=p99, max_memory_bytes=max_memory, max_cold_start_s=max_cold_start)
    request = TuneRequest(
        target=resolved, output=output, traffic=traffic, budget_s=budget, limits=limits, tolerance=tolerance
    )
    signal.signal(signal.SIGTERM, _stop)
    with Progress() as progress:
        done = tune(request, progress)
    if format_ == "json":
        click.echo(encode(done), nl=False)
        return
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    if done.findings:
        click.echo(findings.text(done.findings, width))
    click.echo(proof.text(done, str(output), width), nl=False)


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends it as Ctrl-C does: its processes and folders are cleaned up on the way out."""
    raise SystemExit(128 + number)
