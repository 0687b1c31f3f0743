"""``tune`` for a recipe: the precision and the DataLoader's settings, in one plan."""

import time
from collections.abc import Mapping
from pathlib import Path

from torchproof import __version__
from torchproof.errors import RefusedError, UsageError
from torchproof.machine.environment import plan_facts, read_environment
from torchproof.train.files import replace
from torchproof.tune.loading import choose_loading
from torchproof.tune.precision import compare_precisions
from torchproof.tune.request import Progress
from torchproof.types import SCHEMA, Target, encode
from torchproof.types.training import TrainPrecision
from torchproof.types.trainplan import TrainPlan

CANDIDATES: tuple[TrainPrecision, ...] = ("bf16-mixed", "16-mixed")
LOADING_SHARE = 0.25  # of the budget, where precisions are compared too: a training per seed takes longer


def tune_recipe(
    target: Target,
    output: Path,
    *,
    margins: Mapping[str, float],
    num_steps: int | None,
    budget_s: float,
    progress: Progress,
) -> TrainPlan:
    """Measures, chooses, and writes the plan.

    Args:
        output: the plan's file; it is replaced as a whole, at the end.
        margins: by metric: a difference up to here doesn't matter. Without any, the precision stays 32-true.
        num_steps: optimizer steps of each training that precisions are compared by; None: the recipe's own.
        budget_s: wall seconds for all of it.

    Raises:
        UsageError: a margin isn't above 0 or names no metric, or the output is a folder.
        RefusedError: the recipe can't be trained as it is, or the plan not be written.
        TorchproofError, UserCodeError: the recipe is wrong, or its code raised.
    """
    if output.is_dir():
        raise UsageError(f"{output} is a folder, and a plan is a file", help="name a file: -o recipe.plan.json")
    start = time.monotonic()
    precision = None
    share = 1 - LOADING_SHARE if margins else 0.0
    if margins:  # first: a margin of no metric is known at once
        precision = compare_precisions(
            target,
            margins=margins,
            precisions=CANDIDATES,
            num_steps=num_steps,
            budget_s=budget_s * share,
            progress=lambda text, spent: progress(text, spent * share),
        )
    loading = choose_loading(
        target,
        budget_s=max(budget_s * (1 - share), budget_s - (time.monotonic() - start)),
        progress=lambda text, spent: progress(text, share + spent * (1 - share)),
    )
    environment = read_environment()
    plan = TrainPlan(
        schema=SCHEMA,
        torchproof=__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=target,
        environment=environment,
        holds_while=plan_facts(environment),
        loading=loading,
        precision=precision,
        search_s=time.monotonic() - start,
    )
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        replace(output, lambda path: Path(path).write_text(encode(plan), encoding="utf-8"))
    except OSError as exc:
        raise RefusedError(
            f"{output} can't be written: {exc.strerror or exc}", help="name another file with -o"
        ) from None
    return plan
