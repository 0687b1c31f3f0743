"""Reads a traffic file: one request to a line, as JSON."""

import codecs
from pathlib import Path
from typing import Any

import msgspec

from torchproof.errors import TrafficError

MAX_REQUESTS = 2000  # evenly spaced over a longer file: enough for a p99 with an interval, encoded in seconds


def read_traffic(path: Path) -> list[tuple[int, Any]]:
    """The requests with their line numbers, at most ``MAX_REQUESTS`` of them, evenly spaced.

    Raises:
        TrafficError: no such file, no request in it, or a line that is not JSON (with its number).
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as exc:
        raise TrafficError(f"{path}: {(exc.strerror or str(exc)).lower()}", help="name a JSON Lines file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise TrafficError(f"{path}: no request in it", help="write one JSON request to a line")
    requests = []
    for number, line in numbered:
        try:
            requests.append((number, msgspec.json.decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise TrafficError(
                f"{path}, line {number}: not JSON: {exc}", help="write one JSON request to a line, or remove the line"
            ) from None
    step = len(requests) / min(len(requests), MAX_REQUESTS)
    return [requests[int(i * step)] for i in range(min(len(requests), MAX_REQUESTS))]
