"""KV memory: how many blocks each group gets, and the tensors behind them.

Groups with different specs (full attention, sliding windows) have a pool each under one byte budget. The split lets
every pool hold the same number of longest sequences, as a sliding group needs only its window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.errors import ConfigError
from octavo.plugin.contracts import Device, KVView
from octavo.plugin.specs import BatchLimits, KVLayout, KVPlan, KVSpec
from octavo.plugin.torch import lazy_zeros

NULL_BLOCKS = 1
"""Block 0 of every pool is nobody's: padding writes there, and entries behind a window point there."""


@dataclass(frozen=True, kw_only=True)
class GroupNeed:
    """One KV group: its spec and how many layers share its block table."""

    spec: KVSpec
    num_layers: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        itemsize: int = getattr(torch, self.spec.dtype).itemsize
        return self.spec.block_elements * self.num_layers * itemsize

    def blocks_per_sequence(self, limits: BatchLimits) -> int:
        """Most blocks that one sequence ever holds."""
        length = limits.max_model_len
        if self.spec.window is not None:
            # The window, the step's new tokens behind it, and a block that straddles the window's start.
            length = min(length, self.spec.window - 1 + limits.max_num_tokens + self.spec.block_size)
        return math.ceil(length / self.spec.block_size)


def divide(
    needs: Sequence[GroupNeed], limits: BatchLimits, *, budget: int | None, num_blocks: int | None
) -> list[KVPlan]:
    """Blocks for each group, from a byte budget or a fixed count (of the first group; others in proportion).

    Raises ConfigError if not even one sequence of max_model_len fits.
    """
    per_seq = [need.blocks_per_sequence(limits) for need in needs]
    seq_bytes = sum(blocks * need.block_bytes for blocks, need in zip(per_seq, needs, strict=True))
    if num_blocks is not None:
        seqs = (num_blocks - NULL_BLOCKS) / per_seq[0]
    else:
        assert budget is not None
        null = sum(need.block_bytes for need in needs)
        seqs = min((budget - null) / seq_bytes, float(limits.max_num_seqs))
    if seqs < 1.0:
        what = f"{num_blocks} blocks" if num_blocks is not None else f"{max(budget or 0, 0) / 2**20:.0f} MiB"
        raise ConfigError(
            f"KV memory of {what} cannot hold one sequence of max_model_len {limits.max_model_len} "
            f"({seq_bytes / 2**20:.0f} MiB): lower --max-model-len, or raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization"
        )
    return [
        KVPlan(spec=need.spec, num_layers=need.num_layers, num_blocks=NULL_BLOCKS + int(seqs * blocks))
        for need, blocks in zip(needs, per_seq, strict=True)
    ]


def allocate(plan: KVPlan, layout: KVLayout, device: Device) -> list[KVView]:
    """One view per layer, logically [blocks, heads, block_size, content], laid out as the layout's order says.

    Raises ConfigError naming the options to lower if the device has not that much memory.

    Zeroed: attention may read slots that were never written and masks them, and 0 * NaN would be NaN.
    """
    spec = plan.spec
    if sorted(layout.order) != sorted("BHNC"):
        raise ConfigError(f"KV layout order must be a permutation of 'BHNC', not {layout.order!r}")
    if layout.block_size != spec.block_size:
        raise ConfigError(f"KV layout has blocks of {layout.block_size} tokens, --block-size is {spec.block_size}")
    sizes = {"B": plan.num_blocks, "H": spec.num_kv_heads, "N": spec.block_size, "C": spec.content}
    shape = [sizes[axis] for axis in layout.order]
    to_logical = [layout.order.index(axis) for axis in "BHNC"]
    dtype = getattr(torch, layout.dtype)

    def tensor() -> torch.Tensor:
        return lazy_zeros(shape, dtype, device.torch_device).permute(to_logical)

    try:
        if layout.alloc is not None:
            return layout.alloc(plan, device)
        return [KVView(k=tensor(), v=tensor()) for _ in range(plan.num_layers)]
    except (torch.OutOfMemoryError, MemoryError) as error:
        wanted = 2 * plan.num_layers * math.prod(shape) * dtype.itemsize
        raise ConfigError(
            f"the device refuses {wanted / 2**30:.1f} GiB of KV memory ({plan.num_blocks} blocks): lower "
            "--gpu-memory-utilization, --kv-cache-memory-bytes or --num-kv-blocks, or end what else uses the device "
            f"({str(error).splitlines()[0] if str(error) else 'out of memory'})"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of device memory that KV cannot have. total: of the device.

    in_use: taken before any step: weights, libraries, other processes. step: what the largest eager step and the
    runner's own tables add. recorded: what all recorded steps keep.
    """

    total: int
    in_use: int
    step: int
    recorded: int

    def budget(self, utilization: float) -> int:
        """Bytes left for KV when `utilization` of the device may be used."""
        return int(self.total * utilization) - self.in_use - self.step - self.recorded

    def describe(self, kv_bytes: int, free: int) -> str:
        """One line on where the memory is. free: bytes that nobody holds now."""
        parts = (
            (self.in_use, "weights and libraries"),
            (kv_bytes, "KV"),
            (self.recorded, "recorded steps"),
            (self.step, "kept for the largest step"),
            (free, "free"),
        )
        sizes = ", ".join(f"{what} {size / 2**30:.2f}" for size, what in parts)
        return f"memory in GiB of {self.total / 2**30:.2f}: {sizes}"


def measure_step(device: Device, profile: Callable[[], None]) -> Footprint:
    """What the largest step takes. profile: runs it once, weights loaded, so that it shows in the device's peak."""
    device.empty_cache()
    device.reset_peak()
    before = device.memory()
    profile()
    device.synchronize()
    after = device.memory()
    activations = max(0, after.peak_torch - before.peak_torch)
    libraries = max(0, after.non_torch - before.non_torch)
    return Footprint(total=before.total, in_use=before.total - before.free, step=activations + libraries, recorded=0)


def measure_recorded(device: Device, records: Sequence[Callable[[], None]], *, num_shapes: int) -> int:
    """Bytes that `num_shapes` recorded steps keep, when `records` record the largest ones.

    All share the memory of the largest for their results; beside that each keeps some of the driver's, as these do.
    """
    device.synchronize()
    device.empty_cache()
    before = device.memory()
    for record in records:
        record()
    device.synchronize()
    device.empty_cache()
    after = device.memory()
    taken = max(0, before.free - after.free)
    each = max(0, after.non_torch - before.non_torch) // max(1, len(records))
    return taken + each * max(0, num_shapes - len(records))
