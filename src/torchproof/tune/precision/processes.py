"""Starts the fresh processes of the comparison, with the same threads, until the budget is spent."""

import os
import time
from typing import Any

import msgspec

from torchproof.errors import RefusedError, TrialError
from torchproof.machine.cores import num_cores
from torchproof.machine.threads import thread_environment
from torchproof.measure.process import CALL_ERRORS, FreshProcess, as_trial_error
from torchproof.tune.precision.seeds import Arm
from torchproof.types import Target
from torchproof.types.precision import DryRun, SeedRun
from torchproof.types.training import TrainRequest

JOBS = "torchproof.tune.precision.jobs"
REHEARSAL = "torchproof.tune.precision.dryrun:Rehearsal"
LOSS_TOLERANCE = 0.01  # of 16-mixed against 32-true with the same weights: ten times float16's rounding


class Processes:
    """Fresh processes, all with the same threads, and all ended with the budget."""

    def __init__(self, end: float) -> None:
        self._end = end
        # As `train` has it: all cores where the user has set nothing else, and idle threads sleep.
        own = os.environ.get("OMP_NUM_THREADS", "")
        self._environment = thread_environment(int(own) if own.isdecimal() else num_cores())

    def start(self, handler: str) -> FreshProcess:
        """One that answers nothing else."""
        return FreshProcess(handler, environment=self._environment)

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._end - time.monotonic())

    def open(self, target: Target, num_steps: int | None) -> dict[str, Any]:
        """See ``Opening``."""
        try:
            with self.start(f"{JOBS}:Opening") as process:
                found: dict[str, Any] = process.call(
                    "run", timeout_s=self.left_s(), target=msgspec.to_builtins(target), num_steps=num_steps
                )
                return found
        except TrialError as exc:
            raise RefusedError(
                f"{target.reference} can't be opened and evaluated: {exc}",
                help="raise the budget" if exc.kind == "timed out" else "make torchproof train run first",
            ) from None

    def train(self, request: TrainRequest, arm: Arm, seed: int) -> SeedRun:
        """See ``FreshProcess.call`` for errors."""
        changed = msgspec.structs.replace(request, precision=arm.precision, fp32_modules=arm.fp32_modules, seed=seed)
        with self.start(f"{JOBS}:Training") as process:
            found = process.call(
                "run",
                timeout_s=self.left_s(),
                request=msgspec.to_builtins(changed),
                evaluate_first=arm.precision == "32-true",
            )
            found["peak_bytes"] = found["peak_bytes"] or process.peak_bytes
        return msgspec.convert({**found, "seed": seed}, SeedRun)


def dry_run(processes: Processes, request: TrainRequest) -> DryRun:
    """What it finds; that it could not be done is no end of the search, as the seeds will show."""
    dry = DryRun()
    try:
        with processes.start(REHEARSAL) as process:

            def ask(method: str, **arguments: Any) -> Any:
                return process.call(method, timeout_s=processes.left_s(), **arguments)

            num_batches = ask("open", request=msgspec.to_builtins(request))
            found = {"num_batches": num_batches, "overflows": ask("overflows")}
            dry = msgspec.convert(found, DryRun)
            dry = msgspec.convert({**found, **ask("verify", islands=[])}, DryRun)
            if _is_close(dry):
                return msgspec.structs.replace(dry, overflows=())
            if dry.overflows and (islands := ask("islands")):
                cured = {**found, "fp32_modules": islands, **ask("verify", islands=islands)}
                with_islands = msgspec.convert(cured, DryRun)
                return with_islands if _is_close(with_islands) else dry
    except CALL_ERRORS as exc:
        return msgspec.structs.replace(dry, refusal=str(as_trial_error(exc)))
    return dry


def _is_close(dry: DryRun) -> bool:
    """Whether 16-mixed runs as 32-true does."""
    if dry.loss_32 is None or dry.loss_16 is None or dry.scale is None or dry.lost_metrics:
        return False
    return abs(dry.loss_16 - dry.loss_32) <= LOSS_TOLERANCE * abs(dry.loss_32)
