"""A server process over a scripted engine that answers in text: everything real but the model.

    python page_server.py FOLDER '{"port": 0, ...ServerOptions}' '{"delay": 0.01, "answers": {"question": "answer"}}'

FOLDER holds a tokenizer of 384 ids. The answer is that of the conversation's last question, or result of a tool.
Prints its URL when it serves.
"""

from __future__ import annotations

import asyncio
import json
import os
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
from octavo.testing.scripted import ScriptedExecutor

VOCAB, EOS, MAX_LEN, NUM_BLOCKS = 384, 2, 8192, 2048
UNKNOWN = "I have nothing to say about that."


def build(config: EngineConfig) -> tuple[EngineLoop, ModelInfo]:
    """The engine, built inside its own process."""
    from tokenizers import Tokenizer

    how = json.loads(os.environ["PAGE_SERVER"])
    tokenizer = Tokenizer.from_file(str(Path(config.model.model) / "tokenizer.json"))

    def script(prompt: tuple[int, ...]) -> list[int]:
        turns = tokenizer.decode(list(prompt), skip_special_tokens=False).split("<|im_start|>")
        asked = next(turn for turn in reversed(turns) if turn.startswith(("user\n", "tool\n")))
        question = asked.partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>").strip()
        return [*tokenizer.encode(how["answers"].get(question, UNKNOWN), add_special_tokens=False).ids, EOS]

    executor = ScriptedExecutor(
        script,
        kv_groups=(KVGroup(block_size=16, num_blocks=NUM_BLOCKS),),
        vocab_size=VOCAB,
        eos=EOS,
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
        served_names=("scripted-1b-instruct", "another-name"),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        platform="scripted",
        dtype="none",
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    return loop, info


def announce(service: Service, url: str) -> None:
    print(url, flush=True)


if __name__ == "__main__":
    folder, options, os.environ["PAGE_SERVER"] = sys.argv[1:]
    config = make_config(model=folder, max_num_seqs=8)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(serve(config, ServerOptions(**json.loads(options)), on_ready=announce, build=build)))
