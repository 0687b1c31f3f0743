"""What is asked besides the model: health, metrics, metadata, documentation, reload."""

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from swagger_ui_bundle import swagger_ui_path

from torchproof.serve.problem import MEDIA_TYPE, problem

if TYPE_CHECKING:
    from torchproof.serve.app import App

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
# Answered without a key: a probe has none.
OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
JSON = "application/json"


def pages(app: "App") -> ASGIApp:
    """The pages. Every error is answered as ``application/problem+json``, of the v2 protocol in its own form."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        if reason := app.dispatcher.unready:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        return PlainTextResponse("ready\n")

    async def metrics(request: Request) -> Response:
        body, content_type = app.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def openapi(request: Request) -> Response:
        return Response(_document("openapi"), media_type=JSON)

    async def docs(request: Request) -> Response:
        return HTMLResponse(DOCS)

    async def docs_file(request: Request) -> Response:
        """One of the files of Swagger UI; not its own index page, which asks an outside host for its example."""
        name = request.path_params["name"]
        if name not in SWAGGER_FILES:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return FileResponse(str(swagger_ui_path / name))

    async def v2_server(request: Request) -> Response:
        return Response(_document("server"), media_type=JSON)

    async def v2_live(request: Request) -> Response:
        return Response(b"{}", media_type=JSON)

    async def v2_ready(request: Request) -> Response:
        _known(request)
        if reason := app.dispatcher.unready:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        return Response(b"{}", media_type=JSON)

    async def v2_model(request: Request) -> Response:
        _known(request)
        return Response(_document("model"), media_type=JSON)

    async def reload(request: Request) -> Response:
        if app.keys is None:
            raise HTTPException(HTTPStatus.FORBIDDEN, "reloading over HTTP needs --api-key-file; SIGHUP reloads too")
        if reason := await app.reload():
            raise HTTPException(HTTPStatus.CONFLICT, f"what was served before goes on: {reason}")
        return PlainTextResponse("reloaded\n")

    def _document(name: str) -> bytes:
        facts = app.supervisor.facts
        if facts is None:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, app.dispatcher.unready)
        return facts.documents[name]

    def _known(request: Request) -> None:
        name = request.path_params.get("name", app.settings.name)
        version = request.path_params.get("version", "1")
        if name != app.settings.name or version != "1":
            raise HTTPException(HTTPStatus.NOT_FOUND, f"the model here is {app.settings.name}, version 1")

    async def on_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        status = HTTPStatus(exc.status_code)
        detail = str(exc.detail)
        if detail == status.phrase and status is HTTPStatus.NOT_FOUND:
            detail = f"there is nothing at {request.url.path}; what there is stands at /docs"
        elif detail == status.phrase and status is HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} answers {(exc.headers or {}).get('Allow', 'other methods')} only"
        return _error(request, status.value, detail, exc.headers)

    async def on_bug(request: Request, exc: Exception) -> Response:
        return _error(request, HTTPStatus.INTERNAL_SERVER_ERROR.value, "the server raised an error; its log says more")

    model = "/v2/models/{name}"
    version = model + "/versions/{version}"
    starlette = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/docs", docs),
            Route("/docs/{name}", docs_file),
            Route("/v2", v2_server),
            Route("/v2/", v2_server),
            Route("/v2/health/live", v2_live),
            Route("/v2/health/ready", v2_ready),
            *(Route(path, v2_model) for path in (model, version)),
            *(Route(f"{path}/ready", v2_ready) for path in (model, version)),
            Route("/admin/reload", reload, methods=["POST"]),
        ],
        exception_handlers={HTTPException: on_http, Exception: on_bug},
    )

    async def guarded(scope, receive, send):  # type: ignore[no-untyped-def]
        if app.keys is not None and scope["path"] not in OPEN and not app.keys.allows(scope["headers"]):
            detail = "send a key as Authorization: Bearer KEY or X-API-Key: KEY"
            response = _error(Request(scope), HTTPStatus.UNAUTHORIZED.value, detail, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await starlette(scope, receive, send)

    return guarded


def _error(request: Request, status: int, detail: str, headers: "object" = None) -> Response:
    more = dict(headers) if headers else None  # type: ignore[call-overload]
    if request.url.path.startswith("/v2"):
        return Response(msgspec.json.encode({"error": detail}), status, more, JSON)
    return Response(problem(status, detail), status, more, MEDIA_TYPE)
