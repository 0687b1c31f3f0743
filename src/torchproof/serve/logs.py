"""What the server's processes log: one line of JSON each on stderr, or text where a person looks on."""

import contextvars
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import msgspec

Format = Literal["text", "json"]

# The request that is being answered; empty outside of one.
current_request: contextvars.ContextVar[str] = contextvars.ContextVar("current_request", default="")

log = logging.getLogger("torchproof.serve.access")

# What every record has of its own. The rest came by ``extra``, but for names that begin with "_": libraries put those
# into all records, as Ray does where it is imported. uvicorn's colored copy of the message says nothing new.
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
# Visible ASCII: a line break would forge a line of the log, a space a field of one.
_SANE_ID = re.compile(r"[!-~]{1,128}")
# What encoding raises: for a lone surrogate, or a value that holds itself.
_NO_JSON = (ValueError, TypeError, RecursionError, msgspec.MsgspecError)
# Terminals act on these; a line break is handled apart.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def configure(
    format: Format | None = None, *, fields: Mapping[str, object] | None = None, stream: TextIO | None = None
) -> None:
    """Sends all that is logged in this process, and every Python warning, to stderr as one stream of lines.

    There is one handler, at the root: those that other libraries had set up for the terminal would say the same twice,
    or in another form. Their loggers are heard from ``WARNING`` on where they have no level of their own, torchproof's
    from ``INFO`` on. A second call replaces the first, and takes in the libraries that were imported in between.

    Args:
        format: by default text where the stream is a terminal, else JSON.
        fields: on every line, such as the number of the replica.
        stream: by default stderr.
    """
    stream = stream or sys.stderr
    if format is None:
        format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter((JsonFormatter if format == "json" else TextFormatter)(fields or {}))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("torchproof").setLevel(logging.INFO)
    logging.captureWarnings(True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            _pass_on(logger)


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``, then what else there is to say."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line; a value that JSON has no form for is written as its ``repr``."""
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record, self._fields),
        }
        if trace := _trace(self, record):
            line["exception"] = trace
        try:
            return _encode(line)
        except _NO_JSON:
            return _encode({key: _encodable(value) for key, value in line.items()})


class TextFormatter(logging.Formatter):
    """``2030-01-01T00:00:00.000Z WARNING torchproof.serve: message  key=value``; what follows is indented."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The lines; what a client sent can neither start one nor steer the terminal."""
        extra = "".join(f"  {key}={value}" for key, value in _extra(record, self._fields).items())
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{extra}"
        if trace := _trace(self, record):
            text += "\n" + trace
        return text.translate(_CONTROLS).replace("\n", "\n  ")


def request_id(header: str | None) -> str:
    """The client's ``X-Request-ID`` where it is visible ASCII of at most 128 characters, else a new one."""
    if header is not None and _SANE_ID.fullmatch(header):
        return header
    return os.urandom(8).hex()


def log_access(route: str, outcome: str, status: int, seconds: float, slow_s: float) -> None:
    """One line for a request that ended with an error of the service's, or was slow; nothing for all others.

    Refusals are not logged, nor is a deadline that the client itself made short: they come by the thousand when the
    server has no time for it, and the metrics count them.

    Args:
        slow_s: from which on a request counts as slow.
    """
    if outcome != "error" and seconds < slow_s:
        return
    log.log(
        logging.ERROR if outcome == "error" else logging.WARNING,
        "%s ended with %s after %.3g s",
        route,
        status,
        seconds,
        extra={"route": route, "outcome": outcome, "status": status, "seconds": round(seconds, 6)},
    )


def _pass_on(logger: logging.Logger) -> None:
    """Takes the handlers for stdout and stderr from a logger; those for files and the like stay."""
    for handler in logger.handlers.copy():
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):
            logger.removeHandler(handler)
            logger.propagate = True


def _time(record: logging.LogRecord) -> str:
    """RFC 3339, UTC, milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _extra(record: logging.LogRecord, fields: Mapping[str, object]) -> dict[str, Any]:
    """What is said beside the message; the record's own goes before the request's, and that before the process's."""
    found: dict[str, Any] = dict(fields)
    if request := current_request.get():
        found["request_id"] = request
    found.update((key, value) for key, value in vars(record).items() if key not in _OWN and not key.startswith("_"))
    for key in ("time", "level", "logger", "message", "exception"):  # the line's own
        if key in found:
            found[f"extra_{key}"] = found.pop(key)
    return found


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _encode(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()


def _encodable(value: object) -> object:
    """The value where JSON has a form for it, else text."""
    try:
        _encode(value)
    except _NO_JSON:
        text = value if isinstance(value, str) else repr(value)
        return text.encode("utf-8", "backslashreplace").decode()
    return value
