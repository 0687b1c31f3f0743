"""The other end of ``FreshProcess``: makes the handler, answers calls until the pipe closes.

Run as ``python -m torchproof.measure.child package.module:Class CALLS_FD ANSWERS_FD``.
"""

import ctypes
import importlib
import os
import signal
import sys
import traceback
from typing import Any

import msgspec

from torchproof.errors import TorchproofError, UserCodeError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(handler: str, calls_fd: int, answers_fd: int) -> None:
    """Answers calls in order; an exception becomes an answer, the process goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the caller, even after a kill -9
    target: Any = None
    with os.fdopen(calls_fd, "rb") as calls, os.fdopen(answers_fd, "wb") as answers:
        for line in calls:
            call = msgspec.json.decode(line)
            try:
                if target is None:
                    module, _, name = handler.partition(":")
                    target = getattr(importlib.import_module(module), name)()
                answer = {"result": getattr(target, call["method"])(**call["arguments"])}
                encoded = msgspec.json.encode(answer)
            except Exception as exc:  # noqa: BLE001  whatever the trial raises is its result
                traceback.print_exc()
                encoded = msgspec.json.encode({"error": _describe(exc)})
            answers.write(encoded + b"\n")
            answers.flush()


def _describe(exc: Exception) -> dict[str, str]:
    """What the caller makes the exception from again; ``help`` and ``trace`` only where it is one of ours."""
    if isinstance(exc, UserCodeError):
        return {"message": exc.doing, "trace": exc.trace}
    if isinstance(exc, TorchproofError):
        ours = next(kind for kind in type(exc).__mro__ if kind.__module__ == TorchproofError.__module__)
        return {"type": ours.__name__, "message": str(exc), "help": exc.help}
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    # torch.export says in its first line only that a constraint was violated, and in a list below it which.
    text = " ".join(lines[:2] if len(lines) > 1 and lines[1].startswith("- ") else lines[:1])
    return {"message": f"{type(exc).__name__}: {text}" if text else type(exc).__name__}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
