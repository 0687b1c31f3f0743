"""The HTTP face of a model: predict, health, readiness, and its documentation."""

import logging
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from swagger_ui_bundle import swagger_ui_path

from torchproof.serve.model import Model
from torchproof.serve.problem import ProblemError

# 16 MiB: five times a 224 x 224 RGB image written as JSON numbers (3 MB).
MAX_BODY_BYTES = 16 * 1024 * 1024

SWAGGER_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
# Links are relative, for a proxy that serves it all below a path. Swagger UI 4.15 draws nothing for any version but
# 3.0.x, so the page shows the 3.1 document under that number; without validatorUrl it asks an outside host.
DOCS = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
fetch("openapi.json").then((response) => response.json()).then((spec) => {
  if (!spec.openapi) { document.body.textContent = spec.detail; return; }
  document.title = spec.info.title;
  SwaggerUIBundle({spec: {...spec, openapi: "3.0.3"}, dom_id: "#swagger-ui", validatorUrl: null});
});
</script>
</body>
</html>
"""

log = logging.getLogger("torchproof.serve")


def create_app(model: Model) -> Starlette:
    """The app. Every error is answered as ``application/problem+json``."""
    app = Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/openapi.json", openapi),
            Route("/docs", docs),
            Route("/docs/{name}", docs_file),
        ],
        exception_handlers={
            ProblemError: _on_problem,
            HTTPException: _on_http,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    app.state.model = model
    return app


async def predict(request: Request) -> Response:
    """One request, as JSON, to its response."""
    body = await _read_body(request)
    return Response(await _model(request).answer(body), media_type="application/json")


async def healthz(request: Request) -> Response:
    """Alive: whoever answers this is."""
    return PlainTextResponse("alive\n")


async def readyz(request: Request) -> Response:
    """Whether the model can answer."""
    if reason := _model(request).unready:
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, reason)
    return PlainTextResponse("ready\n")


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    answerer = _model(request).answerer
    if answerer is None:
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, _model(request).unready)
    return Response(answerer.openapi, media_type="application/json")


async def docs(request: Request) -> Response:
    """Swagger UI, from the disk."""
    return HTMLResponse(DOCS)


async def docs_file(request: Request) -> Response:
    """One of the files of Swagger UI; not its own index page, which asks an outside host for its example."""
    name = request.path_params["name"]
    if name not in SWAGGER_FILES:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return FileResponse(str(swagger_ui_path / name))


def _model(request: Request) -> Model:
    model: Model = request.app.state.model
    return model


async def _read_body(request: Request) -> bytes:
    """The body; never more than the limit of it is held."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not declared.isdecimal() or int(declared) <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        else:
            return bytes(body)
    raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")


async def _on_problem(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ProblemError)
    return exc.response()


async def _on_http(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    status = HTTPStatus(exc.status_code)
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {request.url.path}; what there is stands at /docs"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path} answers {(exc.headers or {}).get('Allow', 'other methods')} only"
    else:
        detail = str(exc.detail)
    return ProblemError(status, detail, exc.headers).response()


async def _on_disconnect(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)  # nobody is left to read it


async def _on_bug(request: Request, exc: Exception) -> Response:
    return ProblemError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server raised an error; its log says more").response()
