"""The other end of ``FreshProcess``: makes the handler, answers calls until the pipe closes.

Run as ``python -m torchproof.measure.child package.module:Class CALLS_FD ANSWERS_FD``.
"""

import importlib
import os
import sys
import traceback
from typing import Any

import msgspec

from torchproof.errors import describe
from torchproof.machine.parent import end_with_parent


def main(handler: str, calls_fd: int, answers_fd: int) -> None:
    """Answers calls in order; an exception becomes an answer, the process goes on."""
    end_with_parent()
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
                encoded = msgspec.json.encode({"error": describe(exc)})
            answers.write(encoded + b"\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
