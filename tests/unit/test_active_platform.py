"""What core asks a platform, and that wrong answers are reported by hook and distribution."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from octavo.active_platform import ActivePlatform, Plugin, kernel_packs, parse_options
from octavo.config import EngineConfig, make_config
from octavo.errors import ConfigError, PlatformBrokenError
from octavo.ops.bind import KernelTable
from octavo.plugin import (
    ConfigPatch,
    GroupSpec,
    KVLayout,
    KVSpec,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerLaunch,
    hookimpl,
)
from octavo.plugin.torch import TorchDevice

SPEC = KVSpec(kind="full", num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")


def platform(**hooks: Any) -> ActivePlatform:
    """A platform made of functions."""
    module: Any = types.ModuleType("acme")
    base = {
        "platform_info": lambda: PlatformInfo(name="acme", api="1.0", version="1", device_type="cpu"),
        "platform_probe": lambda: Probe(available=True),
        "make_device": lambda local_rank: TorchDevice("cpu", local_rank),
    }
    for name, function in (base | hooks).items():
        function.__name__ = name
        setattr(module, name, hookimpl(function))
    sys.modules["acme_under_test"] = module
    entry = EntryPoint(name="acme", value="acme_under_test", group="octavo.platforms")
    return ActivePlatform(Plugin.load(entry, dist="octavo-acme", version="3.1"), options={})


def test_hooks_left_out_have_defaults() -> None:
    plain = platform()
    config, device = EngineConfig(), TorchDevice("cpu")
    assert plain.caps == PlatformCaps()
    assert plain.configure(config) == (config, [])
    assert plain.launch(config) == WorkerLaunch()
    assert plain.kv_layout(SPEC, device) == KVLayout(block_size=16, dtype="float32")
    assert plain.make_communicator(GroupSpec(name="tp"), device) is None
    assert plain.make_graph_runner(config, device) is None
    assert plain.make_executor(config, device) is None
    assert plain.make_device(0, config).type == "cpu"


def test_patches_are_applied_with_their_reasons_and_the_user_wins() -> None:
    patch = ConfigPatch(field="cache.block_size", value=32, reason="tiles of 32")
    patched = platform(platform_configure=lambda config, caps: [patch])
    config, lines = patched.configure(EngineConfig())
    assert config.cache.block_size == 32
    assert lines == ["cache.block_size = 32: tiles of 32"]
    config, lines = patched.configure(make_config(block_size=8))
    assert config.cache.block_size == 8
    assert "kept cache.block_size as you set it" in lines[0]


@pytest.mark.parametrize("field", ["model.model", "cache.enable_prefix_caching", "nonsense"])
def test_a_patch_of_a_field_that_is_not_tunable_is_the_plugins_fault(field: str) -> None:
    patch = ConfigPatch(field=field, value="x", reason="because")
    with pytest.raises(PlatformBrokenError, match=f"octavo-acme 3.1.*may not change '{field}'"):
        platform(platform_configure=lambda config: [patch]).configure(EngineConfig())


@pytest.mark.parametrize(
    ("hook", "answer", "call", "message"),
    [
        ("platform_caps", {}, lambda p: p.caps, "platform_caps must return PlatformCaps, not dict"),
        ("platform_caps", PlatformCaps(dtypes=("float32",)), lambda p: p.caps, "default_dtype 'bfloat16'"),
        ("platform_caps", PlatformCaps(shapes="bucketed"), lambda p: p.caps, "needs buckets"),
        ("platform_configure", ["x"], lambda p: p.configure(EngineConfig()), "must return ConfigPatch, not str"),
        ("platform_launch", 1, lambda p: p.launch(EngineConfig()), "platform_launch must return WorkerLaunch"),
        ("make_device", object(), lambda p: p.make_device(0, EngineConfig()), "object lacks activate, describe"),
        ("make_device", None, lambda p: p.make_device(0, EngineConfig()), "NoneType lacks activate"),
        ("kv_layout", "BHNC", lambda p: p.kv_layout(SPEC, None), "kv_layout must return KVLayout, not str"),
        (
            "kv_layout",
            KVLayout(block_size=16, dtype="float32", order="BHN"),
            lambda p: p.kv_layout(SPEC, None),
            "no permutation",
        ),
        ("make_executor", 5, lambda p: p.make_executor(EngineConfig(), None), "lacks close, collect, kv_groups"),
    ],
)
def test_a_wrong_answer_names_hook_and_plugin(hook: str, answer: Any, call: Any, message: str) -> None:
    with pytest.raises(PlatformBrokenError) as caught:
        call(platform(**{hook: lambda: answer}))
    assert message in str(caught.value)
    assert "octavo-acme 3.1" in str(caught.value)


def test_a_raising_hook_is_named_with_its_error() -> None:
    def explode(registry: Any) -> None:
        raise KeyError("libacme")

    with pytest.raises(PlatformBrokenError, match="register_kernels raised KeyError: 'libacme'"):
        platform(register_kernels=explode).register_kernels(KernelTable(), TorchDevice("cpu"))


def test_an_error_made_for_users_passes_through_a_hook() -> None:
    def refuse(options: Any) -> PlatformCaps:
        raise ConfigError("the driver is too old; install 5.0")

    with pytest.raises(ConfigError, match=r"install 5\.0"):
        _ = platform(platform_caps=refuse).caps


def test_a_switch_option_understands_false() -> None:
    specs = {"fast": OptionSpec(type=bool, default=True, help="be fast")}
    assert parse_options(specs, {"fast": "false"}, platform="acme") == {"fast": False}
    with pytest.raises(ConfigError, match="must be true or false"):
        parse_options(specs, {"fast": "maybe"}, platform="acme")


class _Pack:
    """Stands in for the installed kernel packs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
        module: Any = types.ModuleType("pack_under_test")
        for name, value in attributes.items():
            setattr(module, name, value)
        monkeypatch.setitem(sys.modules, "pack_under_test", module)
        entry = EntryPoint(name="pack", value="pack_under_test", group="octavo.kernels")
        monkeypatch.setattr("octavo.active_platform.entry_points", lambda group: [entry])


def test_a_kernel_pack_is_called_only_for_its_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @hookimpl
    def register_kernels(registry: Any) -> None:
        calls.append("pack")

    _Pack(monkeypatch, API="1.0", PLATFORMS={"acme"}, register_kernels=register_kernels)
    platform(register_kernels=lambda registry: calls.append("acme")).register_kernels(KernelTable(), TorchDevice("cpu"))
    assert calls == ["acme", "pack"]
    assert kernel_packs("cpu") == ([], [])


def broken_pack(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> list[str]:
    """What is said of a pack on platform acme."""
    _Pack(monkeypatch, **attributes)
    table = KernelTable()
    platform().register_kernels(table, TorchDevice("cpu"))
    assert table.providers("greedy") == []
    return table.broken_packs


def test_a_kernel_pack_of_another_api_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    [reason] = broken_pack(monkeypatch, API="9.0", PLATFORMS={"acme"})
    assert "kernel pack 'pack'" in reason
    assert "plugin API 9.0" in reason


def test_a_kernel_pack_that_does_not_say_whom_it_is_for_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A text would be searched for the name of the platform, and "acme" is in "not-acme".
    [reason] = broken_pack(monkeypatch, API="1.0", PLATFORMS="not-acme")
    assert "kernel pack 'pack'" in reason
    assert "PLATFORMS must be a set" in reason


def test_a_kernel_pack_that_fails_halfway_leaves_nothing_and_ends_only_a_start_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @hookimpl
    def register_kernels(registry: Any) -> None:
        registry.op("greedy", lambda logits: logits.argmax(-1), provider="pack", priority=99)
        raise OSError("libpack.so: wrong driver")

    [reason] = broken_pack(monkeypatch, API="1.0", PLATFORMS={"acme"}, register_kernels=register_kernels)
    assert "kernel pack 'pack'" in reason
    assert "register_kernels raised OSError: libpack.so: wrong driver" in reason
    assert "libpack.so" in caplog.text

    device, forced = TorchDevice("cpu"), KernelTable(forced={"greedy": "pack"})
    platform().register_kernels(forced, device)
    with pytest.raises(ConfigError, match=r"greedy=pack: no such provider.*left out: .*libpack\.so"):
        forced.bind("greedy", dtype="float32", device=device)


def test_a_kernel_pack_whose_op_is_unknown_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def register_kernels(registry: Any) -> None:
        registry.op("levitate", print, provider="mine")

    [reason] = broken_pack(monkeypatch, API="1.0", PLATFORMS={"acme"}, register_kernels=register_kernels)
    assert "kernel pack 'pack'" in reason
    assert "levitate" in reason
