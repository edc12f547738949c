"""The rules of docs/architecture.md, as far as a machine can check them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "octavo"
PLUGINS = sorted((ROOT / "plugins").glob("*/src/octavo_*"))
MAX_LINES = 400

VENDOR = re.compile(
    r"torch\.(cuda|xpu|npu|hpu|mps|mtia)\b|torch_xla|torch_tpu|\bis_(cuda|rocm|xpu|tpu|cpu)\b"
    r"|\b(cuda|nvidia|[abh][12]00|amd|rocm|hip|radeon|cdna|gfx\d+\w*|intel|xpu|tpu|habana|ascend|npu)\b"
    # Their libraries, instruction sets and compilers.
    r"|\b(cublas\w*|cudnn|cutlass|ptx\w*|nvml|flashinfer|hopper|blackwell|ampere|hipblas\w*|rocblas|miopen|aiter|mfma|wmma"
    r"|sycl|opencl|spir-?v|onednn|mkl|ipex|dpas|amx|avx\w*|pallas|libtpu|xla|pjrt|stablehlo|[nrxh]ccl|oneccl)\b",
    re.IGNORECASE,
)
PLATFORM_NAME = re.compile(
    r"""[!=]=\s*["'](cpu|cuda|rocm|xpu|tpu)["']|\bin\s*[\(\[{]\s*["'](cpu|cuda|rocm|xpu|tpu)["']"""
)
OPEN_DOOR = ("octavo.plugin", "octavo.triton", "octavo.testing")


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            yield node.lineno, node.module or ""


def where(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text.strip()}"


def test_core_names_no_vendor() -> None:
    found = [
        where(path, number, line)
        for path in python_files(CORE)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if VENDOR.search(line) or PLATFORM_NAME.search(line)
    ]
    assert not found, "core branches on capabilities, never on a vendor:\n" + "\n".join(found)


def test_core_never_imports_a_plugin() -> None:
    found = [where(p, n, m) for p in python_files(CORE) for n, m in imports(p) if re.match(r"octavo_\w+", m)]
    assert not found, "\n".join(found)


def test_triton_is_imported_only_under_octavo_triton() -> None:
    found = [
        where(path, number, module)
        for path in python_files(CORE)
        if "triton" not in path.relative_to(CORE).parts
        for number, module in imports(path)
        if module.split(".")[0] == "triton"
    ]
    assert not found, "\n".join(found)


def test_plugins_import_only_the_public_door() -> None:
    assert PLUGINS, "no plugin found"
    found = [
        where(path, number, module)
        for path in python_files(*PLUGINS)
        for number, module in imports(path)
        if module.split(".")[0] == "octavo" and not module.startswith(OPEN_DOOR)
    ]
    assert not found, "\n".join(found)


def test_examples_import_only_the_public_door() -> None:
    files = [path for path in python_files(ROOT / "docs" / "examples") if path.parent != ROOT / "docs" / "examples"]
    assert files, "no example found"
    found = [
        where(path, number, module)
        for path in files
        for number, module in imports(path)
        if module.split(".")[0] == "octavo" and not re.match(r"octavo\.(plugin|testing)(\.|$)", module)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ["engine", "plugin"])
def test_package_loads_no_torch(package: str) -> None:
    modules = [
        "octavo." + ".".join(path.relative_to(CORE).with_suffix("").parts)
        for path in python_files(CORE / package)
        if path.name != "__init__.py" and path not in (CORE / "plugin" / "torch.py", CORE / "plugin" / "models.py")
    ]
    assert modules
    assert loaded_after(*modules).isdisjoint({"torch", "transformers", "triton"})


def test_importing_octavo_and_its_params_loads_no_torch() -> None:
    loaded = loaded_after("octavo", "octavo.config", "octavo.sampling.params", "octavo.discovery", "octavo.cli")
    assert loaded.isdisjoint({"torch", "transformers", "fastapi"})


def test_importing_a_plugin_loads_neither_torch_nor_a_sdk() -> None:
    for plugin in PLUGINS:
        # By path: the packages of some platforms exclude those of others, so that not all are installed here.
        loaded = loaded_after(plugin.name, path=plugin.parent)
        assert loaded.isdisjoint({"torch", "triton", "numpy.f2py", "jax", "torch_tpu", "torch_xla"})


def loaded_after(*modules: str, path: Path = CORE.parent) -> set[str]:
    """Top-level modules present after importing `modules` in a fresh interpreter."""
    code = f"import sys, {', '.join(modules)}; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    env = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_no_file_is_longer_than_one_can_hold_in_mind() -> None:
    files = python_files(ROOT / "core", ROOT / "plugins", ROOT / "tests", ROOT / "benchmarks", ROOT / "docs")
    long = [f"{p.relative_to(ROOT)}: {n} lines" for p in files if (n := len(p.read_text().splitlines())) > MAX_LINES]
    assert not long, f"split these by idea (limit {MAX_LINES}):\n" + "\n".join(long)


def test_there_is_no_drawer_for_everything() -> None:
    bad = [p for p in python_files(CORE, *PLUGINS) if p.stem in {"utils", "util", "helpers", "common", "misc", "base"}]
    assert not bad, f"name files after what is in them: {bad}"


def test_every_public_class_and_function_of_the_door_has_a_docstring() -> None:
    missing = []
    for path in python_files(CORE / "plugin"):
        for node in ast.parse(path.read_text()).body:
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                missing.append(where(path, node.lineno, node.name))
    assert not missing, "\n".join(missing)
