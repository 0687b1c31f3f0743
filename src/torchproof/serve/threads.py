"""The environment that a thread count needs, for libraries that read it once; and who gets which cores."""

import os
from collections.abc import Mapping, MutableMapping, Sequence

from torchproof.machine.threads import thread_environment

WAIT_POLICY = "OMP_WAIT_POLICY"
OPENBLAS = "OPENBLAS_NUM_THREADS"
SPINS = "GOMP_SPINCOUNT"  # of GNU's OpenMP, which torch brings along; goes before the wait policy
# MiniLM's forward of one row took 0.88 to 0.90 of the time that it took with 1,000, on a machine with other tenants.
NUM_SPINS = "10000"


def set_thread_variables(num_threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what a trial with so many threads ran with; works only before torch is imported."""
    environ.update(thread_variables(num_threads, environ))


def thread_variables(num_threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process needs to run with so many threads.

    The thread count is the plan's, whatever the environment says: it is what was measured. A wait policy that the user
    set stays.

    Args:
        num_threads: intra-op threads; 0 leaves the default, with idle threads asleep.
    """
    variables = thread_environment(num_threads)
    if not num_threads:
        variables = {WAIT_POLICY: variables[WAIT_POLICY]}
    elif OPENBLAS not in environ:
        variables[OPENBLAS] = str(num_threads)  # numpy's and scipy's: it starts its threads when it is imported
    if WAIT_POLICY in environ:
        del variables[WAIT_POLICY]
    return variables


def lone_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a replica needs besides, where a request that has the machine to itself may use more threads.

    To wake a thread that sleeps takes longer than the short serial parts of a forward, so idle ones look for work so
    many times first. Beside a busy neighbour that loses, and then the request is not given the threads (``lone.py``).
    """
    return {} if WAIT_POLICY in environ or SPINS in environ else {SPINS: NUM_SPINS}


def share_cores(core_ids: Sequence[int], num_threads: int, num_replicas: int | None) -> list[tuple[int, ...]]:
    """Cores of each replica.

    Args:
        num_threads: that each should have; 0 for all.
        num_replicas: None for as many as there is room for.

    Returns:
        one entry for each replica; they share cores only where there are more replicas than cores.
    """
    if num_replicas is None:
        num_replicas = max(1, len(core_ids) // (num_threads or len(core_ids)))
    each = max(1, len(core_ids) // num_replicas)
    if num_replicas == 1:
        return [tuple(core_ids)]
    return [tuple(core_ids[(i * each + j) % len(core_ids)] for j in range(each)) for i in range(num_replicas)]
