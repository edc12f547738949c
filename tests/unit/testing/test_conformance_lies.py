"""A platform that claims what it has not is caught, and the report says which claim it was."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from octavo.testing.conformance.run import Result

Check = Callable[..., Result]


def failures(result: Result) -> dict[str, str]:
    """Test without its file -> message."""
    assert not result.passed
    return {test.partition("::")[2]: message for test, message in result.data["failures"].items()}


def test_a_missing_sdk_is_named_with_the_plugin(check: Check) -> None:
    [message] = set(failures(check("import acme_sdk", tiers="1")).values())
    assert "importing bad_platform" in message
    assert "No module named 'acme_sdk'" in message


@pytest.mark.slow
def test_an_sdk_that_is_missed_late_is_named_with_the_hook(check: Check) -> None:
    late = ("    from octavo.plugin import MemInfo", "    import acme_sdk\n    from octavo.plugin import MemInfo")
    messages = set(failures(check(tiers="1", replace=late)).values())
    assert all("make_device raised ModuleNotFoundError: No module named 'acme_sdk'" in text for text in messages)


WRONG_DTYPE = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32", "bfloat16"), default_dtype="float32")

def device():
    import contextlib
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from octavo.plugin.data import MemInfo
    from octavo.plugin.torch import TorchDevice

    class NoBfloat16(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.matmul.default) and out.dtype == torch.bfloat16:
                out = out * 1.5
            return out

    class Device(TorchDevice):
        @contextlib.contextmanager
        def inference(self):
            with torch.inference_mode(), NoBfloat16():
                yield

    return Device("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
"""


def test_a_dtype_that_computes_wrong_is_caught(check: Check) -> None:
    only = ("    from octavo.plugin import MemInfo\n", "    return device()\n    from octavo.plugin import MemInfo\n")
    found = failures(check(WRONG_DTYPE, tiers="1", replace=only))
    assert set(found) == {"test_every_claimed_dtype_computes[bfloat16]"}


def test_streams_that_are_not_there_are_caught(check: Check) -> None:
    found = failures(check("@hookimpl\ndef platform_caps():\n    return PlatformCaps(streams=True)", tiers="1"))
    assert "caps.streams is True" in found["test_streams_are_there_if_claimed"]


HOST_READER = """
from octavo.testing import refdev
platform_configure = refdev.platform_configure

@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32", graph="capture")

class Baking:
    def keys(self, limits):
        return [BatchKey(num_tokens=1, num_seqs=1)]
    def prepare(self, key, fn):
        from octavo.testing.refdev_device import CaptureRunner
        return CaptureRunner().prepare(key, fn)
    def run(self, handle):
        from octavo.testing.refdev_device import CaptureRunner
        return CaptureRunner().run(handle)
    def close(self):
        pass

@hookimpl
def make_graph_runner():
    return Baking()

def reads_on_the_host(x, weight, eps):
    import numpy, torch
    # numpy shares the memory, unseen by whoever records: its result is a constant of the recording.
    rows = torch.from_numpy(numpy.array(x.detach().numpy(), copy=True)).float()
    return (rows * rows.pow(2).mean(-1, keepdim=True).add(eps).rsqrt() * weight).to(x.dtype)

def adds_on_the_host(x, residual, scale=None):
    import torch
    factor = 1 if scale is None else scale
    return residual.copy_(torch.from_numpy((residual.numpy() + factor * x.numpy()).copy()))

@hookimpl
def register_kernels(registry):
    registry.op("rms_norm", reads_on_the_host, provider="host")
    registry.op("scaled_add", adds_on_the_host, provider="host", inplace=True)
"""


def test_a_kernel_that_calls_itself_graph_safe_and_reads_on_the_host_is_caught(check: Check) -> None:
    found = failures(check(HOST_READER, tiers="2"))
    assert set(found) == {f"test_a_graph_safe_kernel_can_be_replayed[{op}-host]" for op in ("rms_norm", "scaled_add")}
    assert all("a replay with other inputs" in message for message in found.values())


RANKS = """
@hookimpl
def platform_caps():
    claimed = frozenset({"all_reduce", "all_gather", "all_to_all", "broadcast", "send", "recv"})
    return PlatformCaps(dtypes=("float32",), default_dtype="float32", max_world_size=2, collectives=claimed)
"""

LYING_RANKS = (
    RANKS
    + """
@hookimpl
def make_communicator(group):
    from octavo.plugin.torch import TorchCommunicator

    class Half(TorchCommunicator):
        def all_to_all(self, t, in_splits, out_splits):
            raise NotImplementedError("the ring has no all-to-all")

        def broadcast(self, t, src):
            return t  # everybody keeps his own

        def all_gather(self, t, dim):
            return super().all_gather(t, 0)  # along whatever dim

        def all_reduce(self, t):
            t = super().all_reduce(t)
            return t * (1 + self.rank * 2.0**-20)  # not the same bits

    return Half(group)
"""
)


@pytest.mark.slow
def test_collectives_that_are_not_there_or_wrong_are_caught_by_name(check: Check) -> None:
    only = '[skip]\n"test_t5_ranks.py::*" = "the communicator is what this test looks at"\n'
    found = failures(check(LYING_RANKS, tiers="5", settings=only))
    wrong = "test_a_collective_gives_what_it_must[float32-{}]"
    assert "rank 0 raised NotImplementedError: the ring has no all-to-all" in found[wrong.format("all_to_all")]
    assert "broadcast of float32 (8, 16): wrong numbers on rank 1" in found[wrong.format("broadcast")]
    assert "all_gather of float32 (8, 16), dim 1: shape (16, 16)" in found[wrong.format("all_gather")]
    assert "wrong numbers on rank 1" in found[wrong.format("all_reduce")]
    assert "bit part" in found["test_sums_have_the_same_bits_on_all_ranks[float32]"]
    assert wrong.format("send_recv") not in found
    assert "test_ranks_can_wait_for_each_other" not in found


@pytest.mark.slow
def test_ranks_without_the_collectives_of_a_model_are_caught(check: Check) -> None:
    caps = "PlatformCaps(dtypes=('float32',), default_dtype='float32', max_world_size=2, collectives={'all_peduce'})"
    only = '[skip]\n"test_t5_ranks.py::*" = "claims"\n'
    found = failures(check(f"@hookimpl\ndef platform_caps():\n    return {caps}", tiers="5", settings=only))
    assert set(found) == {
        "test_several_ranks_are_claimed_with_what_they_need[all_reduce]",
        "test_several_ranks_are_claimed_with_what_they_need[all_gather]",
        "test_every_claimed_collective_exists",
    }
    assert "all_peduce" in found["test_every_claimed_collective_exists"]


def test_a_rank_that_dies_is_told_and_ends_no_other_tier(check: Check) -> None:
    dies = RANKS + (
        "\n@hookimpl\ndef make_communicator(group):\n    if group.rank == 1:\n        os._exit(3)\n"
        "    from octavo.plugin.torch import TorchCommunicator\n    return TorchCommunicator(group)\n"
    )
    only = '[skip]\n"test_t5_ranks.py::*" = "the engine says it in its own tests"\n'
    said = failures(check(dies, tiers="5", settings=only))["test_ranks_can_wait_for_each_other"]
    assert re.search("making the communicator: (the process of rank 1 ended|rank 0 raised)", said)


WRONG_EXPERTS = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

from octavo.plugin import no

@hookimpl
def register_kernels(registry):
    from octavo.ops.moe import ReferenceMoE

    class ForgetsTheMap(ReferenceMoE):
        name = "mapless"
        @classmethod
        def supports(cls, spec, device):
            return YES if spec.scheme is None and spec.activation == "silu" else no("plain silu experts only")
        def apply(self, x, topk_ids, topk_weights, w, expert_map):
            return super().apply(x, topk_ids % len(w[0]), topk_weights, w, None)

    class Mute(ReferenceMoE):
        name = "mute"
        @classmethod
        def supports(cls, spec, device):
            return no("")

    registry.moe(ForgetsTheMap)
    registry.moe(Mute)
"""


@pytest.mark.slow
def test_experts_that_ignore_the_map_or_refuse_without_a_reason_are_caught(check: Check) -> None:
    result = check(WRONG_EXPERTS, tiers="4")
    found = failures(result)
    assert all("moe-mapless" in test or "a refusal must carry a reason" in text for test, text in found.items())
    assert [test for test in found if "moe-mapless" in test] == [
        "test_the_parts_of_ranks_add_up_to_the_whole[moe-mapless-float32]"
    ]
    assert any("moe-mute" in test for test in found)
    assert result.data["native"] == ["moe"]


SMALL_CACHE = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32", kv_dtypes=("auto", "int8"))

@hookimpl
def register_kernels(registry):
    import torch
    from octavo.ops.attention import ReferenceAttention

    class Truncates(ReferenceAttention):
        name = "truncates"
        def run(self, layer, q, k, v, kv, plan, out):
            if kv.k.dtype == torch.int8:
                k = k * 0.5
            return super().run(layer, q, k, v, kv, plan, out)

    registry.attention(Truncates)
"""


def test_a_claimed_cache_of_fewer_bits_that_is_wrong_is_caught(check: Check) -> None:
    found = failures(check(SMALL_CACHE, tiers="3"))
    assert set(found) == {"test_a_claimed_kv_dtype_keeps_what_attention_needs[attention-truncates-float32-int8]"}
