"""The hooks, what the plugin reads off the machine, and the small ops it registers."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo_cpu
from octavo.config import apply_patches, make_config
from octavo.plugin import MemInfo, OpContext
from octavo_cpu import host, native
from octavo_cpu.activation import act_and_mul
from octavo_cpu.device import CpuDevice
from octavo_cpu.norm import add_rms_norm, rms_norm
from octavo_cpu.ops import register
from octavo_cpu.rope import qkv_norm_rope, rope, supports_qkv


def test_importing_and_probing_load_no_torch() -> None:
    code = (
        "import sys, octavo_cpu; octavo_cpu.platform_info(); octavo_cpu.platform_probe(); "
        "octavo_cpu.platform_caps({}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_probe_ranks_last_and_describes_the_machine() -> None:
    probe = octavo_cpu.platform_probe()
    assert (probe.available, probe.score) == (True, 0)
    assert probe.devices[0].memory > 1 << 28
    assert probe.devices[0].compute_units >= 1


def test_patches_are_tunable_and_yield_to_the_user() -> None:
    caps = octavo_cpu.platform_caps({})
    config, _ = apply_patches(make_config(), octavo_cpu.platform_configure(make_config(), caps))
    assert 0 < (config.cache.memory_bytes or 0) <= octavo_cpu.KV_BYTES
    assert config.scheduler.run_ahead == 0
    mine = make_config(kv_cache_memory_bytes=12345)
    config, log = apply_patches(mine, octavo_cpu.platform_configure(mine, caps))
    assert config.cache.memory_bytes == 12345
    assert any("kept" in line for line in log)


def test_memory_is_measured_when_the_user_names_a_share_of_it() -> None:
    mine = make_config(memory_utilization=0.3)
    config, _ = apply_patches(mine, octavo_cpu.platform_configure(mine, octavo_cpu.platform_caps({})))
    assert (config.cache.memory_bytes, config.cache.memory_utilization) == (None, 0.3)


def test_option_wide_copy_reaches_the_device_and_rejects_other_words() -> None:
    option = octavo_cpu.platform_info().options["wide_copy"]
    assert option.type("never") == "never"
    with pytest.raises(ValueError, match="wide_copy must be auto or never"):
        option.type("perhaps")
    for choice, kept in (("auto", True), ("never", False)):
        caps = octavo_cpu.platform_caps({"wide_copy": choice})
        assert octavo_cpu.make_device(0, make_config(threads=1), caps).wide_copy is kept


def test_threads_come_from_the_user_then_the_environment_then_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert host.thread_count(5) == 5
    assert host.thread_count(None) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(host, "physical_cores", lambda: 8)
    assert host.thread_count(None, num_workers=2) == 4
    assert host.thread_count(None, num_workers=100) == 1


def test_hyper_threads_and_quota_do_not_count_as_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(host, "CPU", tmp_path)
    monkeypatch.setattr(host, "allowed_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    assert host.physical_cores() == 2
    monkeypatch.setattr(host, "cpu_quota", lambda: 1)
    assert host.physical_cores() == 1


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1)])
def test_cpu_quota_is_read_in_whole_cpus(text: str, quota: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert host.cpu_quota(tmp_path) == quota


def test_container_memory_does_not_count_droppable_cache(tmp_path: Path) -> None:
    assert host.container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 450000\n")
    assert host.container_memory(tmp_path) == (1000000, 150000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host.container_memory(tmp_path) is None


def test_ranks_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "container_memory", lambda: (1 << 28, 1 << 27))
    one, two = make_config(threads=1), make_config(threads=1, tensor_parallel_size=2)
    caps = octavo_cpu.platform_caps({})
    whole, half = (octavo_cpu.make_device(0, config, caps).memory() for config in (one, two))
    assert (half.total, whole.total) == (1 << 27, 1 << 28)
    assert half.free <= 1 << 26
    kv = [octavo_cpu.platform_configure(config, caps)[0].value for config in (one, two)]
    assert kv == [1 << 26, 1 << 25]


def test_container_limit_bounds_total_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "container_memory", lambda: (1 << 28, 1 << 27))
    info = host.memory()
    assert info.total == 1 << 28
    assert info.free <= 1 << 27


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_grows_with_what_the_process_holds_and_starts_anew() -> None:
    device, size = CpuDevice(num_threads=1), 1 << 27
    # Mapped here, as an allocator may give out what it kept, and keep it again.
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        held = device.memory().peak_torch
        assert held >= size
    device.reset_peak()
    assert device.memory().peak_torch <= held - size // 2


def test_activate_sets_the_threads_and_describe_names_the_cpu() -> None:
    before = torch.get_num_threads()
    device = CpuDevice(num_threads=1)
    device.activate()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    described = device.describe()
    assert described.compute_units == 1
    assert described.memory == device.memory().total


def test_default_dtype_follows_the_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, dtype in ((("avx2",), "float32"), (("avx512f", "avx512bw"), "bfloat16"), (("bf16",), "bfloat16")):
        monkeypatch.setattr(host, "cpu_flags", lambda flags=flags: flags)
        assert octavo_cpu.platform_caps({}).default_dtype == dtype


class Registry:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def op(self, name: str, fn: object, **kwargs: object) -> None:
        self.names.append(name)

    def attention(self, cls: type, *, priority: int = 0) -> None:
        self.names.append(cls.name)

    linear = attention


def test_the_index_registers_every_kernel() -> None:
    registry = Registry()
    register(registry)
    assert {"cpu_paged", "gguf", "plain", "int4", "onednn"} <= set(registry.names)
    pure_torch = {"rms_norm", "add_rms_norm", "rope", "qkv_norm_rope", "act_and_mul"}
    assert pure_torch <= set(registry.names)
    compiled = {"begin_step", "embedding", "qkv_norm_rope_write", "sample", "commit_tokens"}
    assert compiled & set(registry.names) == (set() if native.why_not() else compiled)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].float()[:, None].split(half, dim=-1)
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated_dims", [64, 24])
def test_rope_equals_the_rotation_in_float32(dtype: torch.dtype, rotated_dims: int) -> None:
    g = torch.Generator().manual_seed(1)
    for tokens in (0, 1, 9):
        qkv = torch.randn(tokens, 8 * 64, generator=g).to(dtype)
        positions = torch.randint(0, 50, (tokens,), generator=g)
        angles = torch.rand(50, rotated_dims // 2, generator=g) * 6
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        heads = qkv.view(tokens, 8, 64)
        expected = rotated(heads[:, :6], positions, table)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        near = {"rtol": tolerance, "atol": tolerance}
        q, k, v = qkv_norm_rope(qkv, positions, table, None, None, 1e-6, 4, 2)
        torch.testing.assert_close(torch.cat([q, k], dim=1).float(), expected, **near)
        assert torch.equal(v, heads[:, 6:])
        q, k = rope(heads[:, :4], heads[:, 4:6], positions, table)
        torch.testing.assert_close(torch.cat([q, k], dim=1).float(), expected, **near)


def test_fused_rotation_refuses_models_with_norms() -> None:
    context = OpContext(op="qkv_norm_rope", dtype="float32", device_type="cpu", params={"norm": "head", "rotated": 64})
    assert "norms" in supports_qkv(context).reason
    assert not supports_qkv(OpContext(op="qkv_norm_rope", dtype="float32", device_type="cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_float32_for_one_and_many_rows(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    tolerance = 1e-5 if dtype == torch.float32 and weight_dtype == dtype else 2e-2
    weight = torch.randn(48, generator=g).to(weight_dtype)
    for rows in (0, 1, 5):
        x, residual = (torch.randn(rows, 48, generator=g).to(dtype) for _ in range(2))
        total = (x + residual).float()
        near = {"rtol": tolerance, "atol": tolerance}
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
        normed, added = add_rms_norm(x, residual, weight, 1e-5)
        torch.testing.assert_close(normed.float(), expected, **near)
        torch.testing.assert_close(added.float(), total, **near)
        assert normed.dtype == dtype


def test_norm_of_a_zero_row_without_epsilon_is_as_torch_has_it() -> None:
    zero = torch.zeros(1, 8)
    assert torch.equal(rms_norm(zero, torch.ones(8), 1e-5), zero)
    assert rms_norm(zero, torch.ones(8), 0.0).isnan().all()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation_equals_float32_and_leaves_its_input(kind: str) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    gate, up = x[:, :32], x[:, 32:]
    act = {
        "silu": lambda t: t * torch.sigmoid(t),
        "gelu": lambda t: t * 0.5 * (1 + torch.erf(t / 2**0.5)),
        "gelu_tanh": lambda t: 0.5 * t * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
    }[kind]
    torch.testing.assert_close(act_and_mul(x, kind), act(gate) * up, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_memory_adds_up() -> None:
    info = host.memory()
    assert isinstance(info, MemInfo)
    assert 0 < info.free <= info.total
    assert info.non_torch <= info.total
    assert os.name == "nt" or info.peak_torch > 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    pieces = [bytearray(50_000) for _ in range(2000)]  # each smaller than what malloc maps on its own
    kept = pieces[::20]  # so that the heap does not shrink by itself
    del pieces
    before = host.key_values(host.read(Path("/proc/self/status")))["RssAnon"]
    CpuDevice(num_threads=1).empty_cache()
    after = host.key_values(host.read(Path("/proc/self/status")))["RssAnon"]
    assert before - after > 50 << 20, len(kept)


FAULTS = """
import resource, torch
from octavo_cpu.device import CpuDevice

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        large = torch.empty(8 << 20, dtype=torch.uint8).fill_(1)  # freed by the next one, and then again
        larger = torch.empty(30 << 20, dtype=torch.uint8).fill_(1)
        del large, larger
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
CpuDevice(num_threads=1).activate()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_that_a_step_frees_serves_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < 100 < usual
