"""Errors as ``application/problem+json`` (RFC 9457)."""

from http import HTTPStatus

import msgspec

MEDIA_TYPE = "application/problem+json"


def problem(status: int, detail: str) -> bytes:
    """``about:blank``: the status code says all there is to say about the kind of problem."""
    title = HTTPStatus(status).phrase if status != CLIENT_GONE else "Client Closed Request"
    return msgspec.json.encode({"type": "about:blank", "title": title, "status": status, "detail": detail})


CLIENT_GONE = 499  # nobody is left to read it
