"""The kit looks at memory, at absent hardware and at speed, and sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.plugin import MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance import speed, test_t1_memory
from octavo.testing.conformance.levels import slower
from octavo.testing.conformance.run import Result
from octavo.testing.conformance.settings import Settings
from octavo.testing.conformance.subject import Kernel, Subject

Check = Callable[..., Result]


class Ledger(TorchDevice):
    """A device that counts: tensors that tests take are told to it. lost: bytes of every round that never come back."""

    def __init__(self, *, lost: int = 0, keep: bool = False, resets: bool = True) -> None:
        super().__init__("cpu", memory=self.figures)
        self.held = self.peak = self.leaked = 0
        self.lost, self.keep, self.resets = lost, keep, resets
        self.kept: list[torch.Tensor] = []

    def figures(self) -> MemInfo:
        total = 8 << 30
        return MemInfo(total=total, free=total - self.held - self.leaked, peak_torch=self.peak)

    def take(self, num_bytes: int) -> object:
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        self.leaked += self.lost
        return Block(self, num_bytes)

    def reset_peak(self) -> None:
        if self.resets:
            self.peak = self.held

    def pin(self, t: torch.Tensor) -> torch.Tensor:
        if self.keep:
            self.kept.append(t)
        return t


class Block:
    """What a tensor is to the ledger: held until nobody refers to it."""

    def __init__(self, ledger: Ledger, num_bytes: int) -> None:
        self.ledger, self.num_bytes = ledger, num_bytes

    def __del__(self) -> None:
        self.ledger.held -= self.num_bytes


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ledger], Any]:
    """A subject with that device."""
    monkeypatch.setattr(test_t1_memory, "filled", lambda device, num_bytes: device.take(num_bytes))

    def subject(ledger: Ledger) -> Any:
        return SimpleNamespace(device=ledger)

    return subject


def test_a_device_that_frees_everything_passes_the_memory_tests(on: Callable[[Ledger], Any]) -> None:
    for test in (
        test_t1_memory.test_the_peak_follows_memory_and_resets,
        test_t1_memory.test_fifty_tensors_and_events_give_their_memory_back,
        test_t1_memory.test_the_device_holds_no_reference_to_what_it_made,
    ):
        test(on(Ledger()))


def test_a_leak_of_each_tensor_is_caught(on: Callable[[Ledger], Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match="200 MiB did not come back"):
        test_t1_memory.test_fifty_tensors_and_events_give_their_memory_back(on(Ledger(lost=4 << 20)))


def test_a_device_that_remembers_what_it_pinned_is_caught(on: Callable[[Ledger], Any]) -> None:
    with pytest.raises(AssertionError, match="live on after their last use: Tensor"):
        test_t1_memory.test_the_device_holds_no_reference_to_what_it_made(on(Ledger(keep=True)))


def test_a_peak_that_does_not_reset_is_caught(on: Callable[[Ledger], Any]) -> None:
    with pytest.raises(AssertionError, match="reset_peak must bring the peak down"):
        test_t1_memory.test_the_peak_follows_memory_and_resets(on(Ledger(resets=False)))


def test_figures_that_stand_still_skip_the_memory_tests_with_a_reason(on: Callable[[Ledger], Any]) -> None:
    still = on(Ledger())
    still.device._memory = lambda: MemInfo(total=1 << 30, free=1 << 30)
    with pytest.raises(pytest.skip.Exception, match="no peak_torch"):
        test_t1_memory.test_the_peak_follows_memory_and_resets(still)
    with pytest.raises(pytest.skip.Exception, match="a leak could not be seen"):
        test_t1_memory.test_fifty_tensors_and_events_give_their_memory_back(still)


PROBES = ("return Probe(available=True, score=50)", "return Probe(available='BAD_HIDE' not in os.environ, score=50)")
HIDE = '[absent]\nBAD_HIDE = "1"\n'


@pytest.mark.slow
def test_absence_must_be_said_with_a_reason(check: Check) -> None:
    only = '[skip]\n"test_t0_hygiene.py::test_nothing*" = "takes long"\n"*fresh_process" = "takes long"\n'
    assert (
        check(tiers="0", settings=only)
        .data["skipped"]["test_t0_hygiene.py::test_absent_hardware_is_an_answer_with_a_reason"]
        .startswith("conformance.toml does not say how to hide the hardware")
    )
    found = check(tiers="0", settings=HIDE + only).data["failures"]
    assert list(found) == ["test_t0_hygiene.py::test_absent_hardware_is_an_answer_with_a_reason"]
    assert "the platform is ready" in next(iter(found.values()))
    assert check(tiers="0", settings=HIDE + only, replace=PROBES).passed


def test_kernels_are_timed_and_broken_ones_do_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def both_times(subject: Subject, kernel: Kernel) -> tuple[float, float] | None:
        if kernel.provider == "broken":
            raise ValueError("no such stream")
        return {"fast": (1e-6, 2e-6), "even": (2.1e-6, 2e-6), "slow": (6.28e-6, 2e-6), "picky": None}[kernel.provider]

    providers = ("fast", "even", "slow", "picky", "broken", "wrong", "reference")
    kernels = [Kernel("rms_norm", provider, None) for provider in providers]
    subject = Subject("none", Settings())
    monkeypatch.setattr(subject, "ops", lambda: iter(kernels))
    monkeypatch.setattr(subject, "classes", lambda family: iter(()))
    monkeypatch.setattr(speed, "both_times", both_times)
    failed = ["test_t2_ops.py::test_an_op_kernel_agrees_with_the_reference[rms_norm-wrong-float32]"]
    timed = speed.timings(subject, tiers={"2"}, failed=failed)
    assert [(entry["provider"], entry.get("ratio")) for entry in timed] == [
        ("slow", 3.14),
        ("even", 1.05),
        ("fast", 0.5),
        ("broken", None),
    ]
    assert timed[0] == {"op": "rms_norm", "provider": "slow", "seconds": 6.28e-6, "reference": 2e-6, "ratio": 3.14}
    assert [entry["provider"] for entry in slower(timed)] == ["slow", "broken"]
    assert timed[-1]["error"] == "ValueError: no such stream"
    assert speed.timings(subject, tiers={"3"}, failed=failed) == []
