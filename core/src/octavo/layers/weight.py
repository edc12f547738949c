"""The weight of a matrix on its way from the checkpoint to a kernel: all its tensors, cut to this rank's share.

checkpoint            NAME.weight_packed [N, K / 2]     NAME.weight_scale [N, K / 128]
this rank's rows r    tensors["weight_packed"][r]       tensors["weight_scale"][r]
joined with others    cat along their `rows`            likewise                          -> LinearKernel.prepare
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from octavo.errors import CheckpointError, ConfigError, UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.plugin.quant import Along, MatrixSpec, QuantTensor, plain_weight
from octavo.plugin.specs import QuantScheme
from octavo.plugin.torch import dequantize_weight
from octavo.weights.slots import CheckpointTensor, Slot

Tensor = torch.Tensor
Range = tuple[int, int]
"""(start, length)"""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """This rank's part of a matrix, on the device. tensors, kinds: by suffix; a plain one has "weight" only.

    num_rows, num_columns: of the weight that they stand for.
    """

    tensors: Mapping[str, Tensor]
    kinds: Mapping[str, QuantTensor]
    scheme: QuantScheme | None
    num_rows: int
    num_columns: int

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers [num_rows, num_columns]. Raises UnsupportedModelError if its format cannot give them."""
        if self.scheme is None:
            return self.tensors["weight"].to(dtype)
        weight = dequantize_weight(self.tensors, self.scheme, dtype)
        if weight.shape != (self.num_rows, self.num_columns):
            raise UnsupportedModelError(
                f"the `dequantize` of {self.scheme.packing!r} gives {list(weight.shape)} for a weight of "
                f"{[self.num_rows, self.num_columns]}"
            )
        return weight

    def padded(self, num_rows: int) -> Weight:
        """With zeros below, in every tensor: rows that nobody reads."""
        tensors = dict(self.tensors)
        for suffix, kind in self.kinds.items():
            if kind.rows is not None:
                tensor, dim = tensors[suffix], kind.rows.dim
                shape = list(tensor.shape)
                shape[dim] = entries(kind.rows, num_rows) - shape[dim]
                tensors[suffix] = torch.cat((tensor, tensor.new_zeros(shape)), dim)
        return Weight(
            tensors=tensors, kinds=self.kinds, scheme=self.scheme, num_rows=num_rows, num_columns=self.num_columns
        )


def load_weight(
    ctx: BuildContext,
    spec: MatrixSpec,
    done: Callable[[Weight], object],
    *,
    rows: Sequence[Range],
    columns: Range | None = None,
) -> None:
    """Ask for every tensor of the matrix, and call `done` when the last of them has come.

    rows: the ranges of output features that this rank takes, in this order. columns: its input features, None for all.
    A quantized weight comes as a plain one if the context asks for that. Raises ConfigError if its format cannot be
    divided there.
    """
    quant = ctx.quant(spec)
    kinds = {"weight": plain_weight(spec)} if quant is None else dict(quant.tensors)
    scheme = None if quant is None else quant.scheme
    raw: dict[str, Tensor] = {}
    num_rows = sum(length for _, length in rows)
    num_columns = spec.in_features if columns is None else columns[1]

    def take(suffix: str, places: Sequence[tuple[int, Range]], tensor: CheckpointTensor) -> None:
        raw[suffix] = own_copy(ctx, tensor, kinds[suffix], places)
        if len(raw) < len(kinds):
            return
        weight = Weight(tensors=dict(raw), kinds=kinds, scheme=scheme, num_rows=num_rows, num_columns=num_columns)
        raw.clear()
        if scheme is not None and ctx.dequantize:
            weight = Weight(
                tensors={"weight": weight.plain(ctx.dtype)},
                kinds={"weight": plain_weight(spec)},
                scheme=None,
                num_rows=num_rows,
                num_columns=num_columns,
            )
        done(weight)

    for suffix, kind in kinds.items():
        name = f"{spec.name}.{suffix}"
        places = (
            [_place(kind.columns, columns, spec.in_features, f"{name} at input feature")]
            if columns is not None and kind.columns is not None
            else [_place(kind.rows, part, spec.out_features, f"{name} at output feature") for part in rows]
            if kind.rows is not None and tuple(rows) != ((0, spec.out_features),)
            else []
        )
        slot = Slot(shape=kind.shape, load=partial(take, suffix, places), dtype=dtype_of(ctx, kind))
        ctx.weights.add(name, slot)
    for suffix in () if quant is None else quant.unused:
        ctx.weights.ignored.append(re.escape(f"{spec.name}.{suffix}"))


def own_copy(
    ctx: BuildContext, tensor: CheckpointTensor, kind: QuantTensor, places: Sequence[tuple[int, Range]]
) -> Tensor:
    """The parts of a tensor, (dim, range) each, joined, on the device: the file may be closed."""
    dtype = dtype_of(ctx, kind)
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise CheckpointError(
            f"{tensor.name} holds {tensor.dtype}, its format says {dtype}; does the quantization config belong to it?",
            path=tensor.source,
        )
    pieces = [tensor.read(dim=dim, start=start, length=length) for dim, (start, length) in places]
    whole = tensor.read() if not places else pieces[0] if len(pieces) == 1 else torch.cat(pieces, places[0][0])
    return whole.to(device=ctx.torch_device, dtype=dtype, copy=True)


def dtype_of(ctx: BuildContext, kind: QuantTensor) -> torch.dtype:
    """What a tensor is handed out in."""
    dtype: torch.dtype = ctx.dtype if kind.dtype == "model" else getattr(torch, kind.dtype)
    return dtype


def entries(along: Along, features: int) -> int:
    """How many entries the first `features` features take."""
    return -(-features // along.features) * along.entries


def _place(along: Along, part: Range, total: int, what: str) -> tuple[int, Range]:
    """(dim, range of entries) of a range of features. Raises ConfigError for a cut within a group."""
    start, length = part
    for cut in (start, start + length):
        if cut % along.features and cut != total:
            raise ConfigError(
                f"{what} {cut} cannot be cut: {along.features} features are packed together; use fewer ranks, or a "
                "checkpoint in another format"
            )
    first = entries(along, start)
    return along.dim, (first, entries(along, start + length) - first)


def runs(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Neighbours that one kernel call can serve, together."""
    found: list[list[Weight]] = []
    for weight in weights:
        if found and _join(found[-1][-1], weight):
            found[-1].append(weight)
        else:
            found.append([weight])
    return found


def _join(upper: Weight, lower: Weight) -> bool:
    if upper.scheme != lower.scheme or upper.kinds.keys() != lower.kinds.keys():
        return False
    return all(
        upper.num_rows % kind.rows.features == 0
        if kind.rows is not None
        else torch.equal(upper.tensors[suffix], lower.tensors[suffix])
        for suffix, kind in upper.kinds.items()
    )


def joined(run: Sequence[Weight]) -> Weight:
    """One of `runs` as one weight, its rows below each other."""
    first = run[0]
    if len(run) == 1:
        return first
    tensors = {
        suffix: first.tensors[suffix]
        if kind.rows is None
        else torch.cat([weight.tensors[suffix] for weight in run], kind.rows.dim)
        for suffix, kind in first.kinds.items()
    }
    return Weight(
        tensors=tensors,
        kinds=first.kinds,
        scheme=first.scheme,
        num_rows=sum(weight.num_rows for weight in run),
        num_columns=first.num_columns,
    )
