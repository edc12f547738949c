"""Which platform is chosen, and what is said when none can be."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.discovery import load, select, survey
from octavo.errors import (
    ConfigError,
    PlatformAmbiguousError,
    PlatformBrokenError,
    PlatformIncompatibleError,
    PlatformNotFoundError,
)

GOOD = """
from octavo.plugin import OptionSpec, PlatformInfo, Probe, hookimpl

@hookimpl
def platform_info():
    options = {{"level": OptionSpec(type=int, default=3, help="how hard to try")}}
    return PlatformInfo(name="{name}", api="{api}", version="7", device_type="cpu", options=options)

@hookimpl
def platform_probe():
    return Probe(available={available}, score={score}, reason="{reason}")

@hookimpl
def make_device(local_rank):
    from octavo.plugin.torch import TorchDevice
    return TorchDevice("cpu", local_rank)
"""

Install = Callable[..., str]
_numbers = itertools.count()


def good(name: str, *, api: str = "1.0", available: bool = True, score: int = 60, reason: str = "") -> str:
    return GOOD.format(name=name, api=api, available=available, score=score, reason=reason)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution `octavo-<name>` 1.2 with one module and one entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, source: str, *, dist: str = "", group: str = "octavo.platforms") -> str:
        module, dist = f"plugin_{next(_numbers)}", dist or f"octavo-{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        return module

    return put


def test_every_plugin_gets_its_state_and_the_reason(install: Install) -> None:
    install("fast", good("fast"))
    install("away", good("away", available=False, reason="/dev/away0 missing"))
    install("future", good("future", api="1.99"))
    install("crash", "raise OSError('libcrash.so.1: cannot open shared object file')")
    reports = {r.name: r for r in survey(exclude={"cpu"})}
    states = {name: r.state for name, r in reports.items()}
    expected = {
        "away": "absent",
        "cpu": "skipped",
        "crash": "broken",
        "fast": "ready",
        "future": "incompatible",
    }
    assert expected.items() <= states.items(), "other platforms may be installed too"
    assert reports["away"].reason == "/dev/away0 missing"
    assert "upgrade octavo" in reports["future"].reason
    assert "libcrash.so.1" in reports["crash"].reason
    assert (reports["crash"].dist, reports["crash"].version) == ("octavo-crash", "1.2")


def test_a_skipped_plugin_is_not_imported(install: Install) -> None:
    module = install("quiet", good("quiet"))
    survey(exclude={"quiet"})
    assert module not in sys.modules


def test_auto_takes_the_highest_score(install: Install) -> None:
    install("slow", good("slow", score=50))
    install("fast", good("fast", score=90))
    assert select().name == "fast"


def test_a_named_platform_is_the_only_one_imported(install: Install) -> None:
    other = install("other", good("other"))
    install("mine", good("mine"))
    assert select("mine").name == "mine"
    assert other not in sys.modules


def test_two_equal_scores_must_be_resolved_by_the_user(install: Install) -> None:
    install("left", good("left"))
    install("right", good("right"))
    with pytest.raises(PlatformAmbiguousError, match=r"left \(octavo-left 1.2\) and right \(octavo-right 1.2\)"):
        select()
    assert select("right").name == "right"


def test_one_name_in_two_distributions_is_ambiguous(install: Install) -> None:
    install("twin", good("twin"), dist="octavo-twin")
    install("twin", good("twin"), dist="other-twin")
    with pytest.raises(PlatformAmbiguousError, match=r"octavo-twin 1.2 and other-twin 1.2|other-twin 1.2 and octavo"):
        select("twin")


@pytest.mark.parametrize("package", ["octavo", "torch", "octavo_mine", "{module}"])
def test_a_plugin_cannot_be_its_own_backend(install: Install, tmp_path: Path, package: str) -> None:
    source = good("mine").replace('device_type="cpu"', 'device_type="cpu", backend=("torch_mine", __name__)')
    module = install("mine", source if package == "{module}" else source.replace("__name__", repr(package)))
    files = "".join(f"{name},,\n" for name in (f"{module}.py", "octavo_mine/__init__.py"))
    (tmp_path / "octavo_mine-1.2.dist-info" / "RECORD").write_text(files)
    named = package.format(module=module)
    with pytest.raises(PlatformBrokenError, match=rf"backend names {named}, .*update or uninstall octavo-mine"):
        select("mine")


def test_a_broken_accelerator_never_becomes_cpu_silently(install: Install) -> None:
    install("crash", "import nonexistent_sdk")
    with pytest.raises(PlatformBrokenError, match=r"refusing silent CPU fallback.*octavo-crash.*nonexistent_sdk"):
        select()
    assert select("cpu").name == "cpu"


def test_an_incompatible_accelerator_never_becomes_cpu_silently(install: Install) -> None:
    install("old", good("old", api="0.1"))
    with pytest.raises(PlatformIncompatibleError, match=r"refusing silent CPU fallback.*octavo-old"):
        select()


def test_a_broken_plugin_does_not_hinder_a_working_accelerator(install: Install) -> None:
    install("crash", "1 / 0")
    install("fast", good("fast"))
    assert select().name == "fast"


def test_an_absent_accelerator_leaves_the_cpu(install: Install) -> None:
    install("away", good("away", available=False, reason="no device"))
    assert select().name == "cpu"


def test_an_unknown_name_lists_what_is_installed(install: Install) -> None:
    with pytest.raises(PlatformNotFoundError, match=r"'nope'.*installed: cpu.*pip install octavo-nope"):
        select("nope")


def test_a_named_platform_without_hardware_says_why(install: Install) -> None:
    install("away", good("away", available=False, reason="/dev/away0 missing"))
    with pytest.raises(PlatformNotFoundError, match=r"octavo-away 1.2.*/dev/away0 missing"):
        select("away")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (good("odd").replace("def platform_probe", "def platform_prob"), "unknown hook 'platform_prob'"),
        (good("odd").replace("make_device(local_rank)", "make_device(gpu)"), "gpu"),
        ("x = 1", "mandatory hook platform_info, platform_probe, make_device"),
        (good("odd").replace("@hookimpl\ndef make_device", "def make_device"), "mandatory hook make_device"),
        (good("odd").replace("return Probe(", "return dict("), "platform_probe must return Probe, not dict"),
        (good("odd").replace("return Probe(", "raise OSError("), "platform_probe raised"),
        (good("other"), "platform_info says 'other'"),
        ("import sys; sys.exit(3)", "raised SystemExit"),
    ],
)
def test_a_faulty_plugin_is_named_with_its_fault(install: Install, source: str, message: str) -> None:
    install("odd", source)
    with pytest.raises(PlatformBrokenError) as caught:
        select("odd")
    assert message in str(caught.value)
    assert "octavo-odd" in str(caught.value)
    assert caught.value.platform == "odd"


MISTYPED = {
    "api=1.0": "platform_info: api must be str, not 1.0",
    'api="1.0", options={"level": 3}': "platform_info: options['level'] must be OptionSpec, not 3",
    'api="1.0", backend="torch_acme"': "platform_info: backend must be tuple[str, ...], not 'torch_acme'",
    'score="high"': "platform_probe: score must be int, not 'high'",
    'devices=("gpu",)': "platform_probe: devices[0] must be DeviceDesc, not 'gpu'",
    'devices=[DeviceDesc(name="gpu", numa="0")]': "platform_probe: devices[0].numa must be int | None, not '0'",
    'reason=OSError("gone")': "platform_probe: reason must be str, not OSError('gone')",
}
"""Arguments of PlatformInfo or Probe -> what is said of them."""


@pytest.mark.parametrize("arguments", MISTYPED)
def test_a_wrongly_typed_field_is_one_broken_platform_and_hinders_no_other(install: Install, arguments: str) -> None:
    info, probe = ("api='1.0'", arguments) if "platform_probe" in MISTYPED[arguments] else (arguments, "score=70")
    install(
        "odd",
        f"""
        from octavo.plugin import DeviceDesc, OptionSpec, PlatformInfo, Probe, hookimpl

        @hookimpl
        def platform_info():
            return PlatformInfo(name="odd", version="7", device_type="cpu", {info})

        @hookimpl
        def platform_probe():
            return Probe(available=True, {probe})

        @hookimpl
        def make_device(local_rank): ...
        """,
    )
    install("fast", good("fast"))
    [report] = [report for report in survey() if report.name == "odd"]
    assert report.state == "broken"
    assert f"octavo-odd 1.2) is broken: {MISTYPED[arguments]}; " in report.reason
    assert select().name == "fast"


def test_a_hook_that_refuses_by_an_error_for_users_is_a_state_too(install: Install) -> None:
    source = good("picky").replace("return Probe(", 'from octavo.errors import ConfigError; raise ConfigError("no")\n#')
    install("picky", source)
    [report] = [report for report in survey() if report.name == "picky"]
    assert (report.state, report.reason) == ("broken", "no")


def test_the_version_is_judged_before_the_other_hooks(install: Install) -> None:
    source = good("new", api="1.99").replace("def make_device(local_rank)", "def make_device(brand_new_argument)")
    install("new", source + "\n@hookimpl\ndef brand_new_hook(): ...\n")
    with pytest.raises(PlatformIncompatibleError, match=r"needs plugin API 1\.99.*upgrade octavo"):
        select("new")


def test_options_are_parsed_and_unknown_ones_refused(install: Install) -> None:
    install("fast", good("fast"))
    assert select("fast").options == {"level": 3}
    assert select("fast", options={"level": "5"}).options == {"level": 5}
    with pytest.raises(ConfigError, match=r"--platform-opt speed.*known: level \(how hard to try\)"):
        select("fast", options={"speed": "9"})
    with pytest.raises(ConfigError, match="--platform-opt level=high"):
        select("fast", options={"level": "high"})


def test_a_child_loads_exactly_the_locked_platform(install: Install) -> None:
    install("fast", good("fast", score=90))
    lock = pickle.loads(pickle.dumps(select("fast").lock))
    assert (lock.name, lock.dist, lock.version, lock.api) == ("fast", "octavo-fast", "1.2", "1.0")
    other = install("later", good("later", score=99))
    assert load(lock, options={"level": "1"}).options == {"level": 1}
    assert other not in sys.modules


def test_extra_platforms_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    assert select("refdev").name == "refdev"
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev")
    with pytest.raises(ConfigError, match="OCTAVO_EXTRA_PLATFORMS must look like"):
        survey()


def test_discovery_imports_no_torch() -> None:
    code = "import sys, octavo.discovery as d; d.survey(); d.select('cpu'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
