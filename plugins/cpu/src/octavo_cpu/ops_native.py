"""The small ops of the catalogue by the compiled library: norms, rotation, gates, and both ends of a model.

Shapes: T tokens, D features or head size, H query heads, Hkv kv heads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from octavo.plugin import YES, OpContext, Support, no
from octavo_cpu import native

Tensor = torch.Tensor

DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
"""`Dtype` of api.h."""

NORMS = {"none": 0, "head": 1, "row": 2}
MAX_HEAD = 1024


class NormArgs(ctypes.Structure):
    """`octavo::NormArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        *((name, c_int64) for name in ("num_rows", "width", "group", "outer_stride", "inner_stride")),
        ("eps", c_float),
        *((name, c_int32) for name in ("dtype", "weight_dtype", "reserved")),
    )


class KVStrides(ctypes.Structure):
    """`octavo::KVStrides`."""

    _fields_ = tuple((name, c_int64) for name in ("dtype", "block_size", "block", "head", "token"))


class QkvArgs(ctypes.Structure):
    """`octavo::QkvArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "positions", "cos_sin", "q_weight", "k_weight", "k_cache", "v_cache")),
        *((name, c_void_p) for name in ("slots", "k_scales", "v_scales")),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotated")),
        ("k_strides", KVStrides),
        ("v_strides", KVStrides),
        *((name, c_float) for name in ("eps", "k_scale", "v_scale")),
        *((name, c_int32) for name in ("dtype", "weight_dtype", "norm")),
    )


class GateArgs(ctypes.Structure):
    """`octavo::GateArgs`."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("dtype", c_int32),
        ("gate", c_int32),
    )


class AddArgs(ctypes.Structure):
    """`octavo::AddArgs`."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("size", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    )


class JoinArgs(ctypes.Structure):
    """`octavo::JoinArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("left", "right", "out")),
        *((name, c_int64) for name in ("num_rows", "left_bytes", "right_bytes")),
    )


class EmbeddingArgs(ctypes.Structure):
    """`octavo::EmbeddingArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "table", "packed", "out")),
        *((name, c_int64) for name in ("num_tokens", "width", "num_rows", "first")),
        ("scale", c_float),
        *((name, c_int32) for name in ("scaled", "wide_ids", "dtype")),
    )


class LogitsArgs(ctypes.Structure):
    """`octavo::LogitsArgs`."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int32),
        ("reserved", c_int32),
    )


def supports(context: OpContext) -> Support:
    """For ops on activations in bfloat16 or float32."""
    if context.device_type != "cpu":
        return no(f"needs a cpu device, not {context.device_type}")
    if context.dtype not in native.DTYPES:
        return no(f"no {context.dtype} activations")
    return YES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the catalogue's `rms_norm`."""
    width, group, outer, inner = weight.shape[0], 1, 0, 0
    if x.is_contiguous():
        outer = width
    elif x.dim() == 2 and x.stride(1) == 1:
        outer = x.stride(0)
    elif x.dim() == 3 and x.stride(2) == 1:
        group, outer, inner = x.shape[1], x.stride(0), x.stride(1)
    else:
        x, outer = x.contiguous(), width
    out = native.empty(tuple(x.shape), x.dtype)
    rows, kinds = x.numel() // width, (DTYPES[x.dtype], DTYPES[weight.dtype])
    native.step_function("norm")(
        NormArgs(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, width, group, outer, inner, eps, *kinds)
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the catalogue's `add_rms_norm`: the sum is written into `residual`, the norm into x."""
    rows, width = x.shape
    residual = residual.contiguous()
    out = x if x.is_contiguous() else native.empty((rows, width), x.dtype)
    native.step_function("norm")(
        NormArgs(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            1,
            x.stride(0),
            0,
            eps,
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
        )
    )
    return out, residual


def scaled_add(x: Tensor, residual: Tensor, scale: float | None = None) -> Tensor:
    """As the catalogue's `scaled_add`: written into `residual`."""
    x, residual = x.contiguous(), residual.contiguous()
    factor = 1.0 if scale is None else scale
    native.step_function("add")(AddArgs(x.data_ptr(), residual.data_ptr(), x.numel(), factor, DTYPES[residual.dtype]))
    return residual


def supports_qkv(context: OpContext) -> Support:
    """For `qkv_norm_rope` and `qkv_norm_rope_write`."""
    size = context.params.get("head_dim", 0)
    assert isinstance(size, int)
    if size > MAX_HEAD:
        return no(f"heads of at most {MAX_HEAD}, not {size}")
    return supports(context)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin; None of none."""
    return None if tensor is None else tensor.data_ptr()


def strides_of(cache: Tensor) -> KVStrides:
    """Of a cache [B, Hkv, N, D] whose last dimension is contiguous."""
    block, head, token, one = cache.stride()
    assert one == 1, f"the cache's last dimension has stride {one}, not 1"
    return KVStrides(DTYPES[cache.dtype], cache.shape[2], block, head, token)


def normed_and_rotated(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[QkvArgs, Tensor, Tensor]:
    """The arguments for a packed projection, in place; it and the table, contiguous."""
    qkv = qkv.contiguous()
    dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    if cos_sin is not None and cos_sin.dtype != qkv.dtype:
        cos_sin = cos_sin.to(qkv.dtype)
    args = QkvArgs(
        qkv=qkv.data_ptr(),
        positions=positions.data_ptr(),
        cos_sin=address(cos_sin),
        q_weight=address(q_weight),
        k_weight=address(k_weight),
        num_tokens=qkv.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        rotated=0 if cos_sin is None else cos_sin.shape[1],
        eps=eps,
        dtype=DTYPES[qkv.dtype],
        weight_dtype=DTYPES[qkv.dtype if q_weight is None else q_weight.dtype],
        norm=NORMS["none" if q_weight is None else "head" if q_weight.shape[0] == dim else "row"],
    )
    return args, qkv, positions if cos_sin is None else cos_sin


def qkv_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the catalogue's `qkv_norm_rope`: queries and keys are written over what they were in qkv."""
    args, qkv, _kept = normed_and_rotated(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads)
    native.step_function("qkv")(args)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, args.head_dim)
    return heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]


def qkv_norm_rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the catalogue's `qkv_norm_rope_write`: queries are written over what they were in qkv."""
    args, qkv, _kept = normed_and_rotated(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads)
    args.k_cache, args.v_cache, args.slots = k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr()
    args.k_strides, args.v_strides = strides_of(k_cache), strides_of(v_cache)
    if isinstance(k_scale, Tensor):
        args.k_scales = k_scale.data_ptr()
    else:
        args.k_scale = k_scale
    if isinstance(v_scale, Tensor):
        args.v_scales = v_scale.data_ptr()
    else:
        args.v_scale = v_scale
    native.step_function("qkv")(args)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, args.head_dim)
    return heads[:, :num_heads], k_cache, v_cache


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """As the catalogue's `act_and_mul`."""
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = native.empty((rows, width), x.dtype)
    native.step_function("gate")(
        GateArgs(x.data_ptr(), out.data_ptr(), rows, width, DTYPES[x.dtype], native.GATES.index(kind))
    )
    return out


def join(left: Tensor, right: Tensor) -> Tensor:
    """As the catalogue's `join`."""
    left, right = left.contiguous(), right.contiguous()
    rows, size = len(left), left.element_size()
    out = native.empty((rows, left.shape[1] + right.shape[1]), left.dtype)
    widths = left.shape[1] * size, right.shape[1] * size
    native.step_function("join")(JoinArgs(left.data_ptr(), right.data_ptr(), out.data_ptr(), rows, *widths))
    return out


def embedding(ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """As the catalogue's `embedding`; zeros for an id that the table does not have."""
    return embedding_part(ids, table, 0, scale)


def embedding_part(ids: Tensor, table: Tensor, first: int, scale: float | None = None) -> Tensor:
    """As the catalogue's `embedding_part`."""
    return rows_of_table(ids, (table.data_ptr(), None), table.shape, table.dtype, first, scale)


def rows_of_table(
    ids: Tensor,
    where: tuple[int | None, int | None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    first: int,
    scale: float | None,
) -> Tensor:
    """Vectors of ids. where: addresses of the table, and of the `octavo::Linear` if a packed weight is the table."""
    ids, (num_rows, width) = ids.contiguous(), shape
    out = native.empty((len(ids), width), dtype)
    sizes, wide = (len(ids), width, num_rows, first), ids.dtype == torch.int64
    factor = (1.0, False) if scale is None else (scale, True)
    native.step_function("embedding")(
        EmbeddingArgs(ids.data_ptr(), *where, out.data_ptr(), *sizes, *factor, wide, DTYPES[dtype])
    )
    return out


def logits(x: Tensor, scale: float | None = None, softcap: float | None = None) -> Tensor:
    """As the catalogue's `logits`."""
    if x.dtype == torch.float32 and scale is None and softcap is None:
        return x
    x = x.contiguous()
    out = native.empty(tuple(x.shape), torch.float32)
    native.step_function("logits")(
        LogitsArgs(x.data_ptr(), out.data_ptr(), x.numel(), scale or 1.0, softcap or 0.0, DTYPES[x.dtype])
    )
    return out
