"""What kernels do before they wait for the one before them: as compiled for Hopper, and on a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from octavo.triton import activation, gemv, norm, skinny
from octavo.triton.overlap import IN_ORDER, Overlap
from octavo_cuda.overlap import overlap_for

COMPILER = Path(__file__).parents[3] / "tests" / "unit" / "triton" / "compile_products.py"


def test_cards_before_hopper_start_kernels_in_order() -> None:
    assert overlap_for((8, 9)) is IN_ORDER
    assert overlap_for((9, 0)).early
    assert overlap_for((12, 0)).options == {"launch_pdl": True}


@pytest.mark.slow
def test_weights_are_asked_for_before_the_wait_and_results_of_others_read_behind_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(COMPILER), "sm_90", "octavo_cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = {line["name"]: line["first"] for line in map(json.loads, done.stdout.splitlines())}
    for name, first in kernels.items():
        assert first["griddepcontrol.wait"] > 0, name
        if name.startswith(("lanes", "dot", "skinny 16", "skinny 64", "skinny 128")):
            assert 0 < first["prefetch.global.L2"] < first["griddepcontrol.wait"] < first["cp.async"], name
    # A weight of a norm may be read at once; an activation has nothing that is constant.
    assert kernels["act_and_mul"]["griddepcontrol.wait"] < kernels["act_and_mul"]["ld.global"]
    assert 0 < kernels["add_rms_norm"]["ld.global"] < kernels["add_rms_norm"]["griddepcontrol.wait"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 100])
def test_a_recorded_chain_of_early_kernels_has_the_bits_of_one_in_order(num_tokens: int) -> None:
    hidden, inner, layers = 1024, 3072, 12
    g = torch.Generator("cuda").manual_seed(num_tokens)

    def weight(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g, device="cuda").mul_(size[-1] ** -0.5).bfloat16()

    gate_up = [weight(2 * inner, hidden) for _ in range(layers)]
    down = [weight(hidden, inner) for _ in range(layers)]
    given = [torch.randn(num_tokens, hidden, generator=g, device="cuda").bfloat16() for _ in range(2)]
    norm_weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    counters = gemv.make_counters(2 * inner, given[0].device)
    product = gemv.gemv if num_tokens <= gemv.MAX_ROWS else skinny.skinny

    def chain(overlap: Overlap, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for i in range(layers):
            x, residual = norm.add_rms_norm(x, residual, norm_weight, 1e-6, overlap=overlap)
            if i % 2:
                y = product(x, gate_up[i], gate="silu", counters=counters, overlap=overlap)
            else:
                y = product(x, gate_up[i], counters=counters, overlap=overlap)
                y = activation.act_and_mul(y, "silu", overlap=overlap)
            x = product(y, down[i], counters=counters, overlap=overlap)
        return x

    expected = chain(IN_ORDER, *(t.clone() for t in given))
    early = overlap_for(torch.cuda.get_device_capability())
    chain(early, *(t.clone() for t in given))  # compiled, so that recording does not have to
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(early, *(t.clone() for t in given))
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, expected)
