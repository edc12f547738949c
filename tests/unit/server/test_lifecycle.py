"""Deciding about restarts, and addresses; the rest of the life cycle is tested end to end."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from octavo.config import EngineConfig, ModelConfig
from octavo.errors import ConfigError, ModelNotFoundError
from octavo.server import lifecycle
from octavo.server.lifecycle import MAX_DEATHS, bind, check_socket_path, url, watch_engine
from octavo.server.options import ServerOptions


class DeadClient:
    """An engine that is dead on arrival."""

    is_alive = False
    error = "it is dead"

    async def shutdown(self) -> None:
        self.is_shut_down = True


def dead_server(*, restart: bool) -> tuple[SimpleNamespace, SimpleNamespace]:
    service = SimpleNamespace(client=DeadClient(), options=ServerOptions(restart_engine=restart), draining=False)
    return service, SimpleNamespace(engine_lost=False, should_exit=False, tell_helpers=lambda word: None)


@pytest.fixture
def starts(monkeypatch) -> list[EngineConfig]:
    """The engines started, all of which die at once."""
    started: list[EngineConfig] = []

    async def start_engine(config, *, build):
        started.append(config)

    async def connect(handle):
        return DeadClient()

    monkeypatch.setattr(lifecycle, "start_engine", start_engine)
    monkeypatch.setattr(lifecycle.EngineClient, "connect", connect)
    return started


@pytest.mark.anyio
@pytest.mark.parametrize("restart", [False, True])
async def test_an_engine_that_keeps_dying_is_given_up(starts, restart):
    service, server = dead_server(restart=restart)
    first = service.client
    await watch_engine(service, server, EngineConfig(), None)
    assert len(starts) == (MAX_DEATHS - 1 if restart else 0)
    assert (server.engine_lost, server.should_exit) == (True, True)
    assert hasattr(first, "is_shut_down") == restart


@pytest.mark.anyio
async def test_an_engine_that_cannot_start_again_ends_the_server(monkeypatch):
    async def start_engine(config, *, build):
        raise ModelNotFoundError("the model is gone")

    monkeypatch.setattr(lifecycle, "start_engine", start_engine)
    service, server = dead_server(restart=True)
    await watch_engine(service, server, EngineConfig(), None)
    assert server.engine_lost


@pytest.mark.anyio
async def test_an_engine_that_ends_while_draining_is_no_loss(starts):
    service, server = dead_server(restart=True)
    service.draining = True
    await watch_engine(service, server, EngineConfig(), None)
    assert not server.engine_lost
    assert starts == []


def test_a_port_in_use_is_told_with_the_flags_to_change():
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
def test_the_url_is_one_that_works_on_this_machine(host, shown):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert url(ServerOptions(host=host), [bound]) == f"http://{shown}:{port}"


def test_a_socket_path_that_cannot_work_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing" / "s", tmp_path / ("x" * 120)):
        with pytest.raises(ConfigError, match="--uds"):
            check_socket_path(path)
    check_socket_path(tmp_path / "s")


@pytest.mark.anyio
async def test_a_wrong_file_of_keys_is_told_before_the_model_is_loaded(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: 5}")
    no_model = EngineConfig(model=ModelConfig(model=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match=r"--api-keys-file .*key"):
        await lifecycle.serve(no_model, ServerOptions(port=0, api_keys_file=str(file)))
    with pytest.raises(ConfigError, match=r"^--api-key: .*twice"):
        await lifecycle.serve(no_model, ServerOptions(port=0, api_keys=("a", "a")))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["shutdown_timeout", "sse_keep_alive_interval", "response_store_max_age"])
def test_seconds_that_never_end_are_refused_by_their_flag(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be a finite"):
        ServerOptions(**{name: value})
