"""The Pallas kernel: its numbers in Pallas's interpreter, and its compilation by the TPU's own compiler."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles here: no chip to share

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVView
from octavo.plugin.torch import TorchDevice
from octavo_tpu.attention import MatmulAttention
from octavo_tpu.attention_blocks import QueryBlocks
from octavo_tpu.kernels.paged_attention import attend, paged_attention

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
KINDS = [
    {"window": None, "softcap": None},
    {"window": 40, "softcap": None},
    {"window": None, "softcap": 20.0},
    {"window": 7, "softcap": 5.0},
]


def inputs(width: int, group: int, dim: int, page_size: int, *, num_kv_heads: int = 2) -> dict[str, Any]:
    """Blocks of `width` query tokens over contexts of many lengths: whole ones, part ones, and empty ones."""
    rng = np.random.default_rng(0)
    num_pages = -(-160 // page_size)
    table = 1 + rng.permutation(4 * num_pages).reshape(4, num_pages).astype(np.int32)
    shape = (4 * num_pages + 1, num_kv_heads, page_size, dim)
    first = np.array([0, 150 - width, 37, 64, 0, 9], np.int32)
    return {
        "q": rng.standard_normal((6, num_kv_heads, width * group, dim), np.float32),
        "k_cache": rng.standard_normal(shape, np.float32),
        "v_cache": rng.standard_normal(shape, np.float32),
        "table": table,
        "seq": np.array([0, 1, 2, 3, 3, 0], np.int32),
        "first": first,
        "count": np.array([width, width, width, max(1, width - 3), 0, 1], np.int32),
    }


def expected(data: dict[str, Any], width: int, *, window: int | None, softcap: float | None) -> torch.Tensor:
    """The same by `MatmulAttention`, which other tests hold against core's reference."""
    dim = data["q"].shape[-1]
    num_kv_heads, group = data["q"].shape[1], data["q"].shape[2] // width
    spec = AttentionSpec(
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        dtype="float32",
        kv_dtype="float32",
        block_size=data["k_cache"].shape[2],
        window=window,
        softcap=softcap,
    )
    limits = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=160)
    t = {name: torch.from_numpy(array.copy()) for name, array in data.items()}
    blocks = QueryBlocks(width=width, seq=t["seq"], first=t["first"], count=t["count"])
    kv = KVView(k=t["k_cache"], v=t["v_cache"])
    return MatmulAttention(spec, limits, TorchDevice("cpu")).attend(t["q"], kv, t["table"], blocks, AttnLayer(index=0))


def valid(data: dict[str, Any], width: int) -> np.ndarray[Any, Any]:
    """[NB, 1, R, 1]: the rows of real tokens."""
    rows = np.arange(data["q"].shape[2]) // (data["q"].shape[2] // width)
    return (rows[None] < data["count"][:, None])[:, None, :, None]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"window {kind['window']} softcap {kind['softcap']}")
@pytest.mark.parametrize(("width", "group", "page_size"), [(1, 3, 16), (16, 3, 16), (16, 1, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interpreted_the_kernel_gives_the_numbers(
    dtype: str, width: int, group: int, page_size: int, kind: dict[str, Any]
) -> None:
    data = inputs(width, group, 64, page_size)
    as_given = {name: jnp.asarray(x, dtype if x.dtype == np.float32 else None) for name, x in data.items()}
    rounded = {name: np.asarray(x, np.float32 if x.dtype != jnp.int32 else np.int32) for name, x in as_given.items()}
    run = functools.partial(
        attend,
        width=width,
        scale=64**-0.5,
        window=kind["window"] or 0,
        softcap=kind["softcap"] or 0.0,
        interpret=True,
    )
    got = np.asarray(jax.jit(run)(**as_given), np.float32)
    want = expected(rounded, width, **kind).numpy()
    error = 2e-2 if dtype == "bfloat16" else 2e-5
    real = valid(data, width)
    np.testing.assert_allclose(np.where(real, got, 0), np.where(real, want, 0), atol=error, rtol=error)
    assert np.isfinite(got).all()


def test_the_kernel_has_no_races() -> None:
    data = {name: jnp.asarray(x) for name, x in inputs(16, 3, 64, 16).items()}
    run = functools.partial(attend, width=16, scale=0.125, interpret=pltpu.InterpretParams(detect_races=True))
    got = np.asarray(jax.jit(run)(**data))
    want = expected(inputs(16, 3, 64, 16), 16, window=None, softcap=None).numpy()
    np.testing.assert_allclose(np.where(valid(data, 16), got - want, 0), 0, atol=2e-5)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def chip(request: pytest.FixtureRequest) -> Any:
    """A chip that is not here, for libtpu to compile for."""
    return topologies.get_topology_desc(platform="tpu", topology_name=request.param).devices[0]


def compile_for(chip: Any, dtype: str, *, width: int, group: int, dim: int, page: int, **kind: Any) -> Any:
    place = SingleDeviceSharding(chip)

    def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    num_blocks, num_kv_heads, cache = 24, 4, (64, 4, page, dim)
    arguments = (
        array((num_blocks, num_kv_heads, width * group, dim), dtype),
        array(cache, dtype),
        array(cache, dtype),
        array((8, 32)),
        array((num_blocks,)),
        array((num_blocks,)),
        array((num_blocks,)),
    )
    run = functools.partial(attend, width=width, scale=dim**-0.5, **kind)
    return jax.jit(run).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("dtype", "width", "group", "dim", "page", "kind"),
    [
        ("bfloat16", 1, 8, 128, 64, {}),
        ("bfloat16", 16, 3, 64, 16, {"window": 512}),
        ("bfloat16", 16, 2, 256, 64, {"softcap": 50.0, "window": 4096}),
        ("float32", 16, 3, 64, 16, {}),
    ],
)
def test_the_tpu_compiler_takes_the_kernel(
    chip: Any, dtype: str, width: int, group: int, dim: int, page: int, kind: dict[str, Any]
) -> None:
    text = compile_for(chip, dtype, width=width, group=group, dim=dim, page=page, **kind).as_text()
    assert "tpu_custom_call" in text


def test_the_operator_of_torch_lowers_to_the_kernel() -> None:
    """Through torch_tpu's door, as far as it goes without a chip: shapes of the result, and StableHLO for the TPU."""
    import xla_cpu

    xla_cpu.start()
    from octavo_tpu.attention import paged_attention_op

    op = paged_attention_op()
    data = inputs(16, 3, 64, 16)
    tensors = [
        torch.from_numpy(x).to("meta", torch.bfloat16 if x.dtype == np.float32 else torch.int32) for x in data.values()
    ]
    out = op._abstract_fn(*tensors, 16, 0.125, 0, 0.0)
    assert out.shape == data["q"].shape
    assert out.dtype == torch.bfloat16
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == np.float32 else x.dtype) for x in data.values()]
    run = functools.partial(paged_attention, width=16, scale=0.125, window=0, softcap=0.0)
    text = jax.export.export(jax.jit(run), platforms=["tpu"])(*shapes).mlir_module()
    assert "tpu_custom_call" in text
