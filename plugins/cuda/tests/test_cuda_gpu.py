"""What only a card can show. Skipped without one; `pytest -m gpu plugins/cuda/tests` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.plugin import BatchKey, LinearSpec
from octavo.structured.spec import StructuredOutputs
from octavo.testing.conformance.run import run
from octavo.testing.tiny import make_model
from octavo_cuda.device import CudaDevice
from octavo_cuda.graphs import CudaGraphs
from octavo_cuda.linear import TritonLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]

PROMPTS = [[3 + i, 40, 5, 60 + i, 7] * (1 + 3 * i) for i in range(7)]
NUM_TOKENS = 40


@pytest.fixture
def device() -> CudaDevice:
    card = CudaDevice(0)
    card.activate()
    return card


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "cuda=octavo_cuda,cpu=octavo_cpu")


def generate(model: Path, *, temperature: float = 0.0, **options: Any) -> list[list[int]]:
    options = {"platform": "cuda", "max_model_len": 256, "max_num_seqs": 8, "num_kv_blocks": 128} | options
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        for i in range(len(PROMPTS))
    ]
    with LLM(str(model), skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of tokens before the first difference of each sequence."""
    same = 0
    for x, y in zip(a, b, strict=True):
        same += next((i for i, (s, t) in enumerate(zip(x, y, strict=True)) if s != t), len(x))
    return same / sum(map(len, a))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_greedy_tokens_are_those_of_the_cpu_platform(tmp_path: Path, model_type: str) -> None:
    model = make_model(tmp_path, model_type, tokenizer=False)
    ours, theirs = (generate(model, platform=name, dtype="float32") for name in ("cuda", "cpu"))
    assert agreement(ours, theirs) > 0.95


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_steps_give_the_tokens_of_eager_ones(tmp_path: Path, temperature: float) -> None:
    model = make_model(tmp_path, "qwen3", tokenizer=False)
    options = {"dtype": "float32", "temperature": temperature}
    # Padding changes which cuBLAS kernel runs, hence the last bits.
    assert agreement(generate(model, **options), generate(model, enforce_eager=True, **options)) > 0.95


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_running_ahead_changes_no_token(tmp_path: Path, dtype: str) -> None:
    model = make_model(tmp_path, "llama", tokenizer=False)
    ahead, behind = (generate(model, dtype=dtype, run_ahead=depth) for depth in (1, 0))
    assert agreement(ahead, behind) > 0.95


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, enforce_eager: bool) -> None:
    model = make_model(tmp_path, "llama", tokenizer=False)
    options = {"dtype": "float32", "enforce_eager": enforce_eager}
    # Sums of halves are rounded otherwise than sums of the whole.
    assert agreement(generate(model, **options), generate(model, tensor_parallel_size=2, **options)) > 0.95


def test_a_chunked_prompt_continues_as_a_whole_one(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", tokenizer=False)
    whole, chunked = (generate(model, dtype="float32", max_num_batched_tokens=n) for n in (512, 24))
    assert agreement(whole, chunked) > 0.95


def test_rows_that_ask_for_more_are_sampled_behind_a_recorded_step(tmp_path: Path) -> None:
    """Masked rows, filtered ones and rows with logprobs beside plain ones: as in eager steps, and no mask is lost."""
    model = make_model(tmp_path, "llama")
    shape = StructuredOutputs(regex="[a-d]{24}")
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, structured_outputs=shape),
        SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, structured_outputs=shape, n=3),
        SamplingParams(temperature=1.0, seed=2, top_k=5, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
    ]

    def answers(**options: Any) -> list[tuple[str, list[int]]]:
        options |= {"platform": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
        with LLM(str(model), num_kv_blocks=128, **options) as llm:
            results = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        assert all(len(out.logprobs or ()) == NUM_TOKENS for out in results[4].outputs)
        return [(out.text, list(out.token_ids)) for result in results for out in result.outputs]

    recorded = answers()
    for text, _ in recorded[1:5]:
        assert re.fullmatch("[a-d]{24}", text), text
    assert recorded == answers(run_ahead=0)
    assert agreement([ids for _, ids in recorded], [ids for _, ids in answers(enforce_eager=True)]) > 0.95


@dataclass(frozen=True)
class Outputs:
    product: torch.Tensor
    index: torch.Tensor


def test_graphs_share_memory_and_each_replay_gives_its_own_result(device: CudaDevice) -> None:
    runner = CudaGraphs(device.torch_device)
    weight = torch.randn(512, 4096, device="cuda")
    x = torch.randn(64, 512, device="cuda")

    def step(rows: int) -> Callable[[], Outputs]:
        def run_step() -> Outputs:
            product = (x[:rows] @ weight).relu()
            return Outputs(product, product.argmax(dim=-1))

        return run_step

    sizes = (64, 32, 8, 1)
    runner.prepare(BatchKey(num_tokens=1, num_seqs=1), step(1))  # cuBLAS takes a workspace for each stream
    before = torch.cuda.memory_allocated()
    handles = {n: runner.prepare(BatchKey(num_tokens=n, num_seqs=n), step(n)) for n in sizes}
    assert torch.cuda.memory_allocated() - before < 64 * 4096 * 4, "what a graph leaves belongs to the shared pool"
    for seed, n in enumerate((1, 64, 8, 32, 64, 1)):
        x.copy_(torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)))
        found = runner.run(handles[n])
        expected = step(n)()
        torch.testing.assert_close(found.product, expected.product)
        assert torch.equal(found.index, expected.index)
    runner.close()


def test_a_step_that_waits_for_the_host_cannot_be_recorded(device: CudaDevice) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="4 tokens in 4 sequences cannot be recorded"):
        CudaGraphs(device.torch_device).prepare(BatchKey(num_tokens=4, num_seqs=4), lambda: x.sum().item())
    assert x.sum().item() == 4.0, "the card is usable afterwards"


BROKEN_RECORDING = """
import torch
from octavo.plugin import BatchKey
from octavo_cuda.graphs import CudaGraphs
x = torch.ones(4, device="cuda")
try:
    CudaGraphs(torch.device("cuda", 0)).prepare(BatchKey(num_tokens=4, num_seqs=4), lambda: x.sum().item())
except RuntimeError as error:
    print(error)
"""


def test_a_process_whose_recording_failed_ends_as_any_other() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN_RECORDING], capture_output=True, text=True, check=False)
    assert "cannot be recorded" in done.stdout
    assert done.returncode == 0, done.stderr


SHAPES = ((6144, 4096), (1024, 3072), (4096, 14336))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["plain", "gated", "fp8"])
def test_products_agree_with_float32_and_can_be_recorded(device: CudaDevice, n: int, k: int, kind: str) -> None:
    from octavo.triton.linear_fp8 import SCHEME
    from octavo_cuda.fp8 import Fp8Linear

    if kind == "fp8" and device.capability < (8, 9):
        pytest.skip("no fp8 matrix units")
    from octavo.triton import gemv, skinny

    gate = "silu" if kind == "gated" else None
    scheme = SCHEME if kind == "fp8" else None
    spec = LinearSpec(
        in_features=k, out_features=n, act_dtype="bfloat16", out_dtype="bfloat16", scheme=scheme, gate=gate
    )
    table: dict[Any, Any] = {(n, k, bool(gate), rows): gemv.default_config(n, k, rows) for rows in (1, 4, 8)}
    table |= {(n, k, bool(gate), rows): skinny.default_config(n, k, rows) for rows in (16, 128)}
    kernel_class: Any = Fp8Linear if kind == "fp8" else TritonLinear.with_table(table)
    assert kernel_class.supports(spec, device)
    kernel = kernel_class()
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=g).mul_(k**-0.5).to("cuda", torch.bfloat16)
    packed = kernel.prepare({"weight": weight}, spec, device)
    runner = CudaGraphs(device.torch_device)
    for rows in (1, 3, 8, 9, 64, 130):
        x = torch.randn(rows, k, generator=g).to("cuda", torch.bfloat16)
        expected = x.float() @ weight.float().t()
        if gate:
            expected = torch.nn.functional.silu(expected[:, : n // 2]) * expected[:, n // 2 :]
        handle = runner.prepare(BatchKey(num_tokens=rows, num_seqs=rows), lambda x=x: kernel.apply(x, packed, None))
        for _ in range(2):  # a second replay finds the counters of split products as the first left them
            error = (runner.run(handle).float() - expected).norm() / expected.norm()
            assert error < (0.06 if kind == "fp8" else 0.01)
    runner.close()


def test_the_device_is_described_as_the_driver_does(device: CudaDevice) -> None:
    import octavo_cuda

    probed, own = octavo_cuda.platform_probe().devices[0], device.describe()
    assert own.name == probed.name
    assert own.uuid.removeprefix("GPU-") == probed.uuid.removeprefix("GPU-")
    assert own.compute_units > 0
    if own.pci:
        assert probed.pci.lower().endswith(own.pci.lower()[-10:])


@pytest.mark.slow
def test_every_kernel_passes_the_conformance_kit() -> None:
    settings = Path(__file__).parents[1] / "conformance.toml"
    result = run("cuda", tiers=("0", "1", "2", "3"), config=settings, quiet=True, jobs=8)
    assert result.passed, result.summary()
