"""A platform of somebody else: the one-file example of docs/examples serves, and its faults are named, never hidden.

Nothing is built: the example is found through OCTAVO_EXTRA_PLATFORMS, or as an installed distribution would be, through
its metadata on the import path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.weights.demo import demo_model

openai = pytest.importorskip("openai")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "acme"
OCTAVO = str(Path(sys.executable).with_name("octavo"))
START_S = 180.0
SMALL = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", "64M", "--served-model-name", "served")

METADATA = "Metadata-Version: 2.1\nName: octavo-acme\nVersion: 0.1\n"
ENTRY_POINTS = "[octavo.platforms]\nacme = acme_plugin\n"


@dataclass(frozen=True)
class Site:
    """A folder on the import path with a copy of the example in it, perhaps changed."""

    folder: Path

    def change(self, old: str, new: str) -> None:
        path = self.folder / "acme_plugin.py"
        source = path.read_text()
        assert old in source, "the example has changed: so must this test"
        path.write_text(source.replace(old, new))

    def install(self) -> None:
        """Make it a distribution, as pip would: by metadata beside the modules."""
        info = self.folder / "octavo_acme-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(ENTRY_POINTS)

    def environment(self, *, extra: bool = True) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(self.folder),
            "ACME_DEVICE": "/dev/null",
            "OCTAVO_EXTRA_PLATFORMS": "acme=acme_plugin" if extra else "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")} | own


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("acme_plugin.py", "acme_kernels.py"):
        (folder / name).write_text((EXAMPLE / name).read_text())
    return Site(folder)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`serve(environment, *flags)` starts `octavo serve` and gives the line that says it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(environment: dict[str, str], *flags: str) -> str:
        log = tmp_path / "server.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [OCTAVO, "serve", "--port", "0", *SMALL, *flags],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        processes.append(process)
        assert process.stdout is not None
        # A start that hangs must not hang the test: without its process the pipe ends.
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        ready = process.stdout.readline()
        watchdog.cancel()
        assert ready, f"the server did not start:\n{log.read_text()}"
        return ready

    yield start
    for process in processes:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()


def url_in(ready: str) -> str:
    return ready.split("/v1")[0].rpartition(" ")[2] + "/v1"


def test_a_foreign_platform_serves_a_model_it_knows_nothing_of(
    site: Site, serve: Callable[..., str], tiny_model: Path
) -> None:
    site.install()
    ready = serve(site.environment(extra=False), str(tiny_model), "--platform", "acme")
    assert "platform acme, float32" in ready
    with openai.OpenAI(base_url=url_in(ready), api_key="none", max_retries=0) as client:
        ask = {"model": "served", "prompt": "How many pages", "max_tokens": 8, "temperature": 0.0}
        answer = client.completions.create(**ask)
        again = client.completions.create(**ask)
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].text == again.choices[0].text


MAKE_DEVICE = 'return TorchDevice("cpu", local_rank, memory=lambda: MemInfo(total=MEMORY, free=MEMORY))'
FAULTS = {
    "import": ("import os\n", "import os\nimport acme_sdk\n", ["ModuleNotFoundError", "acme_sdk"]),
    "no_device_hook": ("@hookimpl\ndef make_device", "def make_device", ["lacks the mandatory hook make_device"]),
    "newer_api": ('api="1.0"', 'api="7.0"', ["plugin API 7.0", "1.0"]),
    "device_raises": (
        MAKE_DEVICE,
        'raise OSError("libacme.so: wrong driver")',
        ["make_device raised OSError", "libacme.so: wrong driver"],
    ),
    "wrong_type": ("return PlatformCaps(", "return dict(", ["platform_caps must return PlatformCaps, not dict"]),
}
"""Fault -> what is replaced in the example, by what, and what the error must say of it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_plugin_is_named_and_ends_the_start(site: Site, tiny_model: Path, fault: str) -> None:
    old, new, said = FAULTS[fault]
    site.change(old, new)
    done = start_in_vain(site.environment(), str(tiny_model), "--platform", "acme")
    for words in ("'acme'", "acme_plugin", *said):
        assert words in done.stderr


@pytest.mark.parametrize("fault", ["import", pytest.param("device_raises", marks=pytest.mark.slow)])
def test_nothing_falls_back_to_another_platform_when_none_is_asked_for(
    site: Site, tiny_model: Path, fault: str
) -> None:
    old, new, said = FAULTS[fault]
    site.change(old, new)
    site.install()
    done = start_in_vain(site.environment(extra=False), str(tiny_model))
    for words in ("acme", "octavo-acme 0.1", *said):
        assert words in done.stderr


def start_in_vain(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail: with status 1, one line on stderr, and nothing served."""
    command = [OCTAVO, "serve", "--port", "0", "--log-level", "error", *SMALL, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    return done


@pytest.mark.slow
@pytest.mark.real_model
def test_the_packaged_model_answers_on_a_foreign_platform(site: Site, serve: Callable[..., str]) -> None:
    demo_model()
    ready = serve(site.environment(), "--platform", "acme", "--max-model-len", "256")
    assert "platform acme" in ready
    with openai.OpenAI(base_url=url_in(ready), api_key="none", max_retries=0, timeout=240) as client:
        answer = client.chat.completions.create(
            model="served",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=12,
            temperature=0.0,
        )
    assert "Paris" in answer.choices[0].message.content
