"""`octavo plugin check --no-device`: what a plugin can be asked on a machine without its hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.errors import PlatformNotFoundError
from octavo.testing.conformance.page import badge, page
from octavo.testing.conformance.run import Result

Check = Callable[..., Result]

ABSENT = ("Probe(available=True, score=50)", "Probe(available=False, reason='no Bad board in any slot')")
LABEL = '[proof]\nlabel = "run on hardware"\n'


def test_absent_hardware_is_told_at_once_with_the_way_out(check: Check) -> None:
    with pytest.raises(PlatformNotFoundError, match=r"no Bad board in any slot\. Nothing was checked; --no-device"):
        check(tiers="0", replace=ABSENT)


def test_without_a_device_the_contract_is_checked_and_no_level_reached(check: Check) -> None:
    result = check(tiers="0,1,2,3,4,5,6", replace=ABSENT, settings=LABEL, no_device=True)
    assert result.data["failures"] == {}
    assert result.passed
    assert result.data["level"] == "none: no device"
    assert result.data["proof"] == "contract only", "no label of conformance.toml can be true of it"
    assert result.data["no_device"] == "no Bad board in any slot"
    assert result.data["by_tier"]["0"]["passed"] >= 11
    for tier in "123456":
        assert result.data["by_tier"][tier].keys() == {"skipped"}
    assert set(result.data["skipped"].values()) == {"needs a device: no Bad board in any slot"}
    assert result.data["missing"] == ["a device (no Bad board in any slot)"]
    assert "not run, as it needs one: tier 1, 2, 3, 4, 5, 6" in result.summary()
    assert badge(result.data) == "none: no device · contract only"
    assert "Checked without a device (no Bad board in any slot)" in page(result.data)


@pytest.mark.slow
def test_a_device_that_is_here_can_be_left_out(check: Check) -> None:
    made = "raise SystemExit('the device must not be made')"
    result = check(f"make_device = hookimpl(lambda local_rank: exec({made!r}))", tiers="0", no_device=True)
    assert result.passed
    assert result.data["no_device"] == "left out as asked"


@pytest.mark.slow
def test_what_is_wrong_before_the_device_is_found_without_it(check: Check) -> None:
    wrong = """
    @hookimpl
    def platform_caps():
        import octavo.config
        octavo.config.check = lambda config: None
        return PlatformCaps(dtypes=("float32", "int4"), default_dtype="float32", max_world_size=2)

    @hookimpl
    def platform_configure():
        from octavo.plugin import ConfigPatch
        return [ConfigPatch(field="scheduler.max_num_seqs", value=8, reason="")]
    """
    result = check(wrong, tiers="0", replace=ABSENT, no_device=True)
    found = "\n".join(f"{test}: {message}" for test, message in result.data["failures"].items())
    assert not result.passed
    assert "test_capabilities_are_well_formed: AssertionError: dtypes: torch's names" in found
    assert "test_changes_of_the_config_are_allowed_and_have_reasons: AssertionError: a ConfigPatch without" in found
    assert (
        "test_nothing_outside_the_plugin_is_patched[loading]: AssertionError: loading changed 1: octavo.config" in found
    )


BOARD = """
from octavo.plugin import PlatformInfo, Probe, hookimpl

platform_info = hookimpl(lambda: PlatformInfo(name="board", api="1.0", version="1", device_type="cpu"))
platform_probe = hookimpl(lambda: Probe(available=False, reason="no board in any slot"))
make_device = hookimpl(lambda: None)
"""


def test_the_command_ends_with_an_error_without_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_board.py").write_text(BOARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "board=absent_board")
    result = CliRunner().invoke(main, ["plugin", "check", "board"])
    assert result.exit_code == 1
    assert "no board in any slot. Nothing was checked; --no-device" in result.output
