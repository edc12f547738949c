"""The kit's patch detector finds what a plugin changes, wherever it is, and lets a backend of torch change its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.testing.conformance.patches import changes
from octavo.testing.conformance.run import Result

Check = Callable[..., Result]

FOUND = {
    "octavo.config.check": "= lambda config: None",
    "octavo.config.extra": "= 1",
    "octavo.engine.messages.int32.__code__": "= octavo.engine.messages.int64.__code__",
    "octavo.sampling.params.SamplingParams.check_vocab": "= lambda self, vocab_size: None",
    "octavo.ops.catalogue.CATALOGUE['rms_norm']": "= octavo.ops.catalogue.CATALOGUE['greedy']",
    "octavo.ops.residual.scaled_add.__defaults__": "= (2.0,)",
    "octavo.ops.bind.KernelTable.bind.__kwdefaults__": "= dict(octavo.ops.bind.KernelTable.bind.__kwdefaults__)",
    "octavo.ops.bind.KernelTable.op.__kwdefaults__['priority']": "= 99",
    "torch.Tensor.__add__": "= torch.Tensor.__sub__",
    "torch.Tensor.copy_": "= lambda self, other: self",
    "torch.Tensor.to": "= lambda self, *args, **kwargs: self",
    "torch.cuda.streams.Event.record": "= lambda self, stream=None: None",
    "torch.nn.functional.silu": "= torch.nn.functional.gelu",
    "torch.nn.modules.linear.Linear.forward": "= lambda self, x: x",
    "torch.nn.modules.linear.Bilinear.forward.__code__": "= torch.nn.Identity.forward.__code__",
    "torch.nn.RMSNorm": "= torch.nn.LayerNorm",
}
"""What is changed -> how: by an assignment."""
FOUND_IN_TRITON = {"triton.jit": "= lambda fn: fn", "triton.language.dot": "= triton.language.sum"}

ALLOWED = """
torch.Tensor.acme = lambda self: self  # a name of its own hides nothing
torch.Tensor.to_acme = lambda self: self
"""


def detected(*flags: str) -> dict[str, Any]:
    """What the detector says of platform "bad"."""
    command = [sys.executable, "-m", "octavo.testing.conformance.patches", "bad", *flags]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def test_a_plugin_that_patches_is_caught_at_every_place(install: Callable[..., None]) -> None:
    triton = importlib.util.find_spec("triton") is not None
    wanted = FOUND | (FOUND_IN_TRITON if triton else {})
    modules = "octavo.config, octavo.engine.messages, octavo.ops.bind, octavo.sampling.params, torch"
    body = [f"import {modules}{', triton.language' if triton else ''}", *ALLOWED.strip().splitlines()]
    body += [f"{name} {how}" for name, how in wanted.items()]
    lines = "\n    ".join(body)
    install(f"@hookimpl\ndef platform_caps():\n    {lines}\n    return PlatformCaps()")
    facts = detected("--no-device")
    elsewhere = {name for name in facts["loading"] if name.endswith(".CATALOGUE['rms_norm']")}
    assert {*facts["loading"]} == {*wanted} | elsewhere
    assert facts["backend"] == []


def test_of_what_was_replaced_the_inside_is_no_news() -> None:
    class Base:
        def held(self) -> int:
            return 1

    class Own(Base):
        pass

    inside: dict[str, object] = {"(torch.x.Own)": Own, "torch.x.Own.a": 1, "torch.x.Own.b": 2}
    before = {"torch.Own": Own, **inside}
    assert changes(before, before | {"torch.Own": Base, "torch.x.Own.a": 3}) == ["torch.Own", "torch.x.Own.a"]
    assert changes(before, {"torch.Own": Base}) == ["torch.Own"]
    assert changes(before, before | {"torch.x.Own.held": 3, "torch.x.Own.new": 4, "torch.g": 5}) == ["torch.x.Own.held"]
    assert changes({"octavo.a": 1, "octavo.a.__code__": 2}, {"octavo.b": 3}) == ["octavo.a", "octavo.b"]


PATCHES_LATE = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

@hookimpl
def worker_event(event):
    import octavo.runner.runner
    import torch

    octavo.runner.runner.ModelRunner.launch = lambda self, batch: None
    torch.accelerator.synchronize = lambda: None
    raise RuntimeError("the device fell off")
"""


@pytest.mark.slow
def test_patches_made_while_serving_and_a_failed_request_are_both_told(check: Check) -> None:
    result = check(PATCHES_LATE, tiers="0")
    found = {test.partition("::")[2]: message for test, message in result.data["failures"].items()}
    assert set(found) == {
        "test_nothing_outside_the_plugin_is_patched[serving]",
        "test_a_request_is_served_in_a_fresh_process",
    }
    patched = found["test_nothing_outside_the_plugin_is_patched[serving]"]
    assert "octavo.runner.runner.ModelRunner.launch" in patched
    assert "torch.accelerator.synchronize" in patched
    assert "the device fell off" in found["test_a_request_is_served_in_a_fresh_process"]


BACKEND = """
import functools
import torch

def enable():
    torch.clone = clone
    torch.square = square

def clone(x):
    return x.detach().clone()

def square(x):
    return x * x

def announced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call
"""

HIDES_BEHIND_IT = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

def mine(x):
    return x

@hookimpl
def register_kernels(registry):
    import toy_backend
    import torch
    toy_backend.enable()
    mine.__module__ = "toy_backend"
    torch.negative = mine
    torch.positive = toy_backend.announced(mine)
"""

NAMES_ITS_BACKEND = ('device_type="cpu")', 'device_type="cpu", backend=("toy_backend",))')


@pytest.mark.slow
def test_a_backend_may_change_torch_and_the_plugin_behind_it_may_not(check: Check, tmp_path: Path) -> None:
    package = tmp_path / "toy_backend"
    package.mkdir()
    (package / "__init__.py").write_text(BACKEND)
    result = check(HIDES_BEHIND_IT, tiers="0", replace=NAMES_ITS_BACKEND)
    assert result.data["changed_by_backend"] == ["torch.clone", "torch.square"]
    assert "torch.clone, torch.square" in result.summary()
    found = {test.partition("::")[2]: message for test, message in result.data["failures"].items()}
    loading = found["test_nothing_outside_the_plugin_is_patched[loading]"]
    assert "loading changed 2: torch.negative, torch.positive" in loading
    assert not any("clone" in message for message in found.values())
