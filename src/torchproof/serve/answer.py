"""One request through the user's code and the model, alone in its batch."""

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from torchproof.serve import openapi
from torchproof.serve.problem import ProblemError
from torchproof.target.request import NotJsonError, RequestError, decode_json, request_type
from torchproof.target.respond import respond
from torchproof.target.rows import Run
from torchproof.target.service import Service
from torchproof.types import Choice, Finding, GoldenSeen, Signature

log = logging.getLogger("torchproof.serve")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to answer.

    Attributes:
        findings: of this start.
        golden: the replays, all within the tolerance; empty for a target without a bundle.
        examples: the first sampled request; empty where there is none.
    """

    target: str
    service: Service
    signature: Signature
    run: Run
    choice: Choice
    findings: tuple[Finding, ...]
    golden: tuple[GoldenSeen, ...]
    examples: tuple[Any, ...]


class Answerer:
    """What the server calls: a body in, a body out."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.type = request_type(loaded.service)
        self.openapi = openapi.document(loaded.service, loaded.target, loaded.examples)

    def answer(self, body: bytes) -> bytes:
        """The response's JSON.

        Raises:
            ProblemError: 400 not JSON, 422 not what the model takes, 500 the user's code or the model raised. The
                traceback goes to the log only.
        """
        loaded = self.loaded
        try:
            return respond(loaded.service, loaded.signature, loaded.run, decode_json(body, self.type))
        except NotJsonError as exc:
            raise ProblemError(HTTPStatus.BAD_REQUEST, str(exc)) from None
        except RequestError as exc:
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(exc)) from None
        except (Exception, SystemExit):  # the user's code may raise anything
            log.exception("a request was answered with 500")
            raise ProblemError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the service raised an error; its log says more"
            ) from None
