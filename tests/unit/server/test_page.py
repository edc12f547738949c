"""The page at `/` as files: what is served, under which policy, and to whom. Its behaviour is in tests/browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
STATIC = files("octavo.server.page") / "static"
NAMES = sorted(file.name for file in STATIC.iterdir())


async def test_every_file_of_the_page_is_served_with_its_type_and_the_policy(serve):
    server = await serve()
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name in NAMES:
        response = await server.get("/" if name == "index.html" else f"/page/{name}")
        assert response.status_code == 200, name
        assert response.content == (STATIC / name).read_bytes()
        assert response.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in response.headers["content-security-policy"]


async def test_a_file_that_the_browser_has_is_not_sent_again(serve):
    server = await serve()
    first = await server.get("/page/app.js")
    again = await server.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await server.get("/page/base.css", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py"]
)
async def test_what_is_no_file_of_the_page_is_404_in_the_usual_shape(serve, path):
    server = await serve()
    response = await server.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_only_get_and_head_are_taken(serve):
    server = await serve()
    response = await server.send("/", {})
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (await server.http.head("/")).status_code == 200


async def test_without_ui_there_is_no_page(serve):
    server = await serve(options=ServerOptions(ui=False, api_keys=("sesame",)))
    for path in ("/", "/page/app.js"):
        response = await server.get(path)
        assert response.status_code == 404
        assert response.json()["error"] == {
            "message": f"there is no route {path}",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        }
    headers = {"authorization": "Bearer sesame"}
    assert (await server.get("/v1/models", headers=headers)).status_code == 200


async def test_the_files_are_open_and_the_api_asks_for_a_key(serve):
    server = await serve(options=ServerOptions(api_keys=("sesame",)))
    assert (await server.get("/")).status_code == 200
    assert (await server.get("/page/app.js")).status_code == 200
    for path in ("/v1/models", "/metrics", "/page", "/pages/app.js"):
        assert (await server.get(path)).status_code == 401, path


class Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [given[name] or "" for name in ("src", "href", "action") if name in given]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if (tag == "script" and "src" not in given) or tag == "style":
            self.inline.append(tag)


def test_the_page_names_only_its_own_files_relatively_and_holds_nothing_inline():
    page = Addresses()
    page.feed((STATIC / "index.html").read_text())
    files_named = {address for address in page.found if not address.startswith("#")}
    assert files_named == {f"page/{name}" for name in NAMES if name.endswith((".css", ".svg")) or name == "app.js"}
    assert page.inline == []


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".js", ".css"))])
def test_a_script_or_sheet_loads_only_its_neighbours(name):
    text = (STATIC / name).read_text()
    for address in re.findall(r"""(?:from|import)\s+["']([^"']+)["']|url\(([^)]*)\)""", text):
        assert address[0].startswith("./"), address
        assert address[0][2:] in NAMES
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sink not in text, f"{name} makes code or markup of a string: {sink}"
