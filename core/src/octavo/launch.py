"""Puts the pieces together: config -> platform -> worker -> engine. The only place that knows them all."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from octavo.active_platform import ActivePlatform, PlatformLock
from octavo.config import EngineConfig, with_field
from octavo.discovery import load, select
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.extensions import load_extensions
from octavo.features import negotiate
from octavo.parallel.leader import RankedExecutor
from octavo.parallel.ranks import start_ranks
from octavo.plugin.contracts import ModelExecutor
from octavo.runner.runner import ModelRunner
from octavo.runner.worker import Progress, Worker, build_worker, kv_state
from octavo.sampling.processors import check_extra_args
from octavo.speculate.drafting import Drafting, make_drafter
from octavo.speculate.settings import drafter_spec
from octavo.structured.client import GrammarProcess
from octavo.weights.source import ModelSource

log = logging.getLogger("octavo.launch")

SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json -> SamplingParams."""


def activate(config: EngineConfig, lock: PlatformLock | None = None) -> tuple[EngineConfig, ActivePlatform]:
    """The platform (chosen, or exactly the locked one) and the config after its patches. Logs every change."""
    options = config.platform.options
    platform = load(lock, options=options) if lock else select(config.platform.name, options=options)
    config, changes = platform.configure(config)
    config, dropped = negotiate(config, platform.caps)
    for line in [*changes, *dropped]:
        log.info("%s: %s", platform.name, line)
    return config, platform


def build_engine(
    config: EngineConfig, *, lock: PlatformLock | None = None, progress: Progress | None = None
) -> tuple[EngineLoop, ModelInfo]:
    """A ready engine in this process. Raises PlatformError, ModelError, ConfigError or EngineError."""
    config, platform = activate(config, lock)
    caps = platform.caps
    if config.scheduler.run_ahead is None:
        ahead = caps.streams and config.scheduler.speculative_config is None
        config = with_field(config, "scheduler.run_ahead", 1 if ahead else 0)
    assert config.scheduler.run_ahead is not None
    drafting = open_drafter(config, platform)
    worker = build_ranks(config, platform, progress=progress)
    loop = EngineLoop(
        worker.executor,
        cache=config.cache,
        scheduler=config.scheduler,
        limits=caps.schedule,
        max_model_len=worker.limits.max_model_len,
        run_ahead=config.scheduler.run_ahead,
        source=Rebuild(config, platform, worker),
        check_extra_args=partial(check_extra_args, worker.processors, vocab_size=worker.vocab_size),
        grammars=make_grammars(config, worker),
        drafting=drafting and drafting(vocab_size=worker.vocab_size),
    )
    return loop, model_info(config, platform.name, worker)


class Rebuild:
    """The `octavo.engine.standstill.ExecutorSource` of a sleeping engine: loads the model again, on all ranks.

    That works for every platform and kernel, and nothing of the old executor is left to hold on to memory.
    """

    def __init__(self, config: EngineConfig, platform: ActivePlatform, worker: Worker) -> None:
        sizes = tuple(group.num_blocks for group in worker.executor.kv_groups)
        self._config = with_field(config, "cache.group_blocks", sizes)
        self._platform = platform
        self._device = worker.device
        self._path = worker.source.path

    def release(self, level: int) -> None:
        """Free the device's memory. Level 1 reads the checkpoint into the host's page cache, level 2 drops it there."""
        gc.unfreeze()  # the engine's process has frozen what it was built with
        gc.collect()
        self._device.empty_cache()
        for file in sorted(self._path.glob("*.safetensors")) if self._path.is_dir() else [self._path]:
            with file.open("rb") as opened:
                advice = os.POSIX_FADV_WILLNEED if level == 1 else os.POSIX_FADV_DONTNEED
                os.posix_fadvise(opened.fileno(), 0, 0, advice)

    def build(self) -> ModelExecutor:
        worker = build_ranks(self._config, self._platform)
        self._device = worker.device
        gc.collect()
        gc.freeze()
        return worker.executor


def open_drafter(config: EngineConfig, platform: ActivePlatform) -> Callable[..., Drafting] | None:
    """What speculates, once it knows `vocab_size`. Raises ConfigError, before any weight is loaded."""
    speculative = config.scheduler.speculative_config
    if speculative is None:
        return None
    method, spec = drafter_spec(speculative)
    drafter = make_drafter(method, spec, load_extensions(platform).drafters)
    return partial(Drafting, drafter, name=method, num_tokens=spec.num_tokens)


def make_grammars(config: EngineConfig, worker: Worker) -> GrammarProcess | None:
    """What gives answers their shapes; a process that starts when it is warmed up, or with the first that needs one."""
    if config.model.skip_tokenizer_init:
        return None
    return GrammarProcess(
        config.model.tokenizer or str(worker.source.path),
        config.model,
        config.structured,
        vocab_size=worker.vocab_size,
        ends=worker.source.eos_token_ids,
    )


def build_ranks(config: EngineConfig, platform: ActivePlatform, *, progress: Progress | None = None) -> Worker:
    """Rank 0's worker, whose executor runs every step on all ranks. The others are processes that end with it."""
    if config.parallel.tensor_parallel_size == 1:
        return build_worker(config, platform, progress=progress)
    ranks = start_ranks(config, platform.lock, platform.launch(config))
    try:
        with ranks.blamed():
            worker = build_worker(config, platform, progress=progress, peers=ranks)
            ranks.meet("ready", kv_state(worker))
    except BaseException:
        ranks.close()
        ranks.abandon()
        raise
    ready = worker.executor.ready if isinstance(worker.executor, ModelRunner) else None
    return replace(worker, executor=RankedExecutor(worker.executor, ranks, worker.comm, ready=ready))


def model_info(config: EngineConfig, platform: str, worker: Worker) -> ModelInfo:
    """What the API side has to know of the loaded model."""
    source = worker.source
    model = config.model
    default_name = model.model or source.path.stem
    return ModelInfo(
        model=model.model or str(source.path),
        served_names=model.served_model_name or (default_name,),
        max_model_len=worker.limits.max_model_len,
        vocab_size=worker.vocab_size,
        eos_token_ids=source.eos_token_ids,
        default_sampling=default_sampling(source) if model.generation_config != "none" else {},
        platform=platform,
        dtype=worker.dtype,
        num_kv_blocks=worker.executor.kv_groups[0].num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        logprobs_mode=model.logprobs_mode,
        logits_processors=tuple(sorted(worker.processors)),
    )


def default_sampling(source: ModelSource) -> dict[str, float | int]:
    """Sampling defaults of the model's generation_config."""
    found: Mapping[str, object] = source.generation_config
    return {
        ours: value
        for theirs, ours in SAMPLING_DEFAULTS.items()
        if isinstance(value := found.get(theirs), int | float) and not isinstance(value, bool)
    }
