"""The life of a server process: drain, abort, death of the engine, restart. Real processes, scripted engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

OCTAVO = str(Path(sys.executable).with_name("octavo"))
BODY = {"prompt": [40], "max_tokens": 200, "stream": True}


def wait_until(condition, timeout: float = 20.0) -> None:
    """Poll until true; a server that is just ending refuses connections, which counts as false."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def open_stream(client: httpx.Client, url: str, body=BODY) -> tuple[httpx.Response, Iterator[str]]:
    """A running stream, past its first event."""
    request = client.build_request("POST", f"{url}/v1/completions", json=body, timeout=30)
    response = client.send(request, stream=True)
    lines = (line for line in response.iter_lines() if line)
    assert next(lines).startswith("data: ")
    return response, lines


def test_after_sigterm_running_streams_finish_and_nothing_new_comes_in(scripted_server):
    server = scripted_server(delay=0.01, shutdown_timeout=30)
    with httpx.Client() as client:
        _, lines = open_stream(client, server.url)
        os.kill(server.pid, signal.SIGTERM)

        def is_closed() -> bool:
            try:
                return httpx.get(f"{server.url}/health").status_code == 503
            except httpx.ConnectError:
                return True

        wait_until(is_closed)
        events = list(lines)
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert server.wait(10) == 0


def test_what_does_not_finish_within_the_timeout_is_aborted(scripted_server):
    server = scripted_server(delay=0.02, shutdown_timeout=0.5)
    with httpx.Client() as client:
        _, lines = open_stream(client, server.url, BODY | {"max_tokens": 4000})
        os.kill(server.pid, signal.SIGTERM)
        events = list(lines)
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in events[-2]
    assert server.wait(15) == 0


def test_case_D7_ctrl_c_ends_a_busy_server_at_once(scripted_server):
    server = scripted_server(delay=0.02, shutdown_timeout=60)
    with httpx.Client() as client:
        streams = [open_stream(client, server.url, BODY | {"max_tokens": 4000}) for _ in range(4)]
        started = time.monotonic()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(15) == 0
        assert time.monotonic() - started < 5
        for response, lines in streams:
            assert list(lines)[-1] == "data: [DONE]"
            response.close()


def test_a_second_sigterm_hurries(scripted_server):
    server = scripted_server(delay=0.02, shutdown_timeout=60)
    with httpx.Client() as client:
        _, lines = open_stream(client, server.url, BODY | {"max_tokens": 4000})
        os.kill(server.pid, signal.SIGTERM)
        next(lines)
        os.kill(server.pid, signal.SIGTERM)
        assert list(lines)[-1] == "data: [DONE]"
    assert server.wait(10) == 0


def test_case_G7_a_dead_engine_fails_its_requests_and_ends_the_server(scripted_server):
    server = scripted_server(delay=0.02)
    with httpx.Client() as client:
        _, lines = open_stream(client, server.url, BODY | {"max_tokens": 4000})
        os.kill(server.engine_pid, signal.SIGKILL)
        events = list(lines)
    assert '"code":"engine_dead"' in events[-1]
    assert server.wait(15) == 1
    assert "killed by signal 9" in server.log.read_text()


def test_a_dead_engine_is_restarted_if_asked_for(scripted_server):
    server = scripted_server(delay=0.001, restart_engine=True)
    body = {"prompt": [40], "max_tokens": 3}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.json()["choices"][0]["token_ids"] == [40, 40, 40]
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(15) == 0


def test_case_G1_closing_the_connection_aborts_the_request(scripted_server, read_metric):
    server = scripted_server(delay=0.005)
    for stream in (True, False):
        aborted = read_metric(server.url, "aborts_total")
        body = BODY | {"max_tokens": 4000, "stream": stream}
        with httpx.Client() as client:
            if stream:
                response, lines = open_stream(client, server.url, body)
                next(lines)
                response.close()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
        wait_until(lambda aborted=aborted: read_metric(server.url, "aborts_total") == aborted + 1, 5)
        wait_until(lambda: read_metric(server.url, "num_requests_running") == 0, 5)
        assert read_metric(server.url, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_a_signal_during_the_start_leaves_no_process_and_no_folder(tmp_path, number, code):
    environment = os.environ | {"TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [OCTAVO, "serve", "--port", "0", "--platform", "cpu"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("octavo-*")), 60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: children.read_text(), 60)
    started = children.read_text().split()
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == b""
    assert list(tmp_path.glob("octavo-*")) == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_a_unix_socket_serves_as_well(scripted_server, tmp_path):
    path = str(tmp_path / "s")
    server = scripted_server(uds=path)
    assert server.url == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        assert client.get("http://octavo/health").status_code == 200
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    assert Path(path).is_socket()
    scripted_server(uds=path)
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        assert client.get("http://octavo/health").status_code == 200


def test_the_engine_does_not_outlive_a_killed_server(scripted_server):
    server = scripted_server()
    os.kill(server.pid, signal.SIGKILL)

    def is_gone() -> bool:
        try:
            with open(f"/proc/{server.engine_pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(is_gone)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["--platform", "nonesuch"], "nonesuch"),
        (["--api-key", ""], "--api-key"),
        (["--port", "{port}"], "choose another --host or --port"),
        (["--host", "256.1.1.1"], "choose another --host or --port"),
        (["--uds", "/no/such/folder/s"], "--uds /no/such/folder/s"),
        (["--uds", "/etc/passwd"], "--uds /etc/passwd"),
    ],
)
def test_a_start_that_cannot_work_ends_with_one_line(flags, said):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ["--port", "0", *(flag.format(port=taken.getsockname()[1]) for flag in flags)]
        result = subprocess.run(
            [OCTAVO, "serve", "--log-level", "error", *flags],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
