"""What a compiled step changes lies where it lay: nothing is copied, and no second one exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import xla_cpu
from octavo import LLM, SamplingParams
from octavo.plugin import Device
from octavo.testing.tiny import make_model


@pytest.fixture
def device() -> Device:
    options = {"runtime": "torch_tpu", "chips": 1, "hbm_bytes": 0, "cache_dir": ""}
    return xla_cpu.make_device(0, xla_cpu.platform_caps(options))


def compiled(device: Any, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    options = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    made: Any = torch.compile(step, backend=device.compile_backend, fullgraph=True, dynamic=False, options=options)
    return made  # type: ignore[no-any-return]


def test_a_program_overwrites_what_it_changes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_tpu import donation

    programs = []
    made = donation.DonatingProgram.__init__

    def note(self: Any, program: Any, donated: Any) -> None:
        programs.append((program, donated))
        made(self, program, donated)

    monkeypatch.setattr(donation.DonatingProgram, "__init__", note)
    with device.inference():
        cache, row = torch.zeros(4, 3, device="tpu"), torch.arange(3.0, device="tpu")

        def step() -> torch.Tensor:
            cache[2].add_(row)
            return cache.sum()

        run = compiled(device, step)
        assert run().item() == 3.0
        before = StorageWeakRef(cache.untyped_storage())
        assert [run().item() for _ in range(2)] == [6.0, 9.0]
        assert before.expired(), "what came back is the cache now: it was not copied"
        assert cache.cpu()[2].tolist() == [0.0, 3.0, 6.0]
        program, [(output, index)] = programs[-1]  # one more is made where torch keeps it for another start
        gone = []
        for _ in range(20):
            given = cache
            cache = program(*((given, row) if index == 0 else (row, given)))[output]
            device.synchronize()
            gone.append(is_gone(given))
        assert any(gone), "XLA:CPU copies a buffer that is just being written or read, and overwrites all others"


def is_gone(t: torch.Tensor) -> bool:
    """Whether the memory of a tensor was given away."""
    try:
        t.cpu()
    except RuntimeError as error:
        if "donated" not in str(error):
            raise
        return True
    return False


def test_what_other_tensors_look_at_changes_for_them_too(device: Device) -> None:
    with device.inference():
        table = torch.zeros(4, 3, device="tpu")
        whole, row, flat = table.view(4, 3), table[1], table.view(12)

        def step() -> torch.Tensor:
            whole.add_(1.0)
            return row.sum() * 2.0

        run = compiled(device, step)
        assert [run().item() for _ in range(2)] == [6.0, 12.0]
        assert [t.cpu().sum().item() for t in (table, whole, row, flat)] == [24.0, 24.0, 6.0, 24.0]
        flat.mul_(2.0)
        assert run().item() == 30.0
        assert whole.cpu().sum().item() == 60.0


def test_one_that_nobody_else_reads_in_the_step_is_followed_all_the_same(device: Device) -> None:
    with device.inference():
        whole = torch.zeros(4, 3, device="tpu")
        row = whole[1]

        def step() -> torch.Tensor:
            whole.add_(1.0)
            return whole.sum()

        run = compiled(device, step)
        assert [run().item() for _ in range(2)] == [12.0, 24.0]
        assert row.cpu().tolist() == [2.0, 2.0, 2.0]


def test_steps_of_a_model_move_no_cache(tmp_path: Path, tpu_on_cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_cpu.start()
    from octavo_tpu import donation

    holders: list[int] = []
    count = donation.num_tensors_on

    def note(t: torch.Tensor) -> int:
        if t.shape[0] == 40:
            holders.append(count(t))
        return count(t)

    monkeypatch.setattr(donation, "num_tensors_on", note)
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 16}
    settings |= {"num_kv_blocks": 40, "skip_tokenizer_init": True, "dtype": "float32"}
    model = make_model(tmp_path, "llama", tokenizer=False)
    with LLM(str(model), platform=tpu_on_cpu, **settings) as llm:
        prepared = len(holders)
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(holders) >= prepared + 4 * 4, "each of the steps has the caches of two layers, keys and values"
    assert set(holders) == {1}
