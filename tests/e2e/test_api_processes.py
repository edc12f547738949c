"""Several API processes over one engine: one port, one set of metrics, one life. Real processes, scripted engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import httpx
import psutil
import pytest

COUNT = 3
BODY = {"prompt": [40], "max_tokens": 3}


def helpers(server) -> list[psutil.Process]:
    """The API processes beside the first."""
    children = psutil.Process(server.pid).children()
    return [child for child in children if child.pid != server.engine_pid and "spawn_main" in " ".join(child.cmdline())]


def connections(url: str, wanted: int, path: str = "/health") -> None:
    """Ask over that many new connections."""
    for _ in range(wanted):
        assert httpx.get(f"{url}{path}").status_code == 200


@contextlib.contextmanager
def streams(url: str, count: int, **extra):
    """Streams that run at the same time, each past its first event; gives the lists of their events."""
    events: list[list[str]] = [[] for _ in range(count)]
    started = [threading.Event() for _ in range(count)]

    def read(index: int) -> None:
        body = BODY | {"max_tokens": 300, "stream": True} | extra
        with httpx.Client() as client, client.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as got:
            for line in got.iter_lines():
                if line:
                    events[index].append(line)
                    started[index].set()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    assert all(event.wait(20) for event in started)
    yield events
    for thread in threads:
        thread.join(60)


def test_all_processes_serve_and_metrics_tell_of_all(scripted_server, read_metric):
    server = scripted_server(api_server_count=COUNT, delay=0.001)
    assert len(helpers(server)) == COUNT - 1
    for _ in range(12):
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
        assert answer["choices"][0]["token_ids"] == [40, 40, 40]
    connections(server.url, 20)
    # Whichever process is asked: it tells of the requests of all.
    for _ in range(6):
        assert read_metric(server.url, "request_success_total") == 12
        assert read_metric(server.url, "generation_tokens_total") == 36
        assert read_metric(server.url, "request_generation_tokens_count") == 12
    busy = [child for child in helpers(server) if sum(child.cpu_times()[:2]) > 0]
    assert busy
    with streams(server.url, 6):
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 6}


def test_after_sigterm_streams_of_all_processes_finish(scripted_server):
    server = scripted_server(api_server_count=COUNT, delay=0.005)
    children = helpers(server)
    with streams(server.url, 9) as events:
        os.kill(server.pid, signal.SIGTERM)
    assert all(lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] for lines in events)
    assert server.wait(30) == 0
    assert not any(child.is_running() for child in children)


def test_a_second_signal_hurries_all_processes(scripted_server):
    server = scripted_server(api_server_count=COUNT, delay=0.02, shutdown_timeout=60)
    with streams(server.url, 6, max_tokens=4000) as events:
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGTERM)
    assert all('"finish_reason":"abort"' in lines[-2] for lines in events)
    assert server.wait(30) == 0


def test_a_process_that_dies_takes_the_server_with_it_and_is_named(scripted_server):
    server = scripted_server(api_server_count=COUNT)
    children = helpers(server)
    children[0].kill()
    assert server.wait(40) == 1
    assert "octavo-api-" in server.log.read_text()
    assert "has ended by itself" in server.log.read_text()
    assert not any(child.is_running() for child in children)


def test_a_dead_engine_fails_the_requests_of_all_processes(scripted_server):
    server = scripted_server(api_server_count=COUNT, delay=0.02)
    with streams(server.url, 6, max_tokens=4000) as events:
        os.kill(server.engine_pid, signal.SIGKILL)
    assert all('"code":"engine_dead"' in lines[-1] for lines in events)
    assert server.wait(40) == 1


@pytest.mark.parametrize("options", [{"uds": "/tmp/s"}, {"restart_engine": True}])
def test_what_does_not_go_together_is_refused(options):
    from octavo.errors import ConfigError
    from octavo.server.options import ServerOptions

    with pytest.raises(ConfigError, match="api-server-count"):
        ServerOptions(api_server_count=2, **options)
