"""The contract with `vllm-xpu-kernels`: its real modules are loaded, and take every argument that this plugin gives.

Their kernels are machine code for GPUs, so nothing is computed. The package must be installed (without its
dependencies): without it the tests fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from octavo.plugin import AttentionSpec
from octavo.plugin.torch import TorchDevice
from octavo_xpu import vllm_kernels
from octavo_xpu.attention_vllm import COMPILED, PACKAGE, VllmXpuAttention
from octavo_xpu.device import SyclDevice

STUB = Path(__file__).parent / "xpu_runtime_stub.cpp"

CALL = """
import ctypes, sys
import torch
for name in ("libc10_xpu.so", "libtorch_xpu.so"):
    ctypes.CDLL(f"{sys.argv[1]}/{name}", mode=ctypes.RTLD_GLOBAL)

from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits
from octavo.testing.conformance.paged import Case, build, kv_spec_of
from octavo_xpu import simulated
from octavo_xpu import vllm_kernels
from octavo_xpu.attention_vllm import VllmXpuAttention

spec = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=128, scale=0.125, dtype="bfloat16", kv_dtype="bfloat16", block_size=16,
    window=8,
)
device = simulated.device()
assert VllmXpuAttention.supports(spec, device).ok
backend = VllmXpuAttention(spec, BatchLimits(max_num_tokens=64, max_num_seqs=4, max_model_len=64), device)
if len(sys.argv) > 2:
    backend._options[sys.argv[2]] = 1
for lens in ([(5, 1), (9, 1)], [(0, 7), (3, 1)]):
    inputs = build(Case(spec=spec, lens=lens), VllmXpuAttention.kv_layout(kv_spec_of(spec)), device)
    try:
        plan, out = backend.plan(inputs.batch, graph=False), torch.empty_like(inputs.q)
        backend.run(AttnLayer(index=0), inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    except NotImplementedError as error:  # every argument was taken, and there is a kernel for another device
        assert "'CPU'" in str(error) and "XPU" in str(error), error
    else:
        raise AssertionError("it ran")
print(torch.ops._vllm_fa2_C.varlen_fwd.default._schema)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stub")
    for name in ("libc10_xpu.so", "libtorch_xpu.so"):
        command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(STUB), "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


def call(stub: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CALL, str(stub), *more], capture_output=True, text=True, check=False)


def test_the_operator_takes_every_argument_that_attention_gives(device: SyclDevice, stub: Path) -> None:
    done = call(stub)
    assert done.returncode == 0, done.stderr
    assert "varlen_fwd(Tensor q" in done.stdout


def test_an_argument_that_it_has_not_would_be_noticed(device: SyclDevice, stub: Path) -> None:
    done = call(stub, "window_size_middle")
    assert done.returncode != 0
    assert "varlen_fwd() expected at most" in done.stderr


def test_it_refuses_what_the_package_does_not_take(device: SyclDevice) -> None:
    def spec(**changes: object) -> AttentionSpec:
        facts: dict[str, object] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125}
        facts |= {"dtype": "float16", "kv_dtype": "float16", "block_size": 16, **changes}
        return AttentionSpec(**facts)  # type: ignore[arg-type]

    assert VllmXpuAttention.supports(spec(), device).ok
    for changes, word in (
        ({"dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "int8"}, "int8"),
        ({"sinks": True}, "sinks"),
        ({"causal": False}, "causal"),
        ({"softcap": 30.0}, "softcap"),
        ({"head_dim": 80}, "no kernel for heads of 80 in groups of 2"),
        ({"head_dim": 96}, "no kernel for heads of 96"),
        ({"window": 8}, "no kernel for heads of 64 in groups of 2 with a window"),
        ({"head_dim": 256, "num_heads": 32}, "no kernel for heads of 256 in groups of 16"),
        ({"block_size": 8}, "pages of 16 or multiples of 64 tokens for heads of 64 in groups of 2, not 8"),
        ({"block_size": 32}, "not 32"),
        ({"head_dim": 128, "block_size": 96}, "pages of 16 or 32 or multiples of 64"),
        ({"head_dim": 256}, "pages of multiples of 64 tokens"),
        ({"num_heads": 24, "head_dim": 128, "window": 8, "block_size": 64}, "pages of 16 tokens"),
    ):
        answer = VllmXpuAttention.supports(spec(**changes), device)
        assert not answer.ok
        assert word in answer.reason
    assert "SYCL" in VllmXpuAttention.supports(spec(), TorchDevice("cpu")).reason
    for changes in (
        {"num_heads": 142, "block_size": 32},
        {"head_dim": 128, "block_size": 128, "window": 8},
        {"head_dim": 256, "block_size": 64},
    ):
        assert VllmXpuAttention.supports(spec(**changes), device).ok


@pytest.mark.parametrize("library", ["libattn_kernels_xe_2.so", "libattn_kernels_xe_3.so"])
def test_what_is_said_to_be_compiled_is_what_the_wheel_holds(library: str) -> None:
    """By the names of the files that it was compiled from, which end in one letter for each of causal, local, sinks."""
    [folder] = import_module(PACKAGE).__path__
    text = Path(folder, library).read_bytes()
    prompts = set(re.findall(rb"chunk_policy_head(\d+)(_b16)?_t([tf])([tf])ff", text))
    decodes = set(re.findall(rb"paged_decode_kernel_template_q(\d+)_h(\d+)_p(\d+)_f([tf])f", text))

    def takes_prompts(head: bytes, local: bytes) -> bool:
        # With a window the operator may take causality as its right side.
        wanted = {(causal, local) for causal in ((b"t", b"f") if local == b"t" else (b"t",))}
        return all((head, tile, *flags) in prompts for tile in (b"", b"_b16") for flags in wanted)

    usable = {
        (int(heads), int(head), int(page), local == b"t")
        for heads, head, page, local in decodes
        if int(head) <= 256 and takes_prompts(head, local)
    }
    claimed = {
        (heads, head, page, window)
        for (heads, head), kinds in COMPILED.items()
        for window, pages in zip((False, True), kinds, strict=True)
        for page in pages
    }
    assert claimed == usable


def test_the_pack_is_for_this_platform_alone() -> None:
    assert list(vllm_kernels.PLATFORMS) == ["xpu"]
    assert set(vars(vllm_kernels)) >= {"API", "register_kernels"}
