"""Compile the products of few rows for a chip that is not here; prints one JSON line a kernel. Run as a script:

python compile_products.py sm_90 [octavo_cuda]     with a module: with the overlap that its `overlap_for` gives
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator

import compile_ops_ahead as ahead
import torch
import triton

from octavo.triton import activation, gemv, norm, skinny
from octavo.triton.gemv import GemvConfig
from octavo.triton.overlap import IN_ORDER, Overlap
from octavo.triton.skinny import SkinnyConfig

MARKS = ("wgmma", "mma.sync", "tcgen05.mma", "v_mfma", "cp.async")
FIRST = ("prefetch.global.L2", "griddepcontrol.wait", "ld.global", "cp.async")
"""Where each first occurs tells what happens before the kernel waits for the one before it."""


def cases(overlap: Overlap, *, fp8: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    wide, narrow = zeros(1024, 1024), zeros(1000, 776)
    yield (
        "lanes gated",
        lambda: gemv.gemv(
            zeros(1, 1024),
            wide,
            gate="silu",
            config=GemvConfig(block_n=16, block_k=256, num_stages=4, dot=False),
            overlap=overlap,
        ),
    )
    yield (
        "dot gated split",
        lambda: gemv.gemv(
            zeros(4, 1024),
            wide,
            zeros(1024),
            gate="gelu",
            config=GemvConfig(block_n=64, block_k=128, split_k=2),
            overlap=overlap,
        ),
    )
    for rows, block_n, warps in ((16, 64, 4), (64, 128, 8), (128, 128, 8)):
        cut = SkinnyConfig(block_n=block_n, block_k=64, programs=12, num_warps=warps, num_stages=3)
        for gate in (None, "silu"):
            yield (
                f"skinny {rows} {gate}",
                lambda r=rows, g=gate, c=cut: skinny.skinny(
                    zeros(r, 1024), wide, zeros(1024), gate=g, config=c, overlap=overlap
                ),
            )
            if fp8:
                x, w = zeros(rows, 1024).to(torch.float8_e4m3fn), wide.to(torch.float8_e4m3fn)
                scales = torch.zeros(rows), torch.zeros(1024)
                yield (
                    f"skinny fp8 {rows} {gate}",
                    lambda x=x, w=w, s=scales, g=gate, c=cut: skinny.skinny(
                        x, w, scale=s[1], x_scale=s[0], out_dtype=torch.bfloat16, gate=g, config=c, overlap=overlap
                    ),
                )
    yield "skinny odd", lambda: skinny.skinny(zeros(20, 776), narrow, overlap=overlap)
    yield "add_rms_norm", lambda: norm.add_rms_norm(zeros(4, 1024), zeros(4, 1024), zeros(1024), 1e-6, overlap=overlap)
    yield "act_and_mul", lambda: activation.act_and_mul(zeros(4, 1024), "silu", overlap=overlap)


def main(target: str, platform: str = "") -> None:
    overlap = importlib.import_module(f"{platform}.overlap").overlap_for((9, 0)) if platform else IN_ORDER
    launches: list[ahead.Launch] = []
    ahead.catch_launches(launches)
    for name, call in cases(overlap, fp8=target == "sm_90"):
        launches.clear()
        call()
        for _, source, options in launches:
            built = triton.compile(source, target=ahead.TARGETS[target], options=options)
            text = built.asm.get("ptx") or built.asm["amdgcn"]
            line = {
                "name": name,
                "shared": built.metadata.shared,
                "marks": [mark for mark in MARKS if mark in text],
                "first": {mark: text.find(mark) for mark in FIRST},
            }
            print(json.dumps(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
