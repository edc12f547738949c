"""A server process over a scripted engine: everything real but the model. Starts in about a second, without torch.

    python scripted_server.py '{"port": 0, ...ServerOptions}' '{"delay": 0.01, ...}'

Prints one JSON line when it serves, and another at each SIGUSR1. Every prompt is answered with its own first token for
ever; or, with {"tokenizer": FOLDER, "answers": {question: answer}}, a conversation by the answer to its last question,
or to the last result of a tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from octavo.config import EngineConfig, make_config
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.server.lifecycle import serve
from octavo.server.options import ServerOptions
from octavo.server.service import Service
from octavo.testing.scripted import Script, ScriptedExecutor

EOS, NUM_BLOCKS = 2, 4096
UNKNOWN = "I have nothing to say about that."


def answers_of(folder: str, answers: dict[str, str]) -> Script:
    """What is said after a conversation in the ChatML of this tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def script(prompt: tuple[int, ...]) -> list[int]:
        turns = tokenizer.decode(list(prompt), skip_special_tokens=False).split("<|im_start|>")
        asked = next(turn for turn in reversed(turns) if turn.startswith(("user\n", "tool\n")))
        question = asked.partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>").strip()
        return [*tokenizer.encode(answers.get(question, UNKNOWN), add_special_tokens=False).ids, EOS]

    return script


def build(config: EngineConfig) -> tuple[EngineLoop, ModelInfo]:
    """The engine, built inside its own process."""
    how = json.loads(os.environ["SCRIPTED_ENGINE"])
    max_model_len, vocab_size = how.get("max_model_len", 4096), how.get("vocab_size", 512)
    num_blocks = how.get("num_blocks", NUM_BLOCKS)
    talks = "answers" in how
    executor = ScriptedExecutor(
        answers_of(how["tokenizer"], how["answers"]) if talks else lambda prompt: [prompt[0]] * max_model_len,
        kv_groups=(KVGroup(block_size=16, num_blocks=num_blocks),),
        vocab_size=vocab_size,
        eos=EOS,
        delay=how.get("delay", 0.0),
    )
    loop = EngineLoop(
        executor,
        cache=config.cache,
        scheduler=config.scheduler,
        limits=ScheduleLimits(),
        max_model_len=max_model_len,
        run_ahead=0,
    )
    info = ModelInfo(
        model="scripted",
        served_names=tuple(how.get("served_names", ["scripted"])),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        platform="scripted",
        dtype="none",
        num_kv_blocks=num_blocks,
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
    tokenizer = engine.get("tokenizer")
    config = make_config(
        model=tokenizer or "", skip_tokenizer_init=tokenizer is None, max_num_seqs=engine.get("max_num_seqs", 64)
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(serve(config, ServerOptions(**options), on_ready=announce, build=build)))
