"""The examples as strangers would ship them: built as wheels, installed into an empty environment, checked by the kit.

Then each is broken in the ways in which plugins break, and what the kit or the command says must name it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from installed_examples import EXAMPLES, ROOT, modules_of

from octavo.testing.tiny import make_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1500)]

DIST = ROOT / "dist"
NAMES = ("acme", "acme-full", "kernel-pack", "extension")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with Octavo, its CPU platform, and the wheels of all examples. model: a tiny llama."""

    bin: Path
    model: Path

    @property
    def site(self) -> Path:
        [site] = self.bin.parent.glob("lib/python3*/site-packages")
        return site

    def octavo(self, *arguments: str, shadow: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command. shadow: a folder whose modules come before the installed ones."""
        own = {"ACME_DEVICE": os.devnull, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "PYTHON"))}
        path = {} if shadow is None else {"PYTHONPATH": str(shadow)}
        return subprocess.run(
            [self.bin / "octavo", *arguments],
            env=kept | own | path,
            cwd=self.bin,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def check(self, platform: str, *, tier: str = "", config: Path | None = None, shadow: Path | None = None) -> Any:
        """The conformance report of a platform."""
        arguments = ["plugin", "check", platform, "--json", *(["--tier", tier] if tier else [])]
        arguments += ["--config", str(config)] if config else []
        done = self.octavo(*arguments, shadow=shadow)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert done.returncode == (1 if report["failures"] else 0)
        return report


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    assert list(DIST.glob("octavo-*.whl")), "run `make dist` first"
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    # Twice quiet: of a failure, only its errors are shown.
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check"]
    examples = [EXAMPLES / name for name in NAMES]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder / "wheels", *examples], check=True)
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert len(wheels) == len(NAMES)
    constraints = ROOT / ".ci" / "constraints.txt"
    # Most modules of what is installed are never imported: compiling all takes longer than importing some.
    install = [*pip, "install", "--no-compile", "--find-links", DIST, "--constraint", constraints]
    subprocess.run([*install, "octavo[cpu,test]", *wheels], check=True, timeout=1400)
    yield Environment(python.parent, make_model(folder / "model", tokenizer=False))
    shutil.rmtree(folder / "env")


def test_all_are_found(environment: Environment) -> None:
    listing = json.loads(environment.octavo("plugin", "list", "--json").stdout)
    found = {entry["name"]: (entry["dist"], entry["state"]) for entry in listing}
    assert found["acme"] == ("octavo-acme", "ready")
    assert found["acme_full"] == ("octavo-acme-full", "ready")
    assert found["cpu"] == ("octavo-cpu", "ready")


@pytest.mark.parametrize(
    ("platform", "tier", "level", "native"),
    [
        # All attention that it has is the pack's.
        ("acme", "0,1,3,6", "bronze", []),
        ("acme_full", "", "silver", ["attention", "linear"]),
        # The whole kit is run on it elsewhere; what is new here is the pack's attention.
        ("cpu", "3", "not judged (it takes tiers 0, 1, 6 at least)", ["attention"]),
    ],
)
def test_the_kit_passes_with_the_pack_and_the_extension_installed(
    environment: Environment, platform: str, tier: str, level: str, native: list[str]
) -> None:
    example = EXAMPLES / platform.replace("_", "-")
    config = example if example.exists() else ROOT / "plugins" / platform
    report = environment.check(platform, tier=tier, config=config / "conformance.toml")
    assert report["failures"] == {}
    assert report["level"] == level
    assert report["native"] == native
    its = {"attention-sdpa": {"pack": "sdpa", "proved": True}}
    assert {name: of for name, of in report["classes"].items() if of["pack"]} == (
        {} if platform == "acme_full" else its
    )


@dataclass(frozen=True)
class Fault:
    """A change of one file of an example, what shows it, and what that must say.

    file: in site-packages. shows: a platform and a tier of the kit, or () for a start that asks for the example.
    """

    file: str
    old: str
    new: str
    shows: tuple[str, ...]
    said: tuple[str, ...]


KERNELS_HOOK = "@hookimpl\ndef register_kernels(registry: KernelRegistry) -> None:\n"
EXTENSIONS_HOOK = "@hookimpl\ndef register_extensions(registry: ExtensionRegistry) -> None:\n"
PATCH = "    import octavo.sampling.params as p\n    p.SamplingParams.check_vocab = lambda self, vocab_size: None\n"
PATCHED = ("test_nothing_outside_the_plugin_is_patched", "SamplingParams.check_vocab")
FULL = "octavo_acme_full/__init__.py"

FAULTS = {
    "acme: another API": Fault(
        "acme_plugin.py", 'api="1.0"', 'api="9.0"', ("acme", "1"), ("octavo-acme 0.1", "plugin API 9.0")
    ),
    "acme: no SDK": Fault(
        "acme_plugin.py", "import os\n", "import os\nimport acme_sdk\n", ("acme", "1"), ("octavo-acme 0.1", "acme_sdk")
    ),
    "acme: patches core": Fault("acme_plugin.py", KERNELS_HOOK, KERNELS_HOOK + PATCH, ("acme", "0"), PATCHED),
    "acme: claims capture": Fault(
        "acme_plugin.py",
        'default_dtype="float32"',
        'default_dtype="float32", graph="capture"',
        ("acme", "1"),
        ("test_capture_is_offered_exactly_if_claimed",),
    ),
    "acme: wrong kernel": Fault(
        "acme_kernels.py", "* up.float()", "* up.float() * 1.05", ("acme", "2"), ("[act_and_mul-acme-float32]",)
    ),
    "acme_full: another API": Fault(
        FULL, 'api="1.0"', 'api="9.0"', ("acme_full", "1"), ("octavo-acme-full 0.1", "plugin API 9.0")
    ),
    "acme_full: no library": Fault(
        "octavo_acme_full/kernels/library.py",
        'with_name("acme.so")',
        'with_name("missing.so")',
        ("acme_full", "2"),
        ("octavo-acme-full 0.1", "register_kernels raised OSError", "missing.so"),
    ),
    "acme_full: patches core": Fault(FULL, KERNELS_HOOK, KERNELS_HOOK + PATCH, ("acme_full", "0"), PATCHED),
    "acme_full: claims a dtype": Fault(
        FULL,
        'dtypes=("float32",)',
        'dtypes=("float32", "int4")',
        ("acme_full", "1"),
        ("test_every_claimed_dtype_computes[int4]",),
    ),
    "acme_full: wrong attention": Fault(
        "octavo_acme_full/kernels/acme.c",
        "last - a->window + 1 : 0",
        "last - a->window : 0",
        ("acme_full", "3"),
        ("attention-acme", "window"),
    ),
    "acme_full: wrong product": Fault(
        "octavo_acme_full/kernels/acme.c",
        "sum[i] + (bias ? bias[first + i] : 0)",
        "sum[i]",
        ("acme_full", "4"),
        ("test_a_linear_kernel_multiplies[linear-acme-float32]",),
    ),
    "kernel pack: another API": Fault(
        "octavo_sdpa.py", 'API = "1.0"', 'API = "9.0"', (), ("kernel pack 'sdpa' (octavo-sdpa 0.1)", "plugin API 9.0")
    ),
    "kernel pack: no SDK": Fault(
        "octavo_sdpa_attention.py",
        "import torch\n",
        "import torch\nimport sdpa_sdk\n",
        (),
        ("kernel pack 'sdpa' (octavo-sdpa 0.1)", "register_kernels raised ModuleNotFoundError", "sdpa_sdk"),
    ),
    "kernel pack: patches core": Fault("octavo_sdpa.py", KERNELS_HOOK, KERNELS_HOOK + PATCH, ("cpu", "0"), PATCHED),
    "kernel pack: takes what it cannot do": Fault(
        "octavo_sdpa_attention.py",
        "if spec.sinks or spec.softcap is not None:",
        "if spec.sinks:",
        ("acme", "3"),
        ("attention-sdpa", "softcap"),
    ),
    "kernel pack: wrong attention": Fault(
        "octavo_sdpa_attention.py", "position <= query", "position < query + 2", ("acme", "3"), ("attention-sdpa",)
    ),
    "extension: another API": Fault(
        "octavo_seed.py", 'API = "1.0"', 'API = "9.0"', (), ("extension 'seed' (octavo-seed 0.1)", "plugin API 9.0")
    ),
    "extension: no SDK": Fault(
        "octavo_seed.py",
        'API = "1.0"\n',
        'import seed_sdk\nAPI = "1.0"\n',
        (),
        ("'seed' (octavo-seed 0.1)", "seed_sdk"),
    ),
    "extension: patches core": Fault(
        "octavo_seed.py", EXTENSIONS_HOOK, EXTENSIONS_HOOK + PATCH, ("acme", "0"), PATCHED
    ),
    "extension: takes over a name": Fault(
        "octavo_seed.py", '"seed_oss"', '"llama"', (), ("'llama' is registered twice", "octavo_seed_model:SeedOss")
    ),
}


def broken(environment: Environment, fault: Fault, folder: Path) -> Path:
    """The folder, with a copy of the installed modules that the fault is in, and the fault."""
    owner = next(n for n in NAMES if Path(fault.file).parts[0].removesuffix(".py") in modules_of(EXAMPLES / n))
    for module in modules_of(EXAMPLES / owner):
        package = environment.site / module
        if package.is_dir():
            shutil.copytree(package, folder / module)
        else:
            shutil.copy(package.with_suffix(".py"), folder)
    path = folder / fault.file
    source = path.read_text()
    assert fault.old in source, "the example has changed: so must this test"
    path.write_text(source.replace(fault.old, fault.new))
    if path.suffix == ".c":
        subprocess.run([environment.bin / "python", path.with_name("build.py")], check=True)
    return folder


def said_of(environment: Environment, name: str, folder: Path) -> str:
    """What the kit, or a start, says of a fault."""
    fault = FAULTS[name]
    broken(environment, fault, folder)
    if fault.shows:
        platform, tier = fault.shows
        report = environment.check(platform, tier=tier, shadow=folder)
        assert report["failures"]
        return json.dumps(report["failures"])
    asked = ("--attention-backend", "sdpa") if name.startswith("kernel pack") else ()
    done = environment.octavo("explain", str(environment.model), "--platform", "cpu", *asked, shadow=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    return done.stderr


@pytest.fixture(scope="module")
def said(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[str]]]:
    """What is said of every fault; two at a time, as each is a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(said_of, environment, name, tmp_path_factory.mktemp("broken")) for name in FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_broken_is_caught_and_named(said: Mapping[str, Future[str]], name: str) -> None:
    found = said[name].result()
    for words in FAULTS[name].said:
        assert words in found


@pytest.mark.parametrize("name", ["kernel pack: another API", "kernel pack: no SDK"])
def test_a_broken_pack_that_nobody_asks_for_is_named_and_left_out(
    environment: Environment, tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    shadow = broken(environment, fault, tmp_path)
    done = environment.octavo("explain", str(environment.model), "--platform", "cpu", shadow=shadow)
    assert done.returncode == 0, done.stderr
    assert "attention" in done.stdout
    for words in ("left out", *fault.said):
        assert words in done.stderr
