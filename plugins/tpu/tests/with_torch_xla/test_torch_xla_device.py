"""What core sizes KV memory by where the peak is that of the whole process: with figures of a made-up chip."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.runner.kvcache import measure_step


def test_a_step_takes_what_it_held_beside_what_was_there_and_never_less(
    tpu_xla_on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_xla

    from octavo_tpu.xla_device import XlaDevice

    figures = {"bytes_limit": 1000, "bytes_used": 400, "peak_bytes_used": 600}
    monkeypatch.setattr(torch_xla._XLAC, "_xla_memory_info", lambda name: dict(figures))
    device = XlaDevice()

    def step(most: int) -> Callable[[], None]:
        def run() -> None:
            with device.inference():
                figures["peak_bytes_used"] = max(figures["peak_bytes_used"], most)

        return run

    found = measure_step(device, step(900))
    assert (found.total, found.in_use, found.step) == (1000, 400, 500), "not 300, by which it is above that of loading"
    assert measure_step(device, step(450)).step == 500, "as much as it may have been: 0 would give memory away twice"
    device.reset_peak()
    assert device.memory().peak_torch == 400
