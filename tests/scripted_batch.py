"""`octavo run-batch` over the scripted engine of scripted_server.py.

python scripted_batch.py INPUT OUTPUT '{"delay": 0.01, ...}'
"""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop
from scripted_server import build

from octavo.cli.run_batch import answer_file
from octavo.config import make_config
from octavo.server.options import ServerOptions

if __name__ == "__main__":
    source, target, os.environ["SCRIPTED_ENGINE"] = sys.argv[1:]
    config = make_config(skip_tokenizer_init=True, max_num_seqs=4)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(answer_file(source, target, config, ServerOptions(), build=build)), file=sys.stderr)
