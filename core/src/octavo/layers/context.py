"""What a model is built with and what one step hands to it.

`BuildContext` is used while building; `StepState` is the argument of every forward. Nothing is looked up globally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.ops.bind import KernelTable
from octavo.plugin.contracts import AttentionBackend, Communicator, Device, KVView
from octavo.plugin.quant import MatrixSpec, QuantLayer
from octavo.plugin.specs import AttentionSpec, BatchLimits, KVSpec
from octavo.quant.formats import plainly
from octavo.weights.slots import WeightTable


@dataclass
class AttentionTable:
    """All attention layers of a model: one backend per distinct spec, one KV group per distinct KV spec."""

    specs: list[AttentionSpec] = field(default_factory=list)
    backends: list[AttentionBackend] = field(default_factory=list)
    spec_of_layer: list[int] = field(default_factory=list)
    kv_specs: list[KVSpec] = field(default_factory=list)
    kv_of_spec: list[int] = field(default_factory=list)

    def layers_of_kv(self, group: int) -> list[int]:
        """Indices of the layers whose cache belongs to KV group `group`."""
        return [i for i, s in enumerate(self.spec_of_layer) if self.kv_of_spec[s] == group]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """dtype: of activations and plain weights. quant: how the checkpoint keeps a matrix, None: plainly.
    dequantize: turn every quantized weight into a plain one while loading.
    comm: the tensor-parallel group (size 1 without ranks)."""

    device: Device
    dtype: torch.dtype
    kv_dtype: str
    block_size: int
    limits: BatchLimits
    kernels: KernelTable
    comm: Communicator
    weights: WeightTable = field(default_factory=WeightTable)
    attention: AttentionTable = field(default_factory=AttentionTable)
    quant: Callable[[MatrixSpec], QuantLayer | None] = plainly
    dequantize: bool = False

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def op(self, name: str, **params: object) -> Callable[..., Any]:
        """The bound callable of a catalogue op for this model (chosen once, here)."""
        return self.kernels.bind(name, dtype=dtype_name(self.dtype), device=self.device, params=params)

    def attention_layer(self, spec: AttentionSpec) -> tuple[int, int]:
        """Register one attention layer. Returns (layer index, index of its spec)."""
        table = self.attention
        if spec not in table.specs:
            kv = KVSpec(
                kind="full" if spec.window is None else "sliding",
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_size=spec.block_size,
                dtype=spec.kv_dtype,
                window=spec.window,
            )
            if kv not in table.kv_specs:
                table.kv_specs.append(kv)
            table.kv_of_spec.append(table.kv_specs.index(kv))
            table.specs.append(spec)
            table.backends.append(self.kernels.attention_backend(spec, self.limits, self.device))
        index = table.specs.index(spec)
        table.spec_of_layer.append(index)
        return len(table.spec_of_layer) - 1, index


@dataclass(frozen=True, kw_only=True)
class StepState:
    """positions int64 [T]; slots: one int64 [T] per KV group, see `AttnBatch`; plans: one per attention spec;
    kv: one view per layer."""

    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    plans: Sequence[Any]
    kv: Sequence[KVView]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
