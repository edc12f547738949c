"""Builds a worker's executor: device, kernels, model, weights, KV memory, recorded steps. In this order, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from octavo.active_platform import ActivePlatform
from octavo.config import EngineConfig
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.extensions import Extensions, load_extensions, resolve
from octavo.layers.context import BuildContext, dtype_name
from octavo.ops.bind import REFERENCE, KernelTable
from octavo.parallel.communicator import SingleRank, least, open_channels
from octavo.parallel.ranks import Alone, Peers
from octavo.plugin.contracts import Communicator, Device, GraphRunner, KVView, ModelExecutor
from octavo.plugin.data import GroupSpec, PlatformCaps
from octavo.plugin.specs import BatchLimits, KVLayout, KVPlan
from octavo.plugin.step import Admit, Batch, KVGroup
from octavo.plugin.torch import TorchCommunicator
from octavo.quant.formats import layers_of
from octavo.runner.ahead import compile_ahead
from octavo.runner.buckets import Shapes
from octavo.runner.graphs import EagerRunner
from octavo.runner.kvcache import NULL_BLOCKS, GroupNeed, allocate, divide, measure_recorded, measure_step
from octavo.runner.runner import ModelRunner
from octavo.sampling.params import SamplingParams
from octavo.speculate.settings import num_drafts
from octavo.weights import loader
from octavo.weights.source import ModelSource, open_model

log = logging.getLogger("octavo.worker")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A ready executor with what the rest of the program wants to know of it.

    comm: the tensor-parallel group; whoever closes the executor closes it too.
    kv_plans, kv_bytes: the KV cache; empty and 0 if the platform brought its own executor.
    limits: the largest step and the longest sequence. processors: logits processors by name.
    """

    executor: ModelExecutor
    rank: int
    device: Device
    comm: Communicator
    kernels: KernelTable
    source: ModelSource
    limits: BatchLimits
    dtype: str
    kv_plans: Sequence[KVPlan]
    kv_bytes: int
    vocab_size: int
    processors: Mapping[str, type[Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Implements `octavo.plugin.WorkerView`."""

    device: Device
    rank: int


def build_worker(
    config: EngineConfig, platform: ActivePlatform, *, progress: Progress | None = None, peers: Peers | None = None
) -> Worker:
    """Load the model on this process's device. Raises ModelError, ConfigError or PlatformError.

    peers: the other ranks; each of them makes the same call at the same time.
    """
    peers = peers or Alone()
    device = platform.make_device(peers.local_rank, config)
    device.activate()
    model_config = config.model
    source = open_model(
        model_config.model,
        revision=model_config.revision,
        load_format=model_config.load_format,
        trust_remote_code=model_config.trust_remote_code,
    )
    dtype = resolve_dtype(model_config.dtype, source, platform.caps)
    limits = resolve_limits(config, source)
    own = platform.make_executor(config, device)
    if own is not None:
        return Worker(
            executor=own,
            rank=config.parallel.rank,
            device=device,
            comm=SingleRank(),
            kernels=KernelTable(),
            source=source,
            limits=limits,
            dtype=dtype_name(dtype),
            kv_plans=(),
            kv_bytes=0,
            vocab_size=source.config.vocab_size,
        )
    extensions = load_extensions(platform)
    kernels = KernelTable(forced=forced_kernels(config))
    platform.register_kernels(kernels, device)
    ctx = BuildContext(
        device=device,
        dtype=dtype,
        kv_dtype=dtype_name(dtype) if config.cache.dtype == "auto" else config.cache.dtype,
        block_size=config.cache.block_size,
        limits=limits,
        kernels=kernels,
        comm=make_communicator(config, platform, device, peers),
        quant=layers_of(extensions.quant_formats, source.quant_config, model_config.quantization),
        dequantize=config.model.quantization == "none",
    )
    with device.inference():
        model = model_class(source, extensions)(source.config, ctx)
        loader.load(ctx.weights, source, progress=progress)
    check_native(config.platform.require_native, kernels)
    # A recorded step runs its collectives once more than an eager one, so all ranks must record, or none.
    peers.meet("weights loaded", f"kernels that cannot be recorded: {'; '.join(unrecordable(kernels)) or 'none'}")
    processors = {name: resolve(target) for name, target in extensions.logits_processors.items()}
    return _with_memory(config, platform, ctx, model, source, processors)


def _with_memory(
    config: EngineConfig,
    platform: ActivePlatform,
    ctx: BuildContext,
    model: Any,
    source: ModelSource,
    processors: Mapping[str, type[Any]],
) -> Worker:
    """Size and take KV memory, then record steps."""
    device, limits = ctx.device, ctx.limits
    graph = make_graph_runner(config, platform, ctx)
    shapes = Shapes.of(platform.caps, limits, graph.keys(limits))
    attention = ctx.attention
    needs = [
        GroupNeed(spec=spec, num_layers=len(attention.layers_of_kv(group)))
        for group, spec in enumerate(attention.kv_specs)
    ]
    layouts = [kv_layout(ctx, platform, group) for group in range(len(needs))]

    def runner(plans: Sequence[KVPlan], shapes: Shapes, graph: GraphRunner) -> ModelRunner:
        views: dict[int, KVView] = {}
        # As steps run: a view made outside would keep what it is a view of, for gradients.
        with device.inference():
            for group, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
                views |= zip(attention.layers_of_kv(group), allocate(plan, layout, device), strict=True)
        groups = [KVGroup(block_size=p.spec.block_size, num_blocks=p.num_blocks, window=p.spec.window) for p in plans]
        kv = [views[layer] for layer in range(len(views))]
        return ModelRunner(
            model=model, ctx=ctx, kv=kv, kv_groups=groups, shapes=shapes, graph=graph, processors=processors
        )

    footprint = None
    budget = config.cache.memory_bytes
    sizes = config.cache.group_blocks
    if budget is None and config.cache.num_blocks is None and sizes is None:
        null = [KVPlan(spec=n.spec, num_layers=n.num_layers, num_blocks=NULL_BLOCKS) for n in needs]
        eager = Shapes(limits=limits, schedule=platform.caps.schedule, buckets=shapes.buckets)
        guesses = num_drafts(config.scheduler.speculative_config)
        footprint = measure_step(device, lambda: run_largest(runner(null, eager, EagerRunner()), limits, guesses))
        if shapes.captured:
            # The recordings hold the addresses of these few blocks, so they are made again for the real ones.
            trial = runner(null, shapes, make_graph_runner(config, platform, ctx))
            records = [partial(trial.record, key) for key in shapes.largest]
            recorded = measure_recorded(device, records, num_shapes=len(shapes.captured))
            footprint = replace(footprint, recorded=recorded)
            trial.close()
            del trial, records
            device.empty_cache()
        budget = least(footprint.budget(config.cache.memory_utilization), ctx.comm, device.torch_device)
    if sizes is not None:
        plans = [
            KVPlan(spec=n.spec, num_layers=n.num_layers, num_blocks=size) for n, size in zip(needs, sizes, strict=True)
        ]
    else:
        plans = divide(needs, limits, budget=budget, num_blocks=config.cache.num_blocks)
    executor = runner(plans, shapes, graph)
    if shapes.all_at_start:
        compile_ahead(executor, show=config.parallel.rank == 0)
    else:
        for key in shapes.at_start:
            executor.record(key)
    device.empty_cache()  # recordings have their own memory
    kv_bytes = sum(need.block_bytes * plan.num_blocks for need, plan in zip(needs, plans, strict=True))
    if footprint is not None:
        log.info("%s", footprint.describe(kv_bytes, device.memory().free))
    worker = Worker(
        executor=executor,
        rank=config.parallel.rank,
        device=device,
        comm=ctx.comm,
        kernels=ctx.kernels,
        source=source,
        limits=limits,
        dtype=dtype_name(ctx.dtype),
        kv_plans=plans,
        kv_bytes=kv_bytes,
        vocab_size=model.vocab_size,
        processors=processors,
    )
    place = Place(device=device, rank=worker.rank)
    executor.closing = partial(platform.worker_event, "shutdown", place)
    platform.worker_event("ready", place)
    return worker


def kv_state(worker: Worker) -> str:
    """What ranks must agree on before they serve: the scheduler of rank 0 hands out the blocks of all."""
    return f"KV blocks {', '.join(str(group.num_blocks) for group in worker.executor.kv_groups)}"


def run_largest(runner: ModelRunner, limits: BatchLimits, num_drafts: int = 0) -> None:
    """Run the largest step once, to see its memory. All its KV goes to the null block. num_drafts: of each sequence,
    behind which logits are made as well."""
    num_drafts = min(num_drafts, limits.max_num_tokens - 1, limits.max_model_len - 2)
    num_seqs = min(limits.max_num_seqs, limits.max_num_tokens // (1 + num_drafts))
    counts = np.full(num_seqs, limits.max_num_tokens // num_seqs, np.int32)
    counts = np.minimum(counts, limits.max_model_len - 1).astype(np.int32)
    params = SamplingParams(temperature=1.0, top_p=0.9)  # filters need several copies of the logits
    admits = [
        Admit(row=i, token_ids=np.zeros(int(n), np.int32), num_prompt_tokens=int(n), params=params, seed=0)
        for i, n in enumerate(counts)
    ]
    runner.launch(
        Batch(
            step=0,
            rows=np.arange(num_seqs, dtype=np.int32),
            starts=np.zeros(num_seqs, np.int32),
            counts=counts,
            samples=np.ones(num_seqs, np.bool_),
            admits=admits,
            drafts=np.zeros((num_seqs, num_drafts), np.int32) if num_drafts else None,
        )
    )
    runner.collect()


def resolve_dtype(asked: str, source: ModelSource, caps: PlatformCaps) -> torch.dtype:
    """The model dtype: as asked, else the checkpoint's if the platform has it, else the platform's default."""
    if asked == "auto":
        own = dtype_name(source.dtype)
        # A float32 checkpoint is served in the platform's default, as it was most likely trained in less.
        asked = own if own in caps.dtypes and own != "float32" else caps.default_dtype
    if asked not in caps.dtypes:
        raise ConfigError(f"--dtype {asked}: the platform has {', '.join(caps.dtypes)}")
    dtype: torch.dtype = getattr(torch, asked)
    return dtype


def resolve_limits(config: EngineConfig, source: ModelSource) -> BatchLimits:
    """The largest step and the longest sequence. Raises ConfigError if the user asks for more than the model has."""
    own = getattr(source.config, "max_position_embeddings", None)
    asked = config.model.max_model_len
    if own is not None and asked is not None and asked > own:
        raise ConfigError(f"--max-model-len {asked}: the model was built for at most {own} positions")
    max_model_len = asked or own
    if max_model_len is None:
        raise ConfigError("the model's config has no max_position_embeddings: pass --max-model-len")
    scheduler = config.scheduler
    return BatchLimits(
        max_num_tokens=max(scheduler.max_num_batched_tokens, 0 if scheduler.enable_chunked_prefill else max_model_len),
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
    )


def forced_kernels(config: EngineConfig) -> dict[str, str]:
    """The user's choices: op or family -> provider."""
    forced = dict(config.platform.kernels)
    if config.platform.attention_backend:
        forced["attention"] = config.platform.attention_backend
    return forced


def check_native(families: Sequence[str], kernels: KernelTable) -> None:
    """Raise ConfigError if a kernel family that must be native runs on reference kernels."""
    for choice in kernels.choices:
        if choice.what in families and choice.provider == REFERENCE:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refused) or "the platform has none"
            raise ConfigError(f"--require-native {choice.what}: {choice.context} runs on reference kernels ({reasons})")


def make_graph_runner(config: EngineConfig, platform: ActivePlatform, ctx: BuildContext) -> GraphRunner:
    """The platform's, or the eager one: if asked for, if it has none, and for kernels that cannot be recorded."""
    graph = None if config.platform.enforce_eager else platform.make_graph_runner(config, ctx.device)
    if graph is None:
        return EagerRunner()
    if obstacles := unrecordable(ctx.kernels):
        log.warning("steps run eagerly, as these kernels cannot be recorded: %s", "; ".join(obstacles))
        graph.close()
        return EagerRunner()
    return graph


def unrecordable(kernels: KernelTable) -> list[str]:
    """What was bound that reads a step's values on the host, so that a recording would repeat the first step's."""
    found = []
    for choice in kernels.choices:
        if choice.provider == REFERENCE:
            unsafe = choice.what in ("attention", "moe")
        elif choice.what == "attention":
            classes = {cls.name: cls for cls in kernels.classes("attention")}
            unsafe = not getattr(classes.get(choice.provider), "graph_safe", True)
        else:
            providers = {p.provider: p for p in kernels.providers(choice.what)}
            unsafe = choice.provider in providers and not providers[choice.provider].graph_safe
        if unsafe:
            found.append(f"{choice.what} {choice.provider} ({choice.context})")
    return found


def make_communicator(config: EngineConfig, platform: ActivePlatform, device: Device, peers: Peers) -> Communicator:
    """The tensor-parallel group of this rank."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return SingleRank()
    backend = platform.caps.dist_backend or "gloo"
    peers.meet("model opened")
    peers.join(backend)
    group = GroupSpec(name="tp", ranks=tuple(range(size)), rank=config.parallel.rank, backend=backend)
    comm = platform.make_communicator(group, device) or TorchCommunicator(group, device.torch_device)
    with device.inference():
        open_channels(comm, device.torch_device)
    return comm


def kv_layout(ctx: BuildContext, platform: ActivePlatform, group: int) -> KVLayout:
    """The layout of a KV group: what the attention backend says, else the platform, else core's."""
    spec = ctx.attention.kv_specs[group]
    backend = ctx.attention.backends[ctx.attention.kv_of_spec.index(group)]
    return backend.kv_layout(spec) or platform.kv_layout(spec, ctx.device)


def model_class(source: ModelSource, extensions: Extensions) -> Callable[[Any, BuildContext], Any]:
    """The class that serves the checkpoint's model_type. Raises UnsupportedModelError naming the known ones."""
    model_type = source.config.model_type
    if model_type not in extensions.models:
        known = ", ".join(sorted(extensions.models))
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; supported: {known}. A package that registers it in the "
            "entry-point group 'octavo.extensions' would add it"
        )
    return resolve(extensions.models[model_type])
