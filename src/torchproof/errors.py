"""Every exception that torchproof raises on purpose, with its exit code and its cure.

    TorchproofError            base; ``.help`` is the line that cures it, ``.exit_code`` what the command returns
    +-- UsageError        (2)  an option, an argument or a file that the user named
    |   +-- TargetError   (2)  the target: its file, its name, its samples, what its model returns
    |   +-- TrafficError  (2)  a traffic file, with the number of the line
    |   +-- BundleError   (2)  a bundle: missing, changed, unreadable or from a newer torchproof
    +-- RefusedError      (1)  torchproof will not go on: the evidence says that the answers would be wrong
    +-- LimitsError       (3)  nothing met the limits

    UserCodeError              an exception inside the user's own code: shown with the user's traceback
    TrialError                 one trial's end (crash, time-out, unsupported op): becomes a row, never stops a run
    TorchproofWarning          a warning: something that the caller should know and torchproof worked around

Exit codes: 0 fine, 1 findings or refused, 2 wrong use, 3 nothing met the limits.
"""


class TorchproofError(Exception):
    """Base of what a user sees: one line that says what is wrong, one that cures it."""

    exit_code = 1

    def __init__(self, message: str, *, help: str) -> None:
        super().__init__(message)
        self.help = help


class UsageError(TorchproofError):
    """An option, an argument or a file that the user named."""

    exit_code = 2


class TargetError(UsageError):
    """The target: its file, its name, its samples, or what its model returns."""


class TrafficError(UsageError):
    """A traffic file; the message names the line."""


class BundleError(UsageError):
    """A bundle that is missing, changed, unreadable or newer than this torchproof."""


class RefusedError(TorchproofError):
    """The evidence says that the answers would be wrong, so nothing is served or written."""

    exit_code = 1


class LimitsError(TorchproofError):
    """No candidate met the user's limits."""

    exit_code = 3


class UserCodeError(Exception):
    """An exception raised by the user's own code.

    ``trace`` is the user's traceback, cut at the point where torchproof called in.
    """

    exit_code = 2

    def __init__(self, doing: str, trace: str) -> None:
        super().__init__(doing)
        self.doing = doing
        self.trace = trace


class TrialError(Exception):
    """One trial ended early. ``kind`` is what happened; the message is the first line of the real error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TorchproofWarning(UserWarning):
    """Something that the caller should know and that torchproof worked around."""


def describe(exc: BaseException) -> dict[str, str]:
    """What another process makes the exception from again; ``help`` and ``trace`` only where it is one of ours."""
    if isinstance(exc, UserCodeError):
        return {"message": exc.doing, "trace": exc.trace}
    if isinstance(exc, TorchproofError):
        ours = next(kind for kind in type(exc).__mro__ if kind.__module__ == __name__)
        return {"type": ours.__name__, "message": str(exc), "help": exc.help}
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    # torch.export says in its first line only that a constraint was violated, and in a list below it which.
    text = " ".join(lines[:2] if len(lines) > 1 and lines[1].startswith("- ") else lines[:1])
    return {"message": f"{type(exc).__name__}: {text}" if text else type(exc).__name__}


def revive(error: dict[str, str]) -> Exception:
    """The exception that ``describe`` described: of its own class where that is one of ours, else a TrialError."""
    if "trace" in error:
        return UserCodeError(error["message"], error["trace"])
    if "help" in error:
        revived: Exception = globals()[error["type"]](error["message"], help=error["help"])
        return revived
    return TrialError("failed", error["message"])


def said(exc: BaseException) -> str:
    """What a log tells of it, the user's own traceback included."""
    return f"{exc}: {exc.trace.strip()}" if isinstance(exc, UserCodeError) else str(exc)
