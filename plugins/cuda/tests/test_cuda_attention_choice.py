"""Which backend is chosen for which phase, how that is told, and when a file of times is believed. Times are made."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.ops.bind import KernelTable
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, MemInfo, Support
from octavo.plugin.torch import TorchDevice
from octavo_cuda import attention_choice
from octavo_cuda.attention_choice import SAMPLES, Phase, Sample, cache_file, choose, facts, fitted, read
from octavo_cuda.attention_phases import AutoAttention

SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, dtype="float32", kv_dtype="float32", block_size=16
)
LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=128)
PHASES = get_args(Phase)
DEVICE = TorchDevice("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))


class Slow(ReferenceAttention):
    """us: what it takes on the card, by the query tokens of the step."""

    name = "slow"
    fault: Callable[[torch.Tensor], object] = staticmethod(lambda out: None)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Any) -> Support:
        return Support(ok=True)

    def run(self, layer: AttnLayer, q: Any, k: Any, v: Any, kv: Any, plan: Any, out: Any) -> Any:
        super().run(layer, q, k, v, kv, plan, out)
        self.fault(out)
        return out


class Quick(Slow):
    name = "quick"


class Odd(Slow):
    name = "odd"


US = {"slow": 500.0, "quick": 50.0, "odd": 5.0}


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Times by the name of the backend. Returns who was timed."""
    timed: list[str] = []

    def microseconds(sample: Sample, backend: Any, device: Any) -> float:
        plan = backend.plan(sample.batch, graph=True)
        backend.run(sample.layer, sample.q, sample.k, sample.v, sample.kv, plan, sample.out)
        timed.append(backend.name)
        return US[backend.name]

    monkeypatch.setattr(Sample, "microseconds", microseconds)
    monkeypatch.setattr(attention_choice, "driver_version", lambda: "580.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return timed


def test_the_fastest_is_chosen_and_told_with_the_times_of_all(made_time: list[str]) -> None:
    choice = choose([Quick, Slow], SPEC, LIMITS, DEVICE)
    assert choice.best == dict.fromkeys(PHASES, Quick)
    assert choice.why.startswith("few decodes: quick 50.0 us (slow 500.0); many decodes: quick 50.0 us (slow 500.0); ")
    assert f"measured now, kept in {cache_file(facts([Quick, Slow], SPEC, LIMITS, DEVICE))}" in choice.why
    assert sorted(made_time) == ["quick"] * 4 + ["slow"] * 4


def test_what_was_measured_once_is_not_measured_again(made_time: list[str]) -> None:
    first = choose([Quick, Slow], SPEC, LIMITS, DEVICE)
    made_time.clear()
    again = choose([Quick, Slow], SPEC, LIMITS, DEVICE)
    assert made_time == []
    assert again.best == first.best
    assert "; measured 20" in again.why


@pytest.mark.parametrize("change", ["card", "driver", "spec", "limits", "version"])
def test_another_card_driver_version_kind_or_limit_is_measured_anew(
    made_time: list[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    choose([Quick, Slow], SPEC, LIMITS, DEVICE)
    made_time.clear()
    spec, limits = SPEC, LIMITS
    if change == "card":
        description = replace(DEVICE.describe(), name="other")
        monkeypatch.setattr(DEVICE, "describe", lambda: description)
    elif change == "driver":
        monkeypatch.setattr(attention_choice, "driver_version", lambda: "590.1")
    elif change == "version":
        monkeypatch.setattr(Quick, "version", lambda: "2", raising=False)
    elif change == "spec":
        spec = replace(SPEC, window=32)
    else:
        limits = replace(LIMITS, max_model_len=64)
    choose([Quick, Slow], spec, limits, DEVICE)
    assert len(made_time) == 8


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"key": {}, "us": {}}',
        b"\xff\xfe",
        {"us": {"mixed": {"quick": 1.0, "slow": 2.0}}},
        {"us": {phase: {"quick": 1.0} for phase in PHASES}},
        {"us": {phase: {"quick": "fast", "slow": 2.0} for phase in PHASES}},
        {"us": {phase: {"quick": -1.0, "slow": 2.0} for phase in PHASES}},
        {"us": {phase: {"quick": 9.0, "slow": 2.0} for phase in PHASES}, "key": {}},
    ],
)
def test_a_broken_file_is_reported_and_replaced(
    made_time: list[str], caplog: pytest.LogCaptureFixture, content: Any
) -> None:
    key = facts([Quick, Slow], SPEC, LIMITS, DEVICE)
    path = cache_file(key)
    path.parent.mkdir(parents=True)
    if isinstance(content, dict):
        content = json.dumps({"key": key, "measured": "2026-01-01"} | content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        assert choose([Quick, Slow], SPEC, LIMITS, DEVICE).best["mixed"] is Quick
    assert "measured anew" in caplog.text
    assert len(made_time) == 8
    assert read(key, ["quick", "slow"]) is not None, "the file is whole again"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(
    made_time: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        choice = choose([Quick, Slow], SPEC, LIMITS, DEVICE)
    assert choice.best["mixed"] is Quick
    assert "not kept: " in choice.why
    assert "cannot be kept" in caplog.text


def test_a_backend_that_fails_or_answers_otherwise_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(out: torch.Tensor) -> None:
        raise RuntimeError("no kernel image\nis available")

    faults: list[tuple[Callable[[torch.Tensor], object], str]] = [
        (explode, "no kernel image"),
        (lambda out: out.add_(0.1), "off by 0.1"),
        (lambda out: out.fill_(float("nan")), "off by nan"),
    ]
    for fault, text in faults:
        caplog.clear()
        monkeypatch.setattr(Odd, "fault", staticmethod(fault))
        choice = choose([Odd, Quick, Slow], SPEC, LIMITS, DEVICE)
        assert choice.best == dict.fromkeys(PHASES, Quick)
        assert "mixed: quick 50.0 us (slow 500.0, odd failed)" in choice.why
        assert text in caplog.text
        cache_file(facts([Odd, Quick, Slow], SPEC, LIMITS, DEVICE)).unlink()


def test_if_all_fail_the_last_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Sample, "microseconds", explode)
    assert choose([Quick, Slow], SPEC, LIMITS, DEVICE).best == dict.fromkeys(PHASES, Slow)


def test_samples_are_batches_of_their_phase_within_the_limits() -> None:
    for phase, lens in SAMPLES.items():
        sample = Sample.build(lens, SPEC, LIMITS, DEVICE)
        batch = sample.batch
        assert batch.num_seqs <= LIMITS.max_num_seqs
        assert batch.num_tokens <= LIMITS.max_num_tokens
        assert int(batch.kv_lens.max()) <= LIMITS.max_model_len
        assert (batch.max_q_len == 1) == ("decodes" in phase)
        used = [table[: -(-int(n) // 16)] for table, n in zip(batch.block_table, batch.kv_lens, strict=True)]
        pages = torch.cat(used).tolist()
        assert len(set(pages)) == len(pages) == len(sample.kv.k) - 1
        assert 0 not in pages
        last = batch.slots[batch.q_starts[1:].long() - 1] // 16
        assert last.tolist() == [int(table[-1]) for table in used], "the newest token lies in the last page"


def test_samples_shrink_to_what_is_sensible() -> None:
    wide = replace(SPEC, num_kv_heads=32, num_heads=32, head_dim=256)
    large = BatchLimits(max_num_tokens=8192, max_num_seqs=512, max_model_len=32768)
    for lens in SAMPLES.values():
        assert [new for _, new in fitted(lens, SPEC, large)] == [new for _, new in lens]
        tokens = sum(context for context, _ in fitted(lens, wide, large))
        assert tokens * 2 * 32 * 256 * 4 <= attention_choice.MEMORY


def test_a_backend_asked_for_by_name_is_not_measured(made_time: list[str]) -> None:
    table = KernelTable(forced={"attention": "slow"})
    table.attention(AutoAttention.of(Quick, Slow), priority=40)
    table.attention(Slow, priority=10)
    assert type(table.attention_backend(SPEC, LIMITS, DEVICE)) is Slow
    assert made_time == []
    table.forced = {}
    backend = table.attention_backend(SPEC, LIMITS, DEVICE)
    assert type(backend).name == "auto"
    assert table.choices[-1].why == backend.why
    assert "quick 50.0 us" in backend.why
