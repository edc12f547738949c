"""Puts the pieces together: config -> platform -> worker -> engine. The only place that knows them all."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from octavo.active_platform import ActivePlatform, PlatformLock
from octavo.config import EngineConfig
from octavo.discovery import load, select
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError
from octavo.features import negotiate
from octavo.runner.worker import Progress, Worker, build_worker
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
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "tensor_parallel_size: this version starts one worker only (layers can already be sliced); leave it at 1"
        )
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
    """A ready engine in this process. Raises PlatformError, ModelError or ConfigError."""
    config, platform = activate(config, lock)
    worker = build_worker(config, platform, progress=progress)
    caps = platform.caps
    run_ahead = config.scheduler.run_ahead
    if run_ahead is None:
        run_ahead = 1 if caps.streams else 0
    loop = EngineLoop(
        worker.executor,
        cache=config.cache,
        scheduler=config.scheduler,
        limits=caps.schedule,
        max_model_len=worker.limits.max_model_len,
        run_ahead=run_ahead,
    )
    return loop, model_info(config, platform.name, worker)


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
    )


def default_sampling(source: ModelSource) -> dict[str, float | int]:
    """Sampling defaults of the model's generation_config."""
    found: Mapping[str, object] = source.generation_config
    return {
        ours: value
        for theirs, ours in SAMPLING_DEFAULTS.items()
        if isinstance(value := found.get(theirs), int | float) and not isinstance(value, bool)
    }
