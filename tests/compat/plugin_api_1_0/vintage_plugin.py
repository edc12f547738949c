"""FROZEN. A plugin as it was written for plugin API 1.0; it must load for as long as that API is served.
Never edit this file: when it stops working, core has broken its promise."""

from __future__ import annotations

from octavo.plugin import (
    YES,
    ConfigPatch,
    DeviceDesc,
    KVLayout,
    MemInfo,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    ScheduleLimits,
    WorkerLaunch,
    hookimpl,
    no,
)


@hookimpl
def platform_info():
    options = {"speed": OptionSpec(type=int, default=1, help="how fast")}
    return PlatformInfo(name="vintage", api="1.0", version="1.0", device_type="cpu", options=options)


@hookimpl
def platform_probe():
    return Probe(available=True, score=70, devices=(DeviceDesc(name="vintage", memory=1 << 30),))


@hookimpl
def platform_caps(options):
    return PlatformCaps(
        dtypes=("float32",),
        default_dtype="float32",
        schedule=ScheduleLimits(token_multiple=4),
        features=frozenset({"prefix_cache", "chunked_prefill"}),
        extras={"speed": options["speed"]},
    )


@hookimpl
def platform_configure(config, caps):
    return [ConfigPatch(field="cache.block_size", value=32, reason="tiles of 32")]


@hookimpl
def platform_launch(config, caps):
    return WorkerLaunch(env=lambda local_rank, world_size: {"VINTAGE_RANK": str(local_rank)})


@hookimpl
def make_device(local_rank, config, caps):
    from octavo.plugin.torch import TorchDevice

    return TorchDevice("cpu", local_rank, memory=lambda: MemInfo(total=1 << 30, free=1 << 30))


class VintageLinear:
    name = "vintage"

    @classmethod
    def supports(cls, spec, device):
        return YES if spec.scheme is None else no("plain weights only")

    def prepare(self, weights, spec, device):
        return weights["weight"].t().contiguous()

    def apply(self, x, w, bias):
        y = x @ w
        return y if bias is None else y + bias


def greedy(logits):
    return logits.argmax(dim=-1)


@hookimpl
def register_kernels(registry, device, caps):
    registry.linear(VintageLinear, priority=5)
    registry.op(
        "greedy", greedy, provider="vintage", priority=5, supports=lambda context: YES, inplace=False, graph_safe=True
    )


@hookimpl
def kv_layout(spec, device):
    return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")


@hookimpl
def register_extensions(registry):
    registry.model("vintage_lm", "vintage_models:VintageLM")
    registry.quant_format("vintage_bits", "vintage_models:VintageBits")


@hookimpl
def worker_event(event, worker):
    assert event in ("ready", "shutdown")
