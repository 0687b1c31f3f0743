"""What the child processes of these tests run: handlers that behave and handlers that don't."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from torchproof.errors import LimitsError, TargetError, UserCodeError

sys.stdout.write("printed at import\n")


class RequestError(TargetError):
    """A subclass of ours that ``errors`` doesn't know."""


class UsageError(Exception):
    """The user's own, with the name of one of ours."""


class Handler:
    def __init__(self) -> None:
        self.calls = 0

    def add(self, a: float, b: float) -> float:
        self.calls += 1
        return a + b

    def num_calls(self) -> int:
        return self.calls

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def big(self, size: int) -> str:
        return "x" * size

    def length(self, text: str) -> int:
        return len(text)

    def chat(self) -> str:
        """Prints on every level, with what could be taken for an answer."""
        sys.stdout.write('{"result": "a lie"}\n')
        sys.stderr.write('{"result": "another"}\n')
        os.write(1, b'{"result": "a third"}\n')
        subprocess.run([sys.executable, "-c", "print('{}')"], check=True)
        return "the truth"

    def no_json(self) -> object:
        return object()

    def fail(self) -> None:
        raise ValueError("\n  first line  \nsecond line")

    def fail_with_a_list(self) -> None:
        raise ValueError("a constraint was violated\n  - the batch is always 2\n  - and more")

    def fail_silently(self) -> None:
        raise KeyError

    def refuse_target(self) -> None:
        raise TargetError("the target is wrong", help="write another")

    def refuse_limits(self) -> None:
        raise LimitsError("nothing met", help="loosen")

    def refuse_request(self) -> None:
        raise RequestError("the request is wrong", help="send another")

    def raise_namesake(self) -> None:
        raise UsageError("not torchproof's")

    def user_code(self) -> None:
        raise UserCodeError("load() raised ValueError", 'File "app.py", line 3\nValueError: no')

    def segfault(self) -> None:
        os.write(1, b"about to read address 0\n")
        ctypes.string_at(0)

    def end(self, code: int) -> None:
        os._exit(code)

    def end_by(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def stop_talking(self) -> None:
        """Closes every pipe and stays."""
        os.closerange(3, 256)
        signal.pause()

    def hang(self, ready: str) -> None:
        """Starts a grandchild, says so in a file, and never answers."""
        Path(ready).write_text(str(self.grandchild()))
        threading.Event().wait()

    def grandchild(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid

    def crash_beside_a_fork(self) -> None:
        """A forked grandchild holds the pipe open while its parent dies."""
        if os.fork() == 0:
            signal.pause()
        os._exit(7)

    def eat(self, num_bytes: int) -> None:
        self.eaten = bytearray(os.urandom(1)) * num_bytes
        signal.pause()

    def eat_below(self, num_bytes: int) -> None:
        """The same in a grandchild."""
        code = f"import signal; x = b'1' * {num_bytes}; signal.pause()"
        subprocess.run([sys.executable, "-c", code], check=True)

    def leave_behind(self) -> str:
        """A temporary folder that nobody removes: the process will be killed."""
        return tempfile.mkdtemp()

    def descriptors(self) -> list[str]:
        return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd))


def _open(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("can't be made")

    def add(self, **arguments: Any) -> None: ...
