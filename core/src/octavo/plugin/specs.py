"""What kernels are asked about: one frozen spec object per kind, never a growing list of arguments.

Shapes: N = out_features, K = in_features, H = heads, D = head_dim, B = blocks, T = tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.plugin.contracts import Device

NumFormat = str
"""A number format by name: "float32", "bfloat16", "int8", "int4", "uint4", "fp8_e4m3", "fp4_e2m1", ... ."""


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """What a quantized weight is: made by a `QuantFormat`, matched by kernels.

    weight / act: number formats; act None means that activations stay in the model dtype.
    group: (rows, columns) of one scale for granularity "group" and "block".
    packing: how codes lie in memory, the format's name and whatever else decides it: "gguf:Q4_1", "acme_groups:128".
        Weights of equal schemes can be joined. For "gguf:*" the single tensor is "weight", uint8 [N, bytes of one row],
        exactly as in the file.
    dequantize: (tensors by suffix, this scheme, dtype) -> W [N, K] in that dtype, on the device of the tensors: the
        reference. With it every platform serves the format; without it only those with a kernel of their own.
    int4_groups: (tensors by suffix, this scheme) -> what `octavo.plugin.torch.int4_groups` gives, for weights that are
        4-bit codes: every platform's 4-bit kernel then serves the format. None: they are not.
    """

    weight: NumFormat
    act: NumFormat | None = None
    granularity: Literal["tensor", "channel", "token", "group", "block"] = "group"
    group: tuple[int, int] | None = None
    symmetric: bool = True
    dynamic_act: bool = False
    packing: str = "none"
    dequantize: Callable[[Mapping[str, Tensor], QuantScheme, torch.dtype], Tensor] | None = field(
        default=None, repr=False
    )
    int4_groups: Callable[[Mapping[str, Tensor], QuantScheme], tuple[Tensor, Tensor, Tensor]] | None = field(
        default=None, repr=False
    )


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One matrix multiplication y[T, N] = x[T, K] @ W[N, K]^T (+ bias), as a kernel needs to know it.

    scheme: None for a plain weight in `act_dtype`. Dtypes by torch name. max_tokens: the largest T.
    gate: the first half of the N outputs are gates: `apply` returns act(gate) * the second half, [T, N / 2]. A kind of
        the op `act_and_mul`, whose roundings hold: the product, the activation and their product, each to `out_dtype`.
        Core asks it only of kernel classes that list the kind in a class attribute `gates`; of others it asks the
        product alone.
    """

    in_features: int
    out_features: int
    act_dtype: str
    out_dtype: str
    scheme: QuantScheme | None = None
    bias: bool = False
    max_tokens: int = 0
    gate: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One kind of attention layer. All layers with equal specs share one backend instance and one plan a step.

    window: a query sees at most this many newest positions, itself included; None: all.
    softcap: logits become cap * tanh(logits / cap). sinks: each head has a learnt extra logit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: str
    kv_dtype: str
    block_size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A routed expert MLP, see `MoEKernel`."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    act_dtype: str
    scheme: QuantScheme | None = None


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What one KV group stores per layer. Layers with equal specs form one group with one block table.

    kind: "full" keeps all positions; "sliding" needs only the last `window`.
    dtype: torch name of the stored element. "int8": codes, with a scale for each token and head behind them.
    """

    kind: Literal["full", "sliding"]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    window: int | None = None

    @property
    def content(self) -> int:
        """Elements of a token's key or value of one head: its numbers, and in int8 the bytes of a float32 scale."""
        return self.head_dim + (4 if self.dtype == "int8" else 0)

    @property
    def block_elements(self) -> int:
        """Elements of one block of one layer, keys and values together."""
        return 2 * self.num_kv_heads * self.block_size * self.content


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """How much KV memory to take for one group: `num_layers` layers of `num_blocks` blocks."""

    spec: KVSpec
    num_layers: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """How KV lies in memory, as data: connectors and offload read only this.

    order: permutation of "BHNC" (blocks, heads, tokens of a block, content); the logical view is always BHNC.
    dtype: torch name of the stored element. alloc: makes the storage, when torch's own will not do.
    """

    block_size: int
    dtype: str
    order: str = "BHNC"
    alloc: Callable[[KVPlan, Device], list[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest step that can ever come: sizes for buffers and capture."""

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """Where an op is used: what a provider may look at to accept or refuse.

    op: catalogue name. dtype: torch name of the activations. params: static facts such as sizes and kinds.
    """

    op: str
    dtype: str
    device_type: str
    params: Mapping[str, object] = field(default_factory=dict)
