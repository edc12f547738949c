"""GET / and GET /page/NAME: the page's files, read once, with a policy that lets nothing else run or load.

The files hold no secret and are served without a key; the page's calls of the API carry the key that its user typed.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
"""Content-Security-Policy. No inline script or style, no eval, no other origin; with trusted types, the browser refuses
to make markup of a string at all, so what a model writes cannot become HTML even by a mistake in the page."""

HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked again each time and answered by 304: a new server brings a new page
}


def page_routes() -> list[Route]:
    """The routes of the page. Its addresses are relative, so they hold behind any prefix that a proxy strips."""
    contents = {file.name: file.read_bytes() for file in (files(__package__) / "static").iterdir()}
    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:24]}"' for name, data in contents.items()}

    def reply(request: Request, name: str) -> Response:
        headers = HEADERS | {"etag": tags[name]}
        if tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(contents[name], headers=headers, media_type=CONTENT_TYPES[name.rpartition(".")[2]])

    async def index(request: Request) -> Response:
        return reply(request, "index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in contents or name == "index.html":
            raise HTTPException(404)
        return reply(request, name)

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]
