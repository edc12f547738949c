"""docs/serving.md names every flag, metric, route and error code there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from octavo.cli.serve import FLAGS, flag, serve
from octavo.server import errors
from octavo.server.app import ROUTES
from octavo.server.options import ServerOptions

OPS = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("name", [name for parameter in serve.params for name in parameter.opts if "--" in name])
def test_every_flag_is_in_the_docs(name):
    assert f"`{name}`" in OPS


def test_every_option_of_the_server_has_a_flag():
    fields = {field.name for field in dataclasses.fields(ServerOptions)}
    assert fields == {field for field, _, _ in FLAGS} | {"max_queue"}
    assert flag("cors_origins") == "--cors-origin"
    assert flag("max_logprobs") == "--max-logprobs"
    assert flag("max_body_bytes") == "--max-body-bytes"


@pytest.mark.parametrize("route", sorted({path for _, path in ROUTES}))
def test_every_route_is_in_the_docs(route):
    assert route.replace("{id:path}", "{id}") in OPS


@pytest.mark.anyio
async def test_every_metric_is_in_the_docs(serve):
    server = await serve()
    text = (await server.get("/metrics")).text
    names = set(re.findall(r"^# TYPE (octavo:\w+) ", text, re.M))
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 15
    assert [name for name in sorted(names) if f"`{name}`" not in OPS] == []
    written = set(re.findall(r"`(octavo:\w+)`", OPS))
    assert written <= names


def test_every_error_code_is_in_the_docs():
    codes = re.findall(r'code="(\w+)"', Path(errors.__file__).read_text())
    assert [code for code in codes if f"`{code}`" not in OPS] == []
