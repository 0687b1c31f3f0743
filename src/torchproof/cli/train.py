"""``torchproof train``: a recipe on one process or many, resumable at every step."""

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from torchproof.cli import stderr
from torchproof.cli.options import DURATION, format_option, refuse_given
from torchproof.errors import RefusedError, TrialError, UsageError
from torchproof.machine.cores import num_cores
from torchproof.machine.environment import plan_facts, read_environment
from torchproof.render import findings, rehearsal, training
from torchproof.render.progress import Progress
from torchproof.rules.registry import judge
from torchproof.target.resolve import resolve
from torchproof.train.fitting import choose_strategy
from torchproof.types import PlanSeen, Target, decode, encode
from torchproof.types.rehearsal import RehearsalReport
from torchproof.types.training import Loading, Strategy, TrainPrecision, TrainReport, TrainRequest
from torchproof.types.trainplan import TrainPlan

MAX_WIDTH = 120

EPILOG = """\b
Examples:
  torchproof train examples/digits.py --rehearse                             minutes before a GPU is rented
  torchproof train examples/digits.py -o runs/digits
  torchproof train examples/digits.py --nproc 2 --strategy ddp -o runs/digits
  torchproof train recipe.py --precision bf16-mixed --epochs 3 -o runs/bf16
  torchproof train recipe.py --nodes 2 --rdzv host:29400 -o /shared/run      on each node
  torchproof train recipe.py --launcher ray --nproc 8 -o /shared/run         as a Ray Train job
  torchproof train --plan digits.plan.json -o runs/digits                    as tune found it best
  torchproof train examples/digits.py -o runs/digits                         again: goes on where it ended
"""

OF_RUNS = (
    *("output", "precision", "fp32_modules", "num_processes", "num_nodes", "rendezvous", "launcher"),
    *("num_epochs", "num_steps"),
    *("micro_batch_size", "activation_checkpointing", "num_workers", "save_every_s", "tensorboard"),
)


@click.command("train", epilog=EPILOG)
@click.argument("recipe", required=False)
@click.option(
    "--plan", "plan_path", type=click.Path(dir_okay=False, path_type=Path), help="What tune wrote for the recipe."
)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="The run's folder.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "single", "ddp", "fsdp"]),
    default="auto",
    show_default=True,
    help="auto: single with one process; ddp with more where a step fits on each device, else fsdp.",
)
@click.option(
    "--precision",
    type=click.Choice(["32-true", "bf16-mixed", "16-mixed"]),
    help="Of forward; the weights stay float32. By default 32-true, or the plan's.",
)
@click.option("--fp32-module", "fp32_modules", multiple=True, help="A module that autocast leaves alone, by its name.")
@click.option(
    "--nproc",
    "num_processes",
    type=click.IntRange(min=1),
    help="Processes on this node; by default one for each GPU, or one.",
)
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines.")
@click.option("--rdzv", "rendezvous", default="", help="host:port where the nodes meet.")
@click.option(
    "--launcher",
    type=click.Choice(["torchrun", "ray"]),
    default="torchrun",
    show_default=True,
    help="ray: --nproc processes as a Ray Train job, on the cluster of RAY_ADDRESS or on this machine.",
)
@click.option("--epochs", "num_epochs", type=click.IntRange(min=1), help="By default the recipe's.")
@click.option("--steps", "num_steps", type=click.IntRange(min=1), help="Optimizer steps, instead of epochs.")
@click.option("--micro-batch-size", type=click.IntRange(min=1), help="Samples that a process forwards at once.")
@click.option(
    "--activation-checkpointing", is_flag=True, help="Compute activations again in backward, which needs less memory."
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=0),
    help="Of the DataLoader. By default 0, or all that the plan has for it.",
)
@click.option(
    "--save-every", "save_every_s", type=DURATION, default="5m", show_default=True, help="Between checkpoints."
)
@click.option("--tensorboard", is_flag=True, help="Write the curves for TensorBoard, too.")
@click.option("--rehearse", is_flag=True, help="Don't train: find what would go wrong on many ranks, with two here.")
@format_option
def command(
    recipe: str | None,
    plan_path: Path | None,
    output: Path | None,
    strategy: str,
    precision: TrainPrecision | None,
    fp32_modules: tuple[str, ...],
    num_processes: int | None,
    num_nodes: int,
    rendezvous: str,
    launcher: str,
    num_epochs: int | None,
    num_steps: int | None,
    micro_batch_size: int | None,
    activation_checkpointing: bool,
    num_workers: int | None,
    save_every_s: float,
    tensorboard: bool,
    rehearse: bool,
    format_: str,
) -> int:
    """Train RECIPE, from the run's last checkpoint where there is one.

    RECIPE is path/to/file.py[:Name] or package.module:Name, a tp.Recipe. Processes that end are started again from the
    last checkpoint. The folder gets metrics.jsonl, checkpoints, model.safetensors and proof.json.
    """
    plan = _read_plan(plan_path) if plan_path else None
    if recipe is None and plan is None:
        raise UsageError("the recipe is missing", help="name one, or a plan of one with --plan")
    target = resolve(recipe) if recipe else plan.target  # type: ignore[union-attr] # one of them is there
    if plan:
        _check_plan(plan, target)
    precision, fp32_modules, loading = _settings(plan, precision, fp32_modules, num_workers)
    if rehearse:
        refuse_given(OF_RUNS, "a run, and --rehearse trains nothing")
        if strategy not in ("auto", "ddp"):
            raise UsageError(f"--rehearse is of ddp, not of {strategy}", help="leave out --strategy")
        return _rehearse(target, format_)
    if output is None:
        raise UsageError("the run's folder is missing", help="name one with -o, or rehearse with --rehearse")
    if num_steps is not None and num_epochs is not None:
        raise UsageError("--steps and --epochs exclude each other", help="name one of them")
    if (num_nodes > 1) != bool(rendezvous):
        raise UsageError("--nodes and --rdzv need each other", help="as in --nodes 2 --rdzv host:29400")
    if launcher == "ray":
        if num_nodes > 1:
            raise UsageError("--nodes is of torchrun; Ray places the processes", help="leave out --nodes and --rdzv")
        if find_spec("ray") is None:
            raise UsageError("--launcher ray needs the package ray", help="pip install 'torchproof[ray]'")
    if tensorboard and find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the package tensorboard", help="pip install 'torchproof[tensorboard]'")

    from torchproof.target.recipe import open_recipe  # torch is imported here
    from torchproof.train.launch import InterruptedRunError, Nodes, default_processes, device_bytes, launch

    opened = open_recipe(target)
    per_node = num_processes or default_processes()
    world_size = per_node * num_nodes
    if strategy == "single" and world_size > 1:
        raise UsageError(f"--strategy single is one process, not {world_size}", help="leave out --nproc, or name ddp")
    if opened.batch_size < world_size:
        raise UsageError(
            f"batch_size is {opened.batch_size} for {world_size} processes, so that some have no sample",
            help="raise batch_size in the recipe, or lower --nproc",
        )
    if launcher == "ray" and "RAY_ADDRESS" not in os.environ and per_node > num_cores():
        raise UsageError(
            f"Ray gives each process a core, and {per_node} processes would wait for ever for {num_cores()} cores",
            help="lower --nproc, or name a larger cluster with RAY_ADDRESS",
        )
    micro_batch_size = micro_batch_size or -(-opened.batch_size // world_size)
    chosen: Strategy = "single" if strategy == "auto" else strategy  # type: ignore[assignment] # checked by click
    if strategy == "auto" and world_size > 1:
        from torchproof.train.memory import measured_steps

        choice = choose_strategy(
            measured_steps(opened, micro_batch_size, precision),
            device_bytes=device_bytes(per_node),
            world_size=world_size,
        )
        chosen = choice.strategy
        activation_checkpointing |= choice.activation_checkpointing
        stderr.line(training.arithmetic(choice))
    request = TrainRequest(
        target=target,
        strategy=chosen,
        precision=precision,
        fp32_modules=fp32_modules,
        batch_size=opened.batch_size,
        seed=opened.seed,
        num_epochs=num_epochs or opened.num_epochs,
        num_steps=num_steps,
        micro_batch_asked=micro_batch_size,
        micro_batch_size=micro_batch_size,
        max_grad_norm=opened.max_grad_norm,
        activation_checkpointing=activation_checkpointing,
        loading=loading,
        save_every_s=save_every_s,
        tensorboard=tensorboard,
    )
    try:
        if launcher == "ray":
            from torchproof.train.ray_job import launch_on_ray  # only where it is installed

            report = launch_on_ray(output, request, per_node)
        else:
            report = launch(output, request, Nodes(num_nodes, per_node, rendezvous))
    except InterruptedRunError:
        stderr.line(f"interrupted; the same command goes on from the last checkpoint in {output}")
        raise SystemExit(130) from None
    except TrialError as exc:
        raise RefusedError(
            f"{target.reference} can't be trained: {exc}", help="what its processes said stands above"
        ) from None
    return _say(report, format_, functools.partial(training.text, report, str(output)))


def _read_plan(path: Path) -> TrainPlan:
    """Raises UsageError where it is none."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise UsageError(
            f"{path} can't be read: {(exc.strerror or str(exc)).lower()}",
            help="name what `torchproof tune RECIPE -o PLAN` wrote",
        ) from None
    return decode(data, TrainPlan, what=str(path))


def _check_plan(plan: TrainPlan, target: Target) -> None:
    """Another recipe's is refused; another machine's is said to be so."""
    of_plan, wanted = ((t.path or t.module, t.name) for t in (plan.target, target))
    if of_plan != wanted:
        raise UsageError(
            f"the plan is of {plan.target.reference}, not of {target.reference}", help="leave out one of them"
        )
    facts = plan_facts(read_environment())
    if elsewhere := judge(PlanSeen(target=target.reference, expected=plan.holds_while, found=facts)):
        stderr.line(findings.text(elsewhere).rstrip("\n"))


def _settings(
    plan: TrainPlan | None, precision: TrainPrecision | None, fp32_modules: tuple[str, ...], num_workers: int | None
) -> tuple[TrainPrecision, tuple[str, ...], Loading]:
    """The plan's, but for what stands on the command line."""
    proven = plan.precision if plan else None
    if precision is None and proven is not None:
        precision, fp32_modules = proven.precision, fp32_modules or proven.fp32_modules
    loading = plan.loading.chosen if plan and num_workers is None else Loading(num_workers=num_workers or 0)
    return precision or "32-true", fp32_modules, loading


def _rehearse(target: Target, format_: str) -> int:
    """Looks, and trains nothing."""
    from torchproof.train.rehearsal import rehearse  # torch is imported in its ranks only

    with Progress() as progress:
        report = rehearse(target, say=progress)
    return _say(report, format_, functools.partial(rehearsal.text, report))


def _say(report: TrainReport | RehearsalReport, format_: str, text: Callable[[int], str]) -> int:
    """Exit code 1 where something is an error."""
    if format_ == "json":
        click.echo(encode(report), nl=False)
    else:
        click.echo(text(min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)), nl=False)
    return 1 if any(finding.severity == "error" for finding in report.findings) else 0
