"""What ``tune`` says of a recipe: the DataLoader's settings, the precision, and the command that trains with them."""

import shlex

from torchproof.render import findings, loading, precision
from torchproof.types.trainplan import TrainPlan

NO_MARGIN = "precision: 32-true; no other was compared, as without --margin METRIC=VALUE nothing can be decided\n"


def text(plan: TrainPlan, path: str, width: int = 80) -> str:
    """The whole report, the findings first.

    Args:
        path: the plan's file.
    """
    found = (*plan.loading.findings, *(plan.precision.findings if plan.precision else ()))
    parts = [findings.text(found, width)] if found else []
    parts.append(loading.text(plan.loading, width))
    parts.append(precision.text(plan.precision, width) if plan.precision else NO_MARGIN)
    parts.append(f"wrote {path}: torchproof train --plan {shlex.quote(path)} -o RUN\n")
    return "\n".join(parts)
