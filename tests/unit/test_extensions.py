"""Models and formats that are registered by name: built in, installed, or brought by a platform."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from octavo.errors import ConfigError, PlatformBrokenError, PlatformIncompatibleError
from octavo.extensions import Extensions, load_extensions, resolve
from octavo.plugin import hookimpl

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that an extension made of these functions is installed."""

    def put(**functions: Any) -> None:
        module: Any = types.ModuleType("extension_under_test")
        for name, function in functions.items():
            function.__name__ = name
            setattr(module, name, hookimpl(function))
        monkeypatch.setitem(sys.modules, "extension_under_test", module)
        entry = EntryPoint(name="extra", value="extension_under_test", group="octavo.extensions")
        monkeypatch.setattr(
            "octavo.active_platform.entry_points", lambda group: [entry] if group == entry.group else []
        )

    return put


def test_the_built_in_models_come_through_the_hook() -> None:
    models = load_extensions().models
    assert models["llama"] == "octavo.models.llama:Llama"
    assert all(":" in target for target in models.values())


def test_an_installed_extension_adds_its_model_and_format(install: Install) -> None:
    def register(registry: Any) -> None:
        registry.model("mamba9", "mamba9.octavo:Mamba")
        registry.quant_format("bits", "bits.octavo:Bits")

    install(register_extensions=register)
    registry = load_extensions()
    assert registry.models["mamba9"] == "mamba9.octavo:Mamba"
    assert registry.quant_formats["bits"] == "bits.octavo:Bits"
    assert "llama" in registry.models


def test_a_name_cannot_be_taken_over(install: Install) -> None:
    install(register_extensions=lambda registry: registry.model("llama", "fork.llama:Llama"))
    with pytest.raises(ConfigError, match=r"'llama' is registered twice: octavo\.models\.llama:Llama and fork"):
        load_extensions()


def test_an_extension_for_another_api_is_refused_by_name(install: Install) -> None:
    install(register_extensions=lambda registry: None)
    sys.modules["extension_under_test"].API = "9.0"  # type: ignore[attr-defined]
    with pytest.raises(PlatformIncompatibleError, match=r"extension 'extra'.*plugin API 9\.0"):
        load_extensions()


def test_a_target_must_name_module_and_class() -> None:
    with pytest.raises(ConfigError, match=r"must look like 'package\.module:Class'"):
        Extensions().model("x", "package.module.Class")


def test_an_extension_that_fails_is_named(install: Install) -> None:
    def register(registry: Any) -> None:
        raise ImportError("libbits")

    install(register_extensions=register)
    with pytest.raises(PlatformBrokenError, match=r"extension .extra. .* raised ImportError: libbits"):
        load_extensions()


def test_an_extension_may_not_hold_platform_hooks(install: Install) -> None:
    install(register_extensions=lambda registry: None, make_device=lambda local_rank: None)
    with pytest.raises(PlatformBrokenError, match="register_extensions only"):
        load_extensions()


def test_a_target_that_is_not_there_is_reported() -> None:
    assert resolve("octavo.extensions:Extensions") is Extensions
    with pytest.raises(PlatformBrokenError, match=r"octavo\.nowhere:X"):
        resolve("octavo.nowhere:X")
