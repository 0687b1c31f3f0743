"""The environment that a thread count needs, for libraries that read it once, when they are loaded."""

import os
from collections.abc import MutableMapping

from torchproof.machine.threads import thread_environment

WAIT_POLICY = "OMP_WAIT_POLICY"


def set_thread_variables(num_threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what a trial with so many threads ran with; works only before torch is imported.

    The thread count is the plan's, whatever the environment says: it is what was measured. A wait policy that the user
    set stays.

    Args:
        num_threads: intra-op threads; 0 leaves the default, with idle threads asleep.
    """
    variables = thread_environment(num_threads)
    if not num_threads:
        variables = {WAIT_POLICY: variables[WAIT_POLICY]}
    if WAIT_POLICY in environ:
        del variables[WAIT_POLICY]
    environ.update(variables)
