"""The compiled library under sanitizers, in buffers of exactly the size that api.h promises to touch."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo_cpu import native
from octavo_cpu.kernels import build

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """(flags, objects) of the library, compiled once for each set of sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    level = "-O1" if request.param == "thread" else "-O0"  # what GCC adds for addresses takes it minutes to optimize
    flags = ["-std=c++17", level, "-g1", "-pthread", f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]

    def compiled(file: Path) -> str:
        out = str(folder / f"{file.stem}.o")
        command = ["g++", *flags, *build.QUIET, *build.OF_FILE.get(file.name, ()), "-c", str(file), "-o", out]
        subprocess.run(command, check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        return flags, list(pool.map(compiled, build.sources()))


@pytest.mark.parametrize("driver", ["products", "attention", "ops"])
def test_sanitizers_find_nothing(sanitized: tuple[list[str], list[str]], tmp_path: Path, driver: str) -> None:
    """Every kind of numbers, odd shapes and threads; races, which no instruction set has of its own, on one of them."""
    flags, objects = sanitized
    program = tmp_path / driver
    source = HERE / f"sanitized_{driver}.cpp"
    subprocess.run(["g++", *flags, f"-I{build.HERE}", str(source), *objects, "-o", str(program)], check=True)
    isas = [native.load().octavo_isa().decode()] if "-fsanitize=thread" in flags and not native.why_not() else []
    done = subprocess.run([program, *isas], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 0, "it says how much it ran"
