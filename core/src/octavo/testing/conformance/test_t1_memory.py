"""Tier 1: what the device says of its memory moves with it, and what is let go comes back.

Core sizes KV memory by these figures: all that is free, less the peak that the largest step adds.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from octavo.plugin import Device, MemInfo
from octavo.testing.conformance.subject import Subject

BLOCK = 64 << 20
NUM_ROUNDS = 50
LEAK = 4 << 20
"""Bytes of each round of the leak check, of which a device that frees everything loses none."""
NUM_ATTEMPTS = 5
"""Others may use the memory too, so one attempt out of these must show that nothing is lost."""


def filled(device: Device, num_bytes: int) -> torch.Tensor:
    """A tensor that has been written, as some allocators take memory only then."""
    tensor = torch.full((num_bytes,), 1, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    return tensor


def settled(device: Device) -> MemInfo:
    """The figures after everything unused was given back."""
    gc.collect()
    device.synchronize()
    device.empty_cache()
    return device.memory()


def test_memory_figures_make_sense(subject: Subject) -> None:
    device = subject.device
    memory = settled(device)
    assert memory.total > 0
    assert 0 <= memory.free <= memory.total
    assert 0 <= memory.non_torch <= memory.total
    described = device.describe().memory
    assert described == 0 or described >= memory.total, "the description has less memory than memory() says"


def test_the_peak_follows_memory_and_resets(subject: Subject) -> None:
    device = subject.device
    settled(device)
    device.reset_peak()
    before = device.memory().peak_torch
    block = filled(device, BLOCK)
    during = device.memory().peak_torch
    if before == during == 0:
        pytest.skip("memory() gives no peak_torch: KV memory is sized without knowing what a step's activations take")
    assert during - before >= 0.9 * BLOCK, f"{BLOCK >> 20} MiB were taken; the peak rose from {before} to {during}"
    del block
    settled(device)
    kept = device.memory().peak_torch
    assert kept >= during - 0.1 * BLOCK, "a peak is what was held at most: it does not sink by itself"
    device.reset_peak()
    assert device.memory().peak_torch <= during - 0.5 * BLOCK, "reset_peak must bring the peak down to what is held"


def test_fifty_tensors_and_events_give_their_memory_back(subject: Subject) -> None:
    device = subject.device
    if not figures_move(device):
        pytest.skip("memory().free does not move when memory is taken: a leak could not be seen")
    one_round(device)
    lost = []
    for _ in range(NUM_ATTEMPTS):
        before = settled(device).free
        for _ in range(NUM_ROUNDS):
            one_round(device)
        lost.append(before - settled(device).free)
        if lost[-1] < NUM_ROUNDS * LEAK // 4:
            return
    pytest.fail(f"{NUM_ROUNDS} tensors of {LEAK >> 20} MiB were freed but {min(lost) >> 20} MiB did not come back")


def figures_move(device: Device) -> bool:
    """Whether a large tensor shows in the free memory (at one of several looks, as others may free some meanwhile)."""
    for _ in range(NUM_ATTEMPTS):
        before = settled(device).free
        block = filled(device, 4 * BLOCK)
        after = device.memory().free
        del block
        if before - after >= 2 * BLOCK:
            return True
    return False


def one_round(device: Device) -> None:
    """Take memory and an event, use them, let them go."""
    stream, event = device.stream(), device.event()
    with device.use_stream(stream):
        filled(device, LEAK)
        event.record()
    event.synchronize()


def test_the_device_holds_no_reference_to_what_it_made(subject: Subject) -> None:
    device = subject.device
    marks = []
    for _ in range(NUM_ROUNDS):
        stream, event, pinned = device.stream(), device.event(), device.pin(torch.ones(64))
        with device.use_stream(stream):
            moved = pinned.to(device.torch_device, non_blocking=True)
            event.record()
        event.synchronize()
        marks += [reference(made) for made in (stream, event, pinned, moved)]
    del stream, event, pinned, moved
    settled(device)
    alive = [mark() for mark in marks if mark is not None and mark() is not None]
    kinds = ", ".join(sorted({type(made).__name__ for made in alive}))
    assert not alive, f"{len(alive)} of {len(marks)} objects live on after their last use: {kinds}"


def reference(made: Any) -> weakref.ref[Any] | None:
    """A weak reference; None for the few types that take none."""
    try:
        return weakref.ref(made)
    except TypeError:
        return None
