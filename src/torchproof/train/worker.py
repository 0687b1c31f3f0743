"""What torchrun's agent starts for each rank: ``python -m torchproof.train.worker RUN``. Torch-free until it trains."""

import os
import signal
import sys
from pathlib import Path

from torchproof.machine.parent import end_with_parent
from torchproof.train import files


def main(run: Path) -> int:
    """The exit code of the rank. Any other than 0 ends all ranks, and the agent starts them again."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, until the loop saves and stops
    request = files.read_request(run)
    if files.read_error(run):
        return 0  # another rank has found that it can't be done: not again
    from torchproof.train.rank import run_rank  # takes seconds, which an error need not wait for

    return run_rank(run, request)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # an orderly end would wait for ranks that wait for this one
