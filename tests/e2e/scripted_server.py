"""A server process over a scripted engine: everything real but the model. Starts in about a second, without torch.

    python scripted_server.py '{"port": 0, ...ServerOptions}' '{"delay": 0.01, ...}'

Prints one JSON line when it serves, and another at each SIGUSR1. Every prompt is answered with its own first token
for ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import uvloop

from octavo.config import EngineConfig, make_config
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.server.lifecycle import serve
from octavo.server.options import ServerOptions
from octavo.server.service import Service
from octavo.testing.scripted import ScriptedExecutor

VOCAB, MAX_LEN = 512, 4096


def build(config: EngineConfig) -> tuple[EngineLoop, ModelInfo]:
    """The engine, built inside its own process."""
    how = json.loads(os.environ["SCRIPTED_ENGINE"])
    executor = ScriptedExecutor(
        lambda prompt: [prompt[0]] * MAX_LEN,
        kv_groups=(KVGroup(block_size=16, num_blocks=how.get("num_blocks", 4096)),),
        vocab_size=VOCAB,
        eos=2,
        delay=how.get("delay", 0.0),
    )
    loop = EngineLoop(
        executor,
        cache=config.cache,
        scheduler=config.scheduler,
        limits=ScheduleLimits(),
        max_model_len=MAX_LEN,
        run_ahead=0,
    )
    info = ModelInfo(
        model="scripted",
        served_names=("scripted",),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        platform="scripted",
        dtype="none",
        num_kv_blocks=how.get("num_blocks", 4096),
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    return loop, info


def announce(service: Service, url: str) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell_tasks)
    print(json.dumps({"url": url, "engine": service.client._transport.pid, "grpc": service.grpc_address}), flush=True)


def tell_tasks() -> None:
    """Say how many tasks there are, so that a test sees those that are never done."""
    print(json.dumps({"tasks": len(asyncio.all_tasks())}), flush=True)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    os.environ["SCRIPTED_ENGINE"] = sys.argv[2]
    engine = json.loads(sys.argv[2])
    config = make_config(skip_tokenizer_init=True, max_num_seqs=engine.get("max_num_seqs", 64))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(serve(config, ServerOptions(**options), on_ready=announce, build=build)))
