"""``torchproof serve``: runs the decision behind HTTP, guarded. Torch stays out of this process as long as it can."""

import contextlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from torchproof.bundle.read import PROOF, Bundle, open_bundle
from torchproof.cli import stderr
from torchproof.cli.options import BYTE_SIZE, DURATION, format_option
from torchproof.errors import RefusedError, TrialError, UsageError
from torchproof.machine.cores import core_ids
from torchproof.render import findings, serving
from torchproof.serve import logs
from torchproof.serve.threads import lone_variables, set_thread_variables, share_cores, thread_variables
from torchproof.target.resolve import resolve
from torchproof.types import Target
from torchproof.types.serving import CapsAsked, Facts, MemorySample, Serving

if TYPE_CHECKING:
    from torchproof.serve.app import Settings
    from torchproof.serve.server import Listening
    from torchproof.serve.wanted import Wanted

# What serving imports, and the extra that brings it.
NEEDED = {
    "starlette": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "swagger_ui_bundle": "serve",
    "torch": "torch",
}

EPILOG = """\b
Examples:
  torchproof serve minilm.tp
  torchproof serve minilm.tp --host 0.0.0.0 --port 80 --api-key-file keys.txt
  torchproof serve minilm.tp --replicas 2 --deadline 2s --max-size length=256
  torchproof serve app.py:Net --threads 2          without a bundle: nothing is measured
  torchproof serve minilm.tp --port 0 --format json
  curl localhost:8000/predict -d '{"text": "hello"}'
  kill -HUP PID                                    proves the bundle as it lies there now, and switches to it
"""


class _MaxSize(click.ParamType):  # type: ignore[type-arg] # subscriptable from click 8.4 on
    name = "dim=size"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """``length=256``."""
        if isinstance(value, tuple):
            return value
        dim, equals, size = value.partition("=")
        if not equals or not dim or not size.isdecimal() or not int(size):
            self.fail(f"{value!r} is not a dim with its largest size: write length=256", param, ctx)
        return dim, int(size)


@click.command("serve", epilog=EPILOG)
@click.argument("reference", metavar="BUNDLE|TARGET")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--replicas",
    "num_replicas",
    type=click.IntRange(min=0),
    help="Processes that run the model; 0 runs it in the server's own. By default as many as the plan's threads leave "
    "room for, or none where a hop to one costs more than the model.",
)
@click.option(
    "--threads",
    "num_threads",
    type=click.IntRange(min=1),
    help="Intra-op threads of each replica of a target without a bundle; by default 1, and more for a request that has "
    "the machine to itself, where they were faster lately.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=DURATION,
    default="10s",
    show_default=True,
    help="For a request's answer; the X-Deadline header (seconds) can shorten it.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests accepted and not yet answered; more are refused with 429.",
)
@click.option("--max-body-bytes", type=BYTE_SIZE, help="Of one body; by default from the samples. Over it: 413.")
@click.option("--max-items", type=click.IntRange(min=1), help="Requests in one list; 64 by default. Over it: 413.")
@click.option(
    "--max-size",
    "max_sizes",
    type=_MaxSize(),
    multiple=True,
    help="Largest size of a variable dim, such as length=256; by default twice the largest sampled, where the model "
    "takes it. Over it: 413.",
)
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default="25s",  # below the 30 s after which Kubernetes sends SIGKILL
    show_default=True,
    help="For requests in flight after SIGTERM.",
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keys, one a line; requests need one, as Authorization: Bearer or X-API-Key.",
)
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="PEM, for HTTPS.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="PEM, its key.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Of the log on stderr; by default text on a terminal, else json.",
)
@format_option
def command(
    reference: str,
    host: str,
    port: int,
    num_replicas: int | None,
    num_threads: int | None,
    deadline_s: float,
    max_queue: int,
    max_body_bytes: int | None,
    max_items: int | None,
    max_sizes: tuple[tuple[str, int], ...],
    grace_s: float,
    api_key_file: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    log_format: Literal["text", "json"] | None,
    format_: str,
) -> None:
    """Run the decision behind HTTP, guarded.

    A bundle's plan is loaded, and the golden set is replayed on this machine before the first request: what differs is
    not served. Answers POST /predict and the Open Inference Protocol below /v2 until SIGINT or SIGTERM; GET /docs says
    how, GET /healthz, /readyz and /metrics how it is. Replicas that end, hang, answer wrongly or grow are replaced.
    """
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"serve needs {module}, which is not installed", help=f"pip install 'torchproof[{extra}]'")
    if bool(ssl_certfile) != bool(ssl_keyfile):
        raise UsageError("--ssl-certfile and --ssl-keyfile need each other", help="name both, or none")
    opened = _open(reference)
    if isinstance(opened, Bundle) and num_threads is not None:
        raise UsageError(
            f"--threads would change what {reference} was measured with",
            help="leave it out, or name the target itself instead of the bundle",
        )
    logs.configure(log_format)
    asked = CapsAsked(max_body_bytes=max_body_bytes, max_items=max_items, max_sizes=dict(max_sizes))
    wanted = _wanted(reference, opened, num_replicas, num_threads, asked, log_format)

    from torchproof.serve.app import Settings
    from torchproof.serve.server import Listening, listen

    settings = Settings(name=wanted.name, deadline_s=deadline_s, key_file=api_key_file)
    listening = Listening(
        socket=listen(host, port), max_queue=max_queue, grace_s=grace_s, certfile=ssl_certfile, keyfile=ssl_keyfile
    )
    _serve(listening, wanted, settings, format_)


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


def _wanted(
    reference: str,
    opened: Bundle | Target,
    num_replicas: int | None,
    num_threads: int | None,
    asked: CapsAsked,
    log_format: Literal["text", "json"] | None,
) -> "Wanted":
    """What is asked for, with the cores given out; sets the thread variables of this process too."""
    from torchproof.serve.wanted import Wanted

    planned = opened.proof.plan.chosen.candidate.num_threads if isinstance(opened, Bundle) else num_threads or 1
    cores = share_cores(core_ids(), planned, num_replicas or None)
    threads = min(planned, len(cores[0])) if planned or not num_replicas else len(cores[0])
    chosen_here = isinstance(opened, Target) and num_threads is None and num_replicas != 0
    lone_cores = tuple(core_ids()) if chosen_here and len(core_ids()) > 1 else ()
    environment = thread_variables(threads) | (lone_variables() if lone_cores else {})
    set_thread_variables(threads)  # the model may come to run in this process
    return Wanted(
        bundle=opened.path if isinstance(opened, Bundle) else None,
        target=None if isinstance(opened, Bundle) else opened,
        num_replicas=num_replicas,
        cores=tuple(cores),
        num_threads=threads,
        name=_name(reference),
        asked=asked,
        lone_cores=lone_cores,
        environment=environment,
        log_format=log_format or ("text" if sys.stderr.isatty() else "json"),
    )


def _name(reference: str) -> str:
    """Of the model in URLs: ``minilm`` of ``bundles/minilm.tp``, ``Net`` of ``app.py:Net``."""
    last = reference.rstrip("/").rpartition("/")[2]
    stem, _, name = last.rpartition(":")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name if stem else Path(last).stem).strip("-.") or "model"


def _serve(listening: "Listening", wanted: "Wanted", settings: "Settings", format_: str) -> None:
    from torchproof.serve.server import serve

    out = sys.stdout

    def on_ready(facts: Facts, num_replicas: int, memory: tuple[MemorySample, ...]) -> None:
        ready = Serving(
            target=facts.target,
            bundle=str(wanted.bundle) if wanted.bundle else None,
            choice=facts.choice,
            golden=facts.golden,
            findings=facts.findings,
            caps=facts.caps,
            max_queue=listening.max_queue,
            deadline_s=settings.deadline_s,
            num_replicas=num_replicas,
            num_threads=facts.choice.candidate.num_threads,
            memory=memory,
            url=listening.url,
        )
        if wanted.target is not None:
            reference = wanted.target.reference
            stderr.line(
                f"nothing was measured: {reference} runs eagerly in float32; `torchproof tune {reference} -o BUNDLE` "
                "measures what is faster and proves it"
            )
        if ready.findings:
            stderr.verbatim(findings.text(ready.findings))
        click.echo(serving.json(ready) if format_ == "json" else serving.text(ready), nl=False, file=out)
        out.flush()

    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints must not mix with the result
            serve(listening, wanted, settings, on_ready)
    except TrialError as exc:
        raise RefusedError(
            f"{wanted.bundle or wanted.name} can't be served: {exc.kind}: {exc}",
            help="run torchproof check on the target; what its process said stands above",
        ) from None
