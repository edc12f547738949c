"""The ASGI application: routes and middleware over one `Service`."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server import admin, openapi, pooling, status, tokens
from octavo.server.anthropic import messages
from octavo.server.endpoint import Endpoint, Handler, encode_json, error_body
from octavo.server.errors import ApiError
from octavo.server.middleware import ApiKeys, CountResponses, Exchanges, RequestIds
from octavo.server.openai import batch, chat, completions, models, tokenize
from octavo.server.page.routes import page_routes
from octavo.server.responses import responses
from octavo.server.service import Service

ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/completions"): completions.create_completion,
    ("POST", "/v1/chat/completions"): chat.create_chat,
    ("POST", "/v1/responses"): responses.create_response,
    ("POST", "/v1/responses/input_tokens"): responses.count_input_tokens,
    ("GET", "/v1/responses/{id}"): responses.get_response,
    ("DELETE", "/v1/responses/{id}"): responses.delete_response,
    ("POST", "/v1/responses/{id}/cancel"): responses.cancel_response,
    ("GET", "/v1/responses/{id}/input_items"): responses.list_input_items,
    ("POST", "/v1/messages"): messages.create_message,
    ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
    ("POST", "/v1/chat/completions/batch"): batch.create_batch,
    ("POST", "/v1/completions/render"): tokens.render_completion,
    ("POST", "/v1/chat/completions/render"): tokens.render_chat,
    ("POST", "/inference/v1/generate"): tokens.generate,
    ("GET", "/v1/models"): models.list_models,
    ("GET", "/v1/models/{id:path}"): models.get_model,
    ("POST", "/tokenize"): tokenize.tokenize,
    ("POST", "/detokenize"): tokenize.detokenize,
    ("GET", "/health"): status.health,
    ("GET", "/ping"): status.health,
    ("GET", "/load"): status.load,
    ("GET", "/version"): status.version,
    ("GET", "/metrics"): status.metrics,
}
ROUTES |= {("POST", path): pooling.refuse for path in pooling.PATHS}
ROUTES["GET", "/openapi.json"] = openapi.serve_document(ROUTES)

EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
"""What scripts of other origins may read of an answer's headers."""


def create_app(service: Service) -> Starlette:
    """The application that serves `service`."""
    options = service.options
    middleware = [Middleware(CountResponses, counter=service.http_requests)]
    if options.cors_origins:
        # Outside of the others, so that a browser may read the errors of the others too.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origins,
                allow_methods=options.cors_methods,
                allow_headers=options.cors_headers,
                allow_credentials=options.cors_credentials,
                expose_headers=EXPOSED_HEADERS,
            )
        )
    routes = ROUTES | (admin.ROUTES if options.enable_admin else {})
    routes["GET", "/openapi.json"] = openapi.serve_document(routes)
    middleware.append(Middleware(RequestIds))
    middleware.append(Middleware(Exchanges, observers=service.observers))
    if service.keys:
        middleware.append(Middleware(ApiKeys, keys=service.keys))
    return Starlette(
        routes=[
            *(Route(path, Endpoint(service, handler), methods=[method]) for (method, path), handler in routes.items()),
            *(page_routes() if options.ui else ()),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: http_error},
    )


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) in the shape of all others."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no route {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = error_body(ApiError(error.status_code, message, code=code), request.scope)
    return Response(encode_json(body), error.status_code, headers=error.headers, media_type="application/json")
