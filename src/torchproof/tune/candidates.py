"""Which configurations are worth a trial on this machine."""

import math
from dataclasses import dataclass

from torchproof.types import Environment, Precision

MAX_BATCH_SIZE = 32  # larger ones brought nothing more on a CPU for any model that was measured
BATCH_SIZES = (1, 8, MAX_BATCH_SIZE)


@dataclass(frozen=True)
class Variant:
    """A runtime at a precision: one fresh process, which tries the thread counts one after the other."""

    name: str
    path: str
    precision: Precision


def usable_threads(environment: Environment) -> int:
    """Cores that the process may use: its affinity, capped by the cgroup's quota."""
    quota = environment.cpu_quota
    return max(1, min(environment.num_cores, math.floor(quota) if quota is not None else environment.num_cores))


def thread_counts(environment: Environment) -> tuple[int, ...]:
    """1, the powers of two below the usable cores, and all of them."""
    most = usable_threads(environment)
    return tuple(sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)}))
