"""The kit lets good platforms pass and catches bad ones."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.plugin import plugin
from octavo.errors import PlatformNotFoundError
from octavo.testing.conformance.levels import level, missing_for_next
from octavo.testing.conformance.page import badge
from octavo.testing.conformance.run import Result, merged, run

Check = Callable[..., Result]


def failures(result: Result) -> str:
    assert not result.passed
    return "\n".join(f"{test}: {message}" for test, message in result.data["failures"].items())


@pytest.mark.slow
def test_a_plain_platform_passes_the_lower_tiers(check: Check) -> None:
    result = check(tiers="0,1")
    assert result.data["failures"] == {}
    assert result.passed
    assert result.data["level"].startswith("not judged")


def test_a_plugin_for_another_api_fails(check: Check) -> None:
    found = failures(check(tiers="1", replace=('API = "1.0"', 'API = "1.99"')))
    assert "PlatformIncompatibleError" in found
    assert "1.99" in found


@pytest.mark.slow
def test_a_heavy_import_and_an_environment_write_are_caught(check: Check) -> None:
    found = failures(check("import torch\nos.environ['BAD_THREADS'] = '4'", tiers="0"))
    assert "test_import_and_probe_load_nothing_heavy" in found
    assert "test_import_and_probe_leave_the_environment_alone" in found


def test_a_claimed_capture_that_is_not_there_is_caught(check: Check) -> None:
    found = failures(check("@hookimpl\ndef platform_caps():\n    return PlatformCaps(graph='capture')", tiers="1"))
    assert "test_capture_is_offered_exactly_if_claimed" in found


def test_a_claimed_dtype_that_does_not_compute_is_caught(check: Check) -> None:
    caps = "PlatformCaps(dtypes=('float32', 'int4'), default_dtype='float32')"
    found = failures(check(f"@hookimpl\ndef platform_caps():\n    return {caps}", tiers="1"))
    assert "test_every_claimed_dtype_computes[int4]" in found


def test_a_capture_that_replays_old_results_is_caught(check: Check) -> None:
    extra = """
    @hookimpl
    def platform_caps():
        return PlatformCaps(graph="capture")

    class Stale:
        def keys(self, limits):
            return [BatchKey(num_tokens=1, num_seqs=1)]
        def prepare(self, key, fn):
            return fn()
        def run(self, handle):
            return handle
        def close(self):
            pass

    @hookimpl
    def make_graph_runner():
        return Stale()
    """
    assert "test_a_replayed_step_reads_its_inputs_again" in failures(check(extra, tiers="1"))


WRONG_KERNELS = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

def forgets_eps(x, weight, eps):
    return x * x.pow(2).mean(-1, keepdim=True).rsqrt() * weight * 1.001

def overwrites_its_input(ids, table, scale=None):
    result = table[ids.long()] * (1.0 if scale is None else scale)
    ids.zero_()
    return result

def spoils_the_weight(x, residual, weight, eps):
    total = x + residual
    normed = total * total.pow(2).mean(-1, keepdim=True).add(eps).rsqrt() * weight
    weight.zero_()
    return normed, total

def adds_unsaid(x, residual, scale=None):
    return residual.add_(x, alpha=1 if scale is None else scale)

class Transposed:
    name = "transposed"
    @classmethod
    def supports(cls, spec, device):
        return YES
    def prepare(self, weights, spec, device):
        return weights["weight"] * 1.01
    def apply(self, x, w, bias):
        y = x @ w.T
        return y if bias is None else y + bias

@hookimpl
def register_kernels(registry):
    registry.op("rms_norm", forgets_eps, provider="hasty")
    registry.op("embedding", overwrites_its_input, provider="greedy")
    registry.op("add_rms_norm", spoils_the_weight, provider="careless", inplace=True)
    registry.op("scaled_add", adds_unsaid, provider="silent")
    registry.linear(Transposed)
"""


def test_wrong_kernels_are_caught_by_name(check: Check) -> None:
    result = check(WRONG_KERNELS, tiers="2,4")
    found = failures(result)
    assert "test_an_op_kernel_agrees_with_the_reference[rms_norm-hasty-float32]" in found
    assert "test_an_op_kernel_agrees_with_the_reference[embedding-greedy-float32]" in found
    assert "changes ids, which the caller goes on using" in found
    assert "changes weight, which the caller goes on using" in found, "whatever it says, inplace is no leave to do that"
    assert "changes residual but does not say inplace" in found
    assert "test_a_linear_kernel_multiplies[linear-transposed-float32]" in found
    assert "-reference-" not in found
    assert result.data["native"] == ["linear"]
    assert set(result.data["native_ops"]) == {"rms_norm", "embedding", "add_rms_norm", "scaled_add"}


@pytest.mark.slow
def test_known_failures_and_wider_tolerances_come_from_the_settings(check: Check) -> None:
    settings = """
    [tolerance]
    rms_norm.float32 = 1e-2
    linear.float32 = 5e-2
    attention.float32 = 1e9
    [xfail]
    "test_t2_ops.py::*[embedding-greedy-*]" = "zeroes the ids until driver 5"
    "test_t2_ops.py::*[add_rms_norm-careless-*]" = "likewise"
    "test_t2_ops.py::*[scaled_add-silent-*]" = "likewise"
    [skip]
    "test_t4_linear.py::*packed*" = "no quantized weights yet"
    "test_t9*" = "there is no such test"
    """
    result = check(WRONG_KERNELS, tiers="2,4", settings=textwrap.dedent(settings))
    assert result.data["failures"] == {}
    assert list(result.data["xfails"].values()) == ["zeroes the ids until driver 5", "likewise", "likewise"]
    assert result.data["unused_patterns"] == ["test_t9*", "attention.float32"]
    assert "3 tolerances of its own: rms_norm.float32 = 0.01, linear.float32 = 0.05, attention.float32 = 1e+09" in (
        result.summary()
    )
    assert set(result.data["excused"].values()) == {"no quantized weights yet"}
    assert not set(result.data["excused"]) & set(result.data["skipped"])
    assert result.data["tolerances"]["rms_norm"] == {"float32": 1e-2}
    assert "expected to fail" in result.summary()
    assert "3 known failures · " in badge(result.data)


ATTENTION_OFF_BY_ONE = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

@hookimpl
def register_kernels(registry):
    from octavo.testing.refdev_kernels import RefAttention
    from dataclasses import replace

    class ForgetsWindow(RefAttention):
        name = "forgetful"
        def __init__(self, spec, limits, device):
            super().__init__(replace(spec, window=None), limits, device)

    registry.attention(ForgetsWindow)
"""


def test_attention_that_ignores_its_window_is_caught(check: Check) -> None:
    result = check(ATTENTION_OFF_BY_ONE, tiers="3")
    assert all("window" in test and "forgetful" in test for test in result.data["failures"])
    assert len(result.data["failures"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("cpu", "gold"), ("refdev", "bronze")])
def test_the_platforms_in_this_repository_pass(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = Path(__file__).parents[3] / "plugins" / name / "conformance.toml"
    result = run(name, config=settings if settings.exists() else None, quiet=True)
    assert result.data["failures"] == {}
    assert result.data["level"] == expected


@pytest.mark.slow
def test_the_example_of_the_plugin_guide_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[3] / "docs" / "examples" / "acme"
    monkeypatch.setenv("PYTHONPATH", str(example))
    monkeypatch.setenv("ACME_DEVICE", os.devnull)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "acme=acme_plugin")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("acme", config=example / "conformance.toml", quiet=True)
    assert result.data["failures"] == {}
    assert result.data["level"] == "bronze"
    assert result.data["native_ops"] == ["act_and_mul"]
    assert "test_t0_hygiene.py::test_absent_hardware_is_an_answer_with_a_reason" not in result.data["skipped"]


def results(tiers: str, *, failed: str = "", native: str = "attention linear", **changes: object) -> dict[str, object]:
    """A report of these tiers, each of which ran."""
    by_tier = {tier: {"passed": 3} | ({"failed": 1} if tier in failed else {}) for tier in tiers}
    claims = {"graph": "capture", "max_world_size": 2}
    found = {"by_tier": by_tier, "native": native.split(), "claims": claims, "xfails": {}, "excused": {}}
    return {**found, "tiers": list(tiers), **changes}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (results("0123456"), "gold"),
        (results("012346"), "silver"),
        (results("0123456", xfails={"test": "why"}), "silver"),
        (results("0123456", excused={"test": "why"}), "silver"),
        (results("0123456", claims={"graph": "none", "max_world_size": 2}), "silver"),
        (results("0123456", claims={"graph": "capture", "max_world_size": 1}), "silver"),
        (results("0123456", failed="5"), "silver"),
        (results("0123456", native="attention"), "bronze"),
        (results("0123456", failed="4"), "bronze"),
        (results("016"), "bronze"),
        (results("0123456", failed="6"), "none"),
        (results("016", by_tier={"0": {"passed": 1}, "1": {"passed": 1}, "6": {"skipped": 9}}), "none"),
        (results("01"), "not judged (it takes tiers 0, 1, 6 at least)"),
    ],
)
def test_levels_need_all_their_tiers_and_native_kernels(data: dict[str, object], expected: str) -> None:
    assert level(data, list(data["tiers"])) == expected


def test_what_stands_before_the_next_level_is_said() -> None:
    def missing(data: dict[str, object]) -> list[str]:
        return missing_for_next({**data, "level": level(data, list(data["tiers"]))})

    assert missing(results("0123456")) == []
    assert missing(results("01")) == []
    assert missing(results("016", native="attention")) == [
        *(f"tier {tier} was not asked for" for tier in "234"),
    ]
    assert missing(results("0123456", native="attention")) == ["no linear kernel of its own is proved"]
    assert missing(results("0123456", failed="6")) == ["tier 6 fails"]
    single = {"graph": "none", "max_world_size": 1}
    ran = {tier: {"skipped" if tier == "5" else "passed": 1} for tier in "0123456"}
    assert missing(results("0123456", by_tier=ran, claims=single, xfails={"x": "y"})) == [
        "tier 5 has nothing to run",
        "no recorded steps (caps.graph)",
        "one rank only (caps.max_world_size)",
        "1 known failures",
    ]


def test_the_command_writes_its_report_and_fails_with_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "broken=no_such_module")
    result = CliRunner().invoke(plugin, ["check", "broken", "--tier", "1", "--json", "--report", str(report)])
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert "PlatformBrokenError" in next(iter(data["failures"].values()))
    assert json.loads(report.read_text()) == data


@pytest.mark.slow
def test_several_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    alone, shared = (run("refdev", tiers=("1", "2"), quiet=True, jobs=jobs).data for jobs in (1, 3))
    assert sum(alone["by_tier"]["2"].values()) > 3
    measured = dict.fromkeys(("timings", "slower_than_reference", "seconds"))
    assert {**shared, **measured} == {**alone, **measured}
    kernels = [sorted((entry["op"], entry["provider"]) for entry in data["timings"]) for data in (alone, shared)]
    assert kernels[0] == kernels[1] == [("rms_norm", "refdev")]


def test_reports_of_shares_add_up() -> None:
    def report(outcome: str, test: str, unused: list[str]) -> dict[str, object]:
        part = {"counts": {outcome: 2}, "by_tier": {"2": {outcome: 2}}, "seconds": {"2": 1.5}, "xfails": {}}
        part |= {"classes": {}, "timings": []}
        part["changed_by_backend"] = [f"torch.{test}"]
        part |= {"failures": {test: "no"} if outcome == "failed" else {}, "excused": {}, "skipped": {}}
        return {"platform": "p", **part, "unused_patterns": unused}

    data = merged([report("passed", "a", ["p", "q"]), report("failed", "b", ["q"]), report("passed", "c", ["p", "q"])])
    assert data["counts"] == {"passed": 4, "failed": 2}
    assert data["changed_by_backend"] == ["torch.a", "torch.b", "torch.c"]
    assert data["by_tier"] == {"2": {"passed": 4, "failed": 2}}
    assert data["failures"] == {"b": "no"}
    assert data["unused_patterns"] == ["q"]
    assert data["seconds"] == {"2": 4.5}


@pytest.mark.parametrize("no_device", [True, False])
def test_a_platform_that_is_not_installed_is_told_in_one_line(no_device: bool) -> None:
    with pytest.raises(PlatformNotFoundError, match=r"^no installed platform is named 'nosuch' .*octavo-nosuch$"):
        run("nosuch", quiet=True, no_device=no_device)


def test_an_unknown_tier_is_a_usage_error() -> None:
    result = CliRunner().invoke(plugin, ["check", "cpu", "--tier", "0,9"])
    assert result.exit_code == 2
    assert "9 (tiers are 0, 1, 2, 3, 4, 5, 6)" in result.output


@pytest.mark.parametrize("given", [["--tier", "6,2"], ["--tier", "2", "--tier", "6"], ["--tier", "6", "--tier", "2,6"]])
def test_tiers_are_given_at_once_or_one_by_one(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str, *, tiers: list[str], **others: object) -> Result:
        asked.append(tiers)
        return Result({"failures": {}, "counts": {"passed": 1}})

    monkeypatch.setattr("octavo.testing.conformance.run.run", fake)
    result = CliRunner().invoke(plugin, ["check", "cpu", "--json", *given])
    assert result.exit_code == 0
    assert asked == [["2", "6"]]


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.testing.conformance.run.run", lambda *args, **kwargs: pytest.fail("it ran"))
    for path, message in (
        (tmp_path / "nowhere" / "x", f"there is no folder '{tmp_path}/nowhere'"),
        (tmp_path, "is a directory"),
    ):
        told = CliRunner().invoke(plugin, ["check", "cpu", option, str(path)])
        assert (told.exit_code, message in told.output) == (2, True), told.output
