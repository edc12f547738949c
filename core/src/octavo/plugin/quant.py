"""How a quantized checkpoint is read: a format says, matrix by matrix, which tensors hold it and what they mean.

    quantization_config ─detect─> QuantFormat ─layer(MatrixSpec)─> QuantLayer
                                                                    tensors   which, and how ranks divide them
                                                                    scheme    what kernels match, and how to dequantize

Core's own formats (GGUF's blocks, and those of `--quantization`) come in by this door too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from octavo.plugin.specs import QuantScheme


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """One weight W [N, K] of a model, as the model's config has it and before ranks divide it.

    name: its module in the checkpoint, "model.layers.0.self_attn.q_proj". kind: what it does; an "embedding" may serve
    as the head too. out_features N, in_features K.
    """

    name: str
    kind: Literal["linear", "embedding", "head"]
    out_features: int
    in_features: int


@dataclass(frozen=True, kw_only=True)
class Along:
    """Along which dimension of a tensor the weight's rows (or columns) lie: `features` of them are `entries` there.

        weight uint8 [N, K / 2], two columns a byte   rows Along(dim=0)   columns Along(dim=1, features=2)
        scales [N, K / 128]                           rows Along(dim=0)   columns Along(dim=1, features=128)
        qweight int32 [K / 8, N]                      rows Along(dim=1)   columns Along(dim=0, features=8)
        blocks of 32 columns in 18 bytes                                  columns Along(dim=1, features=32, entries=18)

    The last group of features may be short; only there can a weight be cut within a group.
    """

    dim: int
    features: int = 1
    entries: int = 1


@dataclass(frozen=True, kw_only=True)
class QuantTensor:
    """One tensor of a quantized weight.

    shape: the whole tensor's in the checkpoint. dtype: torch name of what kernels get, or "model" for the model's own;
    numbers of another float dtype are converted, anything else is refused.
    rows, columns: where the weight's output and input features lie. A rank gets the part that belongs to its own; None:
    the tensor has no such dimension, and every rank gets all of it. Weights that one kernel call serves (q, k and v)
    are joined along `rows`; where that is None, only if their tensors are equal.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: Along | None = None
    columns: Along | None = None


@dataclass(frozen=True, kw_only=True)
class QuantLayer:
    """How one weight is kept. tensors: by suffix, "weight_scale" for NAME.weight_scale: what `LinearKernel.prepare` and
    the scheme's `dequantize` are given. unused: further suffixes that the checkpoint may hold and nobody needs."""

    scheme: QuantScheme
    tensors: Mapping[str, QuantTensor]
    unused: tuple[str, ...] = ()


class QuantFormat(Protocol):
    """A quantization format, made with a checkpoint's config and asked once for every matrix of the model.

    The config is the `quantization_config` of a Hugging Face checkpoint; for GGUF {"quant_method": "gguf", "types":
    {name: block type}}; for `--quantization NAME` on a plain checkpoint {"quant_method": "online", "method": NAME}.
    """

    name: ClassVar[str]

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """True if `config` is of this format."""
        ...

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError, saying what is wrong, for a config that it cannot serve."""
        ...

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        """How the checkpoint keeps this matrix; None: plainly. Raises ValueError for one that it cannot hold."""
        ...


def plain_weight(spec: MatrixSpec) -> QuantTensor:
    """The tensor "weight" [N, K] of a plain matrix, in the model's dtype: also what a format that quantizes while the
    checkpoint is loaded begins with."""
    return QuantTensor(
        shape=(spec.out_features, spec.in_features), dtype="model", rows=Along(dim=0), columns=Along(dim=1)
    )
