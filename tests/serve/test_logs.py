"""What is logged is one record on stderr that a machine can read, says which request it is of, and is there once."""

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from torchproof.serve.logs import (
    JsonFormatter,
    TextFormatter,
    configure,
    current_request,
    log_access,
    request_id,
)

log = logging.getLogger("torchproof.serve.somewhere")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stderr:
    """All that this test has written to it so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stream(capsys: pytest.CaptureFixture[str]) -> Iterator[Stderr]:
    """Stderr; what is set up for logging in the test is undone after it."""
    known = {logging.root, *loggers()}
    before = [(logger, logger.handlers.copy(), logger.level, logger.propagate) for logger in known]
    yield Stderr(capsys)
    logging.captureWarnings(False)
    before += [(logger, [], logging.NOTSET, True) for logger in set(loggers()) - known]
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def loggers() -> list[logging.Logger]:
    return [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]


def lines(stream: Stderr) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def record(message: str, args: Any = (), **extra: Any) -> logging.LogRecord:
    return log.makeRecord(log.name, logging.WARNING, __file__, 1, message, args, None, extra=extra)


def test_importing_changes_nothing() -> None:
    """A service that imports torchproof keeps its own logging."""
    code = (
        "import logging, torchproof.serve.logs; "
        "print(logging.root.handlers, logging.getLogger('torchproof').handlers, logging.getLogger('torchproof').level)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "[] [] 0\n"


def test_a_line_of_json(stream: Stderr) -> None:
    configure("json", fields={"replica": 3})
    log.warning("%d rows in %s", 3, "queue", extra={"bucket": 128, "_ray_timestamp_ns": 1})  # Ray puts it into all
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "WARNING",
        "logger": "torchproof.serve.somewhere",
        "message": "3 rows in queue",
        "replica": 3,
        "bucket": 128,
    }


def test_a_line_of_text(stream: Stderr) -> None:
    configure("text", fields={"replica": 3})
    log.warning("%d rows", 3, extra={"bucket": 128, "_ray_timestamp_ns": 1})
    time, rest = stream.getvalue().split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == "WARNING torchproof.serve.somewhere: 3 rows  replica=3  bucket=128\n"


@pytest.mark.parametrize("kind", [JsonFormatter, TextFormatter])
@pytest.mark.parametrize(
    ("created", "time"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1893456000.0005, "2030-01-01T00:00:00.000Z"),
        (1893455999.9996, "2029-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_utc_in_milliseconds(kind: type[logging.Formatter], created: float, time: str) -> None:
    """They sort as text, and never have 1000 milliseconds."""
    one = record("x")
    one.created, one.msecs = created, created % 1 * 1000
    assert time in kind({}).format(one)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "first"), [(io.StringIO, "{"), (Terminal, "2")])
def test_a_person_sees_text(stream: Stderr, kind: type[io.StringIO], first: str) -> None:
    """And a collector, to which stderr is no terminal, JSON."""
    chosen = kind()
    configure(stream=chosen)
    log.warning("x")
    assert chosen.getvalue()[0] == first
    assert not stream.getvalue()


def test_exceptions_are_text_in_the_same_line(stream: Stderr) -> None:
    """A traceback in lines of its own would be as many records to a collector."""
    configure("json")
    try:
        raise ValueError("planted")
    except ValueError:
        log.exception("no answer")
    log.info("next")
    first, second = lines(stream)
    assert first["message"] == "no answer"
    assert first["exception"].startswith("Traceback (most recent call last):\n")
    assert first["exception"].endswith("ValueError: planted")
    assert "exception" not in second


def test_a_traceback_in_text_is_indented(stream: Stderr) -> None:
    """So that only records start in the first column."""
    configure("text")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("no answer")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR torchproof.serve.somewhere: no answer")
    assert rest
    assert all(line.startswith("  ") for line in rest)


def test_levels(stream: Stderr) -> None:
    """What torchproof does is said from INFO on; what others do from WARNING on."""
    configure("json")
    log.debug("ours, debug")
    log.info("ours, info")
    logging.getLogger("somebody").info("other's, info")
    logging.getLogger("somebody").warning("other's, warning")
    assert [line["message"] for line in lines(stream)] == ["ours, info", "other's, warning"]


def test_warnings_are_logged(stream: Stderr) -> None:
    configure("json")
    warnings.simplefilter("always")  # undone by pytest
    warnings.warn("planted", UserWarning, stacklevel=1)
    (line,) = lines(stream)
    assert line["logger"] == "py.warnings"
    assert "UserWarning: planted" in line["message"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_uvicorn_is_heard_once(stream: Stderr, when: str) -> None:
    """It brings handlers of its own, whichever comes first; the second ``configure`` takes them in."""
    if when == "after":
        configure("json")
    uvicorn.Config(lambda: None, log_level="info")
    configure("json")
    logging.getLogger("uvicorn.error").warning("one")
    logging.getLogger("uvicorn.error").warning("two", extra={"color_message": "\x1b[1mtwo\x1b[0m"})
    logging.getLogger("uvicorn.access").warning('%s - "%s"', "client", "POST /predict")
    assert [line["message"] for line in lines(stream)] == ["one", "two", 'client - "POST /predict"']
    assert all(set(line) == {"time", "level", "logger", "message"} for line in lines(stream))


def test_configured_twice_is_said_once(stream: Stderr) -> None:
    """The second replaces the first: a replica that was forked off has a field of its own."""
    configure("text")
    configure("json", fields={"replica": 1})
    log.warning("x")
    (line,) = lines(stream)
    assert line["replica"] == 1


def test_a_library_that_logs_to_a_file_still_does(stream: Stderr) -> None:
    """Only handlers for the terminal are taken away: beside one, the other stays, and nothing is said twice."""
    other = logging.getLogger("somebody.else")
    file = io.StringIO()
    other.addHandler(logging.StreamHandler(file))
    other.addHandler(logging.StreamHandler(sys.stderr))
    other.propagate = False
    quiet = logging.getLogger(
        "somebody.quiet"
    )  # the near miss: it has only its file, and asked to be heard nowhere else
    quiet.addHandler(logging.StreamHandler(file))
    quiet.propagate = False

    configure("json")
    other.warning("x")
    quiet.warning("y")
    assert file.getvalue() == "x\ny\n"
    assert [line["message"] for line in lines(stream)] == ["x"]


def test_a_line_says_which_request_it_is_of(stream: Stderr) -> None:
    """Each task has its own; outside of a request there is none, and a record's own goes first."""
    configure("json")

    async def answer(name: str) -> None:
        current_request.set(name)
        await asyncio.sleep(0)
        log.warning("x")

    async def both() -> None:
        await asyncio.gather(answer("a"), answer("b"))

    asyncio.run(both())
    log.warning("x")
    token = current_request.set("a")
    log.warning("x", extra={"request_id": "c"})
    current_request.reset(token)
    assert [line.get("request_id") for line in lines(stream)] == ["a", "b", None, "c"]


def test_extra_fields_take_no_place_of_the_lines_own() -> None:
    """A field that happens to be named ``level`` doesn't change it, nor does an exception that is none."""
    line = json.loads(JsonFormatter({}).format(record("x", level="high", time=3, logger=None, exception="no")))
    assert line["level"] == "WARNING"
    assert line["logger"] == log.name
    assert "exception" not in line
    extras = {"extra_level": "high", "extra_time": 3, "extra_logger": None, "extra_exception": "no"}
    assert line.items() >= extras.items()


class Odd:
    def __repr__(self) -> str:
        return "Odd()"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Odd(), "Odd()"),
        ([Odd()], ["Odd()"]),
        (float("nan"), None),
        ({"a": 1.5}, {"a": 1.5}),
        ({Odd(): 1}, {"Odd()": 1}),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ("\udcff", "\\udcff"),
        (2**70, 2**70),
    ],
    ids=str,
)
def test_a_value_without_a_form_in_json_is_written_all_the_same(value: object, written: object) -> None:
    """The line is not lost over a field of it."""
    line = json.loads(JsonFormatter({}).format(record("x", field=value, seconds=0.5)))
    assert line["message"] == "x"
    assert line["seconds"] == 0.5  # still a number
    assert line["field"] == written


def test_a_field_that_holds_itself_is_written_all_the_same() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert json.loads(JsonFormatter({}).format(record("x", field=loop)))["message"] == "x"


ANY = st.text(st.characters())  # surrogates and control characters included


@given(ANY, ANY, ANY)
def test_what_a_client_sent_forges_no_line_of_json(message: str, value: str, request: str) -> None:
    """One record is one line, and its message is what was logged."""
    line = JsonFormatter({"request_id": request}).format(record("%s", (message,), sent=value))
    assert "\n" not in line
    assert "\r" not in line
    as_text = {key: one.encode("utf-8", "backslashreplace").decode() for key, one in
               {"message": message, "sent": value, "request_id": request}.items()}  # fmt: skip
    assert json.loads(line).items() >= as_text.items()


@given(ANY, ANY)
def test_what_a_client_sent_forges_no_line_of_text(message: str, value: str) -> None:
    """What follows the first line is indented, and nothing steers the terminal."""
    first, *rest = TextFormatter({}).format(record("%s", (message,), sent=value)).split("\n")
    assert f"Z WARNING {log.name}: " in first
    assert all(line.startswith("  ") for line in rest)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", first + "".join(rest))


def test_a_forged_line_is_seen_as_one() -> None:
    """The planted attack, without which the two tests above might look for nothing."""
    forged = "x\n2030-01-01T00:00:00.000Z ERROR torchproof: all is lost\x1b[2J"
    assert TextFormatter({}).format(record("%s", (forged,))).split("\n")[1] == (
        "  2030-01-01T00:00:00.000Z ERROR torchproof: all is lost\\x1b[2J"
    )


@pytest.mark.parametrize("sent", ["a", "0" * 128, "3f2a-77/b:c", "!~"])
def test_a_sane_request_id_is_kept(sent: str) -> None:
    assert request_id(sent) == sent


@pytest.mark.parametrize(
    "sent", [None, "", "0" * 129, "a b", "a\n", "\na", "a\r\nX-Other: 1", "a\x1b[2J", "é", "a\x7f"]
)
def test_any_other_is_replaced(sent: str | None) -> None:
    """It comes back in a header and stands in the log: a line break would be one in either."""
    made = request_id(sent)
    assert made != sent
    assert re.fullmatch("[0-9a-f]{16}", made)
    assert made != request_id(sent)


@pytest.mark.parametrize(
    ("outcome", "status", "seconds", "level"),
    [
        ("ok", 200, 0.999, None),
        ("ok", 200, 1.0, "WARNING"),
        ("error", 500, 0.001, "ERROR"),
        ("deadline_exceeded", 504, 0.001, None),
        ("deadline_exceeded", 504, 2.0, "WARNING"),
        ("refused_queue_full", 503, 0.001, None),
        ("client_error", 422, 0.001, None),
        ("client_error", 422, 3.0, "WARNING"),
    ],
)
def test_errors_and_slow_requests_are_logged(
    stream: Stderr, outcome: str, status: int, seconds: float, level: str | None
) -> None:
    """And nothing else: refusals come by the thousand just when there is no time for it."""
    configure("json")
    token = current_request.set("abc")
    log_access("/predict", outcome, status, seconds, slow_s=1.0)
    current_request.reset(token)
    if level is None:
        assert not stream.getvalue()
        return
    (line,) = lines(stream)
    line.pop("time")
    assert line == {
        "level": level,
        "logger": "torchproof.serve.access",
        "message": f"/predict ended with {status} after {seconds:.3g} s",
        "request_id": "abc",
        "route": "/predict",
        "outcome": outcome,
        "status": status,
        "seconds": seconds,
    }
