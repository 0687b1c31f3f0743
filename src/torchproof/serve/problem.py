"""Errors as ``application/problem+json`` (RFC 9457)."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"


class ProblemError(Exception):
    """A request that is not answered: the status, and what the client is told."""

    def __init__(self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers

    def response(self) -> Response:
        """``about:blank``: the status code says all there is to say about the kind of problem."""
        body = {"type": "about:blank", "title": self.status.phrase, "status": self.status.value, "detail": self.detail}
        return Response(msgspec.json.encode(body), self.status.value, self.headers, MEDIA_TYPE)
