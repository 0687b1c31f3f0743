"""``torchproof serve``: runs the decision behind HTTP, guarded. Torch is imported only after its threads are set."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchproof.bundle.read import PROOF, Bundle, open_bundle
from torchproof.cli import stderr
from torchproof.cli.options import format_option
from torchproof.errors import UsageError
from torchproof.render import findings, serving
from torchproof.serve.threads import set_thread_variables
from torchproof.target.resolve import resolve
from torchproof.types import Target
from torchproof.types.serving import Serving

if TYPE_CHECKING:
    from torchproof.serve.answer import Answerer

# What serving imports, and the extra that brings it.
NEEDED = {"starlette": "serve", "uvicorn": "serve", "swagger_ui_bundle": "serve", "torch": "torch"}

EPILOG = """\b
Examples:
  torchproof serve minilm.tp
  torchproof serve minilm.tp --host 0.0.0.0 --port 80
  torchproof serve app.py:Net --threads 2          without a bundle: nothing is measured
  torchproof serve minilm.tp --port 0 --format json
  curl localhost:8000/predict -d '{"text": "hello"}'
"""


@click.command("serve", epilog=EPILOG)
@click.argument("reference", metavar="BUNDLE|TARGET")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--threads",
    "num_threads",
    type=click.IntRange(min=1),
    help="Intra-op threads of a target without a bundle; by default torch's own.",
)
@format_option
def command(reference: str, host: str, port: int, num_threads: int | None, format_: str) -> None:
    """Run the decision behind HTTP, guarded.

    A bundle's plan is loaded, and the golden set is replayed on this machine before the first request: what differs is
    not served. Answers POST /predict, GET /healthz, GET /readyz and GET /docs until SIGINT or SIGTERM.
    """
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"serve needs {module}, which is not installed", help=f"pip install 'torchproof[{extra}]'")
    opened = _open(reference)
    if isinstance(opened, Bundle):
        if num_threads is not None:
            raise UsageError(
                f"--threads would change what {reference} was measured with",
                help="leave it out, or name the target itself instead of the bundle",
            )
        set_thread_variables(opened.proof.plan.chosen.candidate.num_threads)
    else:
        set_thread_variables(num_threads or 0)
        stderr.line(
            f"nothing was measured: {reference} runs eagerly in float32; `torchproof tune {reference} -o BUNDLE` "
            "measures what is faster and proves it"
        )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _serve(opened, host, port, _opener(opened, num_threads or 0), format_)


def _open(reference: str) -> Bundle | Target:
    path = Path(reference).expanduser()
    if path.is_dir() and ((path / PROOF).exists() or not (path / "config.json").exists()):
        return open_bundle(path)
    if not path.exists() and ":" not in reference:
        raise UsageError(
            f"{reference}: no such file or folder",
            help="name the folder that torchproof tune -o wrote, or a target such as app.py:Net",
        )
    return resolve(reference)


def _opener(opened: Bundle | Target, num_threads: int) -> "Callable[[], Answerer]":
    """Opens the model when it is called, on the model's thread: that imports torch."""

    def open_model() -> "Answerer":
        from torchproof.serve.answer import Answerer
        from torchproof.serve.load import open_bundle_model, open_target_model

        if isinstance(opened, Bundle):
            return Answerer(open_bundle_model(opened))
        return Answerer(open_target_model(opened, num_threads))

    return open_model


def _serve(opened: Bundle | Target, host: str, port: int, open_model: "Callable[[], Answerer]", format_: str) -> None:
    from torchproof.serve.server import listen, serve, url_of

    listener = listen(host, port)

    def on_ready(answerer: "Answerer") -> None:
        loaded = answerer.loaded
        ready = Serving(
            target=loaded.target,
            bundle=str(opened.path) if isinstance(opened, Bundle) else None,
            choice=loaded.choice,
            golden=loaded.golden,
            findings=loaded.findings,
            url=url_of(listener),
        )
        if ready.findings:
            stderr.verbatim(findings.text(ready.findings))
        click.echo(serving.json(ready) if format_ == "json" else serving.text(ready), nl=False)
        sys.stdout.flush()

    if not serve(listener, open_model, on_ready):
        # The model's thread hangs in a load or a forward, which nothing can interrupt. Nothing is left to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
