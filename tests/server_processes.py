"""Server processes, and the fixtures that start them, which tests/e2e, tests/soak and tests/browser share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariants import Invariants

HERE = Path(__file__).parent
OCTAVO = str(Path(sys.executable).with_name("octavo"))
START_S = 180.0
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class ServerProcess:
    """A server in a process of its own. `ready` is the line it printed when it began to serve."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=ENVIRONMENT)
        assert self.process.stdout is not None
        # A start that hangs must not hang the tests: without its process the pipe ends.
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        self.ready = self.process.stdout.readline()
        watchdog.cancel()
        assert self.ready, f"the server did not start:\n{log.read_text()}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, timeout: float) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class ScriptedServer(ServerProcess):
    """See scripted_server.py."""

    def __init__(self, log: Path, *, options: dict[str, Any], engine: dict[str, Any]) -> None:
        super().__init__(
            [sys.executable, str(HERE / "scripted_server.py"), json.dumps(options), json.dumps(engine)], log
        )
        ready = json.loads(self.ready)
        self.url: str = ready["url"]
        self.engine_pid: int = ready["engine"]
        self.grpc_address: str | None = ready["grpc"]


@pytest.fixture
def scripted_server(
    request: pytest.FixtureRequest, tmp_path: Path, invariants: Invariants
) -> Iterator[Callable[..., ScriptedServer]]:
    """Start servers over a scripted engine: `scripted_server(delay=0.01, shutdown_timeout=1)`. After a case, those that
    live are asked for the invariants."""
    servers: list[ScriptedServer] = []

    def start(
        *, delay: float = 0.005, max_num_seqs: int = 64, num_blocks: int = 4096, **options: Any
    ) -> ScriptedServer:
        engine = {"delay": delay, "max_num_seqs": max_num_seqs, "num_blocks": num_blocks}
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(ScriptedServer(log, options={"port": 0} | options, engine=engine))
        return servers[-1]

    yield start
    for server in servers:
        if request.node.name.startswith("test_case_"):
            if server.process.poll() is None:
                invariants.url(server.url)
            invariants.asserted = True  # of one that has ended only that it has: by the test itself
        server.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from octavo.testing.tiny import make_model

    folder: Path = make_model(tmp_path_factory.mktemp("model") / "tiny", "llama")
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`octavo serve` of a tiny random model: all of it real."""
    flags = ["--port", "0", "--served-model-name", "tiny", "--platform", "cpu", "--dtype", "float32"]
    flags += ["--max-num-seqs", "32", "--num-kv-blocks", "512", "--threads", "1", "--api-key", "sesame"]
    command = [OCTAVO, "serve", str(tiny_model), *flags]
    server = ServerProcess(command, tmp_path_factory.mktemp("log") / "server.log")
    server.url = server.ready.split("/v1")[0].rpartition(" ")[2]  # type: ignore[attr-defined]
    yield server
    server.stop()


@pytest.fixture(scope="session")
def octavo_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """Start `octavo serve` with these arguments; `url` is where it listens."""
    servers: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        log = tmp_path_factory.mktemp("log") / "server.log"
        servers.append(ServerProcess([OCTAVO, "serve", *arguments], log))
        servers[-1].url = servers[-1].ready.split("/v1")[0].rpartition(" ")[2]  # type: ignore[attr-defined]
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def roomy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As `tiny_server`, with a context that tools and earlier turns fit into."""
    from octavo.testing.tiny import make_model

    folder = make_model(tmp_path_factory.mktemp("model") / "roomy", "llama", max_position_embeddings=2048)
    flags = ["--port", "0", "--served-model-name", "tiny", "--platform", "cpu", "--dtype", "float32"]
    flags += ["--max-num-seqs", "8", "--num-kv-blocks", "512", "--threads", "1", "--api-key", "sesame"]
    server = ServerProcess([OCTAVO, "serve", str(folder), *flags], tmp_path_factory.mktemp("log") / "server.log")
    server.url = server.ready.split("/v1")[0].rpartition(" ")[2]  # type: ignore[attr-defined]
    yield server
    server.stop()


def metric(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"octavo:{name}{{")]
    assert values, f"no metric {name}"
    return sum(values)


@pytest.fixture
def read_metric() -> Callable[..., float]:
    """`read_metric(url, name, key="")`: ask the server for a metric."""

    def read(url: str, name: str, key: str = "") -> float:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return metric(httpx.get(f"{url}/metrics", headers=headers, timeout=30).text, name)

    return read
