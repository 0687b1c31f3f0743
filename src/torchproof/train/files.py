"""The files of a run's folder. All processes of a run read and write them; each is replaced as a whole."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from torchproof.errors import UsageError
from torchproof.types import decode, encode
from torchproof.types.training import StepLine, TrainReport, TrainRequest

REQUEST = "run.json"
REPORT = "proof.json"
METRICS = "metrics.jsonl"
ERROR = "error.json"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"step-(\d{10})")


def write_request(run: Path, request: TrainRequest) -> None:
    """Makes the folder where it isn't there. What stopped an earlier call doesn't count any more.

    Raises:
        UsageError: it can't be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ERROR).unlink(missing_ok=True)
        _replace(run / REQUEST, encode(request).encode())
    except OSError as exc:
        raise UsageError(
            f"{run} can't be written: {(exc.strerror or str(exc)).lower()}", help="name another folder"
        ) from None


def read_request(run: Path) -> TrainRequest:
    """What ``write_request`` wrote.

    Raises:
        UsageError: it can't be read.
    """
    try:
        data = (run / REQUEST).read_bytes()
    except OSError as exc:
        raise UsageError(
            f"{run / REQUEST} can't be read: {(exc.strerror or str(exc)).lower()}",
            help="name another folder with -o, or delete this one",
        ) from None
    return decode(data, TrainRequest, what=str(run / REQUEST))


def halve_micro_batch(run: Path, request: TrainRequest) -> None:
    """For the next start of the ranks, after one of them ran out of memory. More of them that do ask for the same."""
    halved = msgspec.structs.replace(request, micro_batch_size=max(1, request.micro_batch_size // 2))
    _replace(run / REQUEST, encode(halved).encode())


def write_error(run: Path, error: dict[str, str]) -> None:
    """Why it can't be done; the first one stays."""
    if not read_error(run):
        _replace(run / ERROR, msgspec.json.encode(error))


def read_error(run: Path) -> dict[str, str]:
    """Why it can't be done, as ``describe`` has it; empty where nothing is known against it."""
    try:
        found: dict[str, str] = msgspec.json.decode((run / ERROR).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found


def open_metrics(run: Path, step: int) -> BinaryIO:
    """``metrics.jsonl`` to add to: what was said after this step will be said again, so it goes."""
    path = run / METRICS
    kept = []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                said = msgspec.json.decode(line, type=StepLine)
                if said.step < step or (said.step == step and said.metrics is None):
                    kept.append(line)
    _replace(path, b"".join(kept))
    return path.open("ab")


def read_metrics(run: Path) -> list[StepLine]:
    """All lines of ``metrics.jsonl``."""
    return [msgspec.json.decode(line, type=StepLine) for line in (run / METRICS).read_bytes().splitlines()]


def write_report(run: Path, report: TrainReport) -> None:
    """``proof.json``."""
    _replace(run / REPORT, encode(report).encode())


def read_report(run: Path) -> TrainReport:
    """What ``write_report`` wrote."""
    return decode((run / REPORT).read_bytes(), TrainReport, what=str(run / REPORT))


def finished_checkpoints(run: Path) -> list[Path]:
    """Those that are whole, the oldest first."""
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name))


def last_checkpoint(run: Path) -> Path | None:
    """The newest of them; None where there is none."""
    found = finished_checkpoints(run)
    return found[-1] if found else None


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside it first, so that it is there as a whole or as it was."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(unfinished)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    replace(path, lambda unfinished: unfinished.write_bytes(data))
