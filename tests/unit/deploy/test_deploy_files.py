"""The image, the systemd unit and the nginx example, checked by their own tools where these are installed."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.server.lifecycle import KEEP_ALIVE_S
from octavo.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
UNIT = DEPLOY / "systemd" / "octavo.service"
NGINX = DEPLOY / "nginx" / "octavo.conf"


def instructions() -> list[list[tuple[str, str]]]:
    """(instruction, the rest) of each stage of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, rest.strip()))
    return stages[1:]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_octavo_serve_itself_and_as_no_root() -> None:
    last = dict(instructions()[-1])
    assert json.loads(last["ENTRYPOINT"]) == ["octavo", "serve"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    assert json.loads(last["VOLUME"]) == ["/models", "/cache"]
    words = [word for word, _ in instructions()[-1]]
    assert words.index("RUN") < words.index("USER") < words.index("ENTRYPOINT")


def test_the_image_is_the_user_that_the_chart_runs_it_as() -> None:
    values = (DEPLOY / "helm" / "octavo" / "values.yaml").read_text()
    uid, gid = dict(instructions()[-1])["USER"].split(":")
    assert f"runAsUser: {uid}\n" in values
    assert f"runAsGroup: {gid}\n" in values


def test_the_last_stage_takes_an_environment_and_no_source() -> None:
    copied = [rest for word, rest in instructions()[-1] if word in ("COPY", "ADD")]
    assert copied == ["--from=environment /opt/octavo /opt/octavo"]


def test_packages_are_installed_within_the_constraints_of_the_repository() -> None:
    installs = [rest for stage in instructions() for word, rest in stage if word == "RUN" and "pip install" in rest]
    assert len(installs) == 1
    assert "source=.ci/constraints.txt,target=/constraints.txt" in installs[0]
    assert "--constraint /constraints.txt" in installs[0]
    assert (ROOT / ".ci" / "constraints.txt").is_file()


def test_each_platform_has_its_base_and_its_plugin() -> None:
    stages = {rest.partition(" AS ")[2] for stage in instructions() for word, rest in stage if word == "FROM"}
    for platform in ("cpu", "cuda"):
        assert f"{platform}-base" in stages
        assert (ROOT / "plugins" / platform / "pyproject.toml").is_file()


def test_what_the_image_is_built_from_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {rest.split()[0] for word, rest in instructions()[0] if word == "COPY"}
    assert copied | {".ci/constraints.txt"} == kept
    assert all((ROOT / name).exists() for name in kept)


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server on a free port that answers everything with one status: (port, paths asked for)."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_of_the_image_follows_the_servers_answer(status: int, healthy: bool) -> None:
    command = json.loads(dict(instructions()[-1])["HEALTHCHECK"].partition(" CMD ")[2])
    assert command[0] == "python3"
    with answering(status) as (port, paths):
        done = subprocess.run(
            [sys.executable, *command[1:]], env={**os.environ, "OCTAVO_PORT": str(port)}, capture_output=True
        )
    assert (done.returncode == 0) == healthy
    assert paths == ["/health"]


def unit(section: str) -> dict[str, str]:
    """Settings of a section of the systemd unit."""
    body = UNIT.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    return dict(line.split("=", 1) for line in body.splitlines() if line and not line.startswith("#"))


def test_the_unit_lets_the_server_drain_its_engine() -> None:
    service = unit("Service")
    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed"  # the server ends its engine itself
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["Restart"] == "on-failure"


def test_the_unit_reads_the_variables_beside_it_and_passes_no_flags() -> None:
    service = unit("Service")
    assert service["EnvironmentFile"] == "/etc/octavo/octavo.env"
    assert service["ExecStart"].split()[1:] == ["serve"]


def test_folders_of_the_variables_are_those_that_the_unit_makes() -> None:
    service = unit("Service")
    made = [f"/var/lib/{service['StateDirectory']}", f"/var/cache/{service['CacheDirectory']}"]
    made += [f"/run/{service['RuntimeDirectory']}", "/etc/octavo"]
    paths = re.findall(r"^(?:# )?[A-Z_]+=(/.*)$", (UNIT.parent / "octavo.env").read_text(), re.MULTILINE)
    assert len(paths) > 5
    assert [path for path in paths if not path.startswith(tuple(made))] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/octavo/bin/octavo", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert UNIT.name not in done.stderr  # it may complain of other units of the machine


def directives() -> dict[str, list[str]]:
    """Every directive of the nginx example, with what it is given each time."""
    found: dict[str, list[str]] = {}
    for line in NGINX.read_text().splitlines():
        if match := re.fullmatch(r"\s*(\w+)\s+([^#;{]*);.*", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def test_nginx_takes_bodies_as_large_as_the_server_does() -> None:
    assert directives()["client_max_body_size"] == [f"{ServerOptions().max_body_bytes // 2**20}m"]


def test_nginx_streams_over_connections_that_stay_open() -> None:
    found = directives()
    assert found["proxy_buffering"] == ["off"]
    assert found["proxy_http_version"] == ["1.1"]
    assert 'Connection ""' in found["proxy_set_header"]
    assert "X-Request-Id $octavo_request_id" in found["proxy_set_header"]
    assert found["keepalive_timeout"] == ["60s"]
    assert KEEP_ALIVE_S > 60  # nginx closes first: no request meets a closing connection
    assert int(found["proxy_read_timeout"][0].removesuffix("s")) > ServerOptions().sse_keep_alive_interval


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
@pytest.mark.parametrize("upstream", ["127.0.0.1:8000", "unix:/run/octavo/octavo.sock"])
def test_nginx_understands_its_configuration(tmp_path: Path, upstream: str) -> None:
    example = NGINX.read_text().replace("server 127.0.0.1:8000;", f"server {upstream};")
    (tmp_path / "octavo.conf").write_text(example.replace("/var/log/nginx", str(tmp_path)))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} http {{ include {tmp_path}/octavo.conf; }}"
    )
    done = subprocess.run(["nginx", "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[warn]" not in done.stderr
