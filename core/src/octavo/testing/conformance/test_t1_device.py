"""Tier 1: the device does what its caps claim."""

from __future__ import annotations

import pytest
import torch

from octavo.active_platform import protocol_members
from octavo.plugin import BatchKey, BatchLimits, Device, DeviceDesc
from octavo.plugin.contracts import Event, Stream
from octavo.plugin.torch import NullStream
from octavo.testing.conformance.subject import Subject

LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=128)


def test_the_device_keeps_the_contract(subject: Subject) -> None:
    device = subject.device
    lacking = [name for name in protocol_members(Device) if not hasattr(device, name)]
    assert lacking == []
    assert isinstance(device.torch_device, torch.device)


def test_every_claimed_dtype_computes(subject: Subject, dtype: str) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(kind) for _ in range(2))
    with subject.device.inference():
        got = a.to(subject.device.torch_device) @ b.to(subject.device.torch_device)
    torch.testing.assert_close(got.cpu().float(), a.float() @ b.float(), atol=0.1, rtol=0.05)


def test_the_default_dtype_is_claimed(subject: Subject) -> None:
    assert subject.caps.default_dtype in subject.caps.dtypes


def test_a_recorded_event_happens(subject: Subject) -> None:
    device = subject.device
    event, stream = device.event(), device.stream()
    assert [n for n in protocol_members(Event) if not hasattr(event, n)] == []
    assert [n for n in protocol_members(Stream) if not hasattr(stream, n)] == []
    with device.use_stream(stream):
        result = torch.ones(4, device=device.torch_device) * 2
        event.record()
    other = device.stream()
    other.wait_event(event)
    event.synchronize()
    assert event.query()
    stream.synchronize()
    device.synchronize()
    assert result.cpu().tolist() == [2.0] * 4


def test_streams_are_there_if_claimed(subject: Subject) -> None:
    if not subject.caps.streams:
        pytest.skip("no streams claimed")
    stream = subject.device.stream()
    assert not isinstance(stream, NullStream), "caps.streams is True, but the backend has no streams"


def test_a_pinned_copy_arrives_unchanged(subject: Subject) -> None:
    source = subject.device.pin(torch.arange(1000, dtype=torch.int32))
    arrived = source.to(subject.device.torch_device, non_blocking=True)
    subject.device.synchronize()
    assert torch.equal(arrived.cpu(), torch.arange(1000, dtype=torch.int32))


def test_inference_records_no_gradients(subject: Subject) -> None:
    weight = torch.ones(2, 2, device=subject.device.torch_device, requires_grad=True)
    with subject.device.inference():
        assert not (weight * 2).requires_grad


def test_the_device_describes_itself(subject: Subject) -> None:
    desc = subject.device.describe()
    assert isinstance(desc, DeviceDesc)
    assert desc.name


def test_buckets_ascend(subject: Subject) -> None:
    buckets = subject.caps.buckets
    if buckets is None:
        pytest.skip("dynamic shapes")
    for sizes in (buckets.num_tokens, buckets.num_seqs, buckets.max_context):
        assert list(sizes) == sorted(set(sizes))
        assert all(size > 0 for size in sizes)


def test_capture_is_offered_exactly_if_claimed(subject: Subject) -> None:
    runner = subject.platform.make_graph_runner(subject.config, subject.device)
    claimed = subject.caps.graph != "none"
    assert (runner is not None) == claimed, f"caps.graph is {subject.caps.graph!r}, make_graph_runner gave {runner!r}"


def test_a_replayed_step_reads_its_inputs_again(subject: Subject) -> None:
    if subject.caps.graph == "none":
        pytest.skip("no capture claimed")
    device = subject.device
    runner = subject.platform.make_graph_runner(subject.config, device)
    assert runner is not None
    for key in runner.keys(LIMITS):
        assert key.num_tokens <= LIMITS.max_num_tokens
        assert key.num_seqs <= LIMITS.max_num_seqs
    with device.inference():
        x = torch.zeros(8, 16, device=device.torch_device)
        weight = torch.linspace(-1, 1, 256, device=device.torch_device).view(16, 16)
        counter = torch.zeros(1, device=device.torch_device)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            counter.add_(1)
            return torch.tanh(x @ weight), x.sum(dim=-1)

        handle = runner.prepare(BatchKey(num_tokens=8, num_seqs=8), step)
        counter.zero_()
        for value in (1.0, -2.0, 0.5):
            x.fill_(value)
            first, second = runner.run(handle)
            device.synchronize()
            torch.testing.assert_close(first, torch.tanh(x @ weight), atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(second, x.sum(dim=-1))
    assert counter.item() == 3, "a replay must repeat in-place effects once"
    runner.close()
