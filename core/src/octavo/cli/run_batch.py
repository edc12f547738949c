"""`octavo run-batch`: answer a file of requests in this process, without a server."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import click

from octavo.cli.config_file import ConfigurableCommand
from octavo.cli.options import config_from, engine_options
from octavo.cli.serve import server_options, set_up_logging
from octavo.config import EngineConfig
from octavo.engine.process import Build
from octavo.server.options import ServerOptions

ANSWER_FIELDS = (
    "max_logprobs",
    "tool_call_parser",
    "reasoning_parser",
    "tool_strict_level",
    "trust_request_chat_template",
    "log_level",
)
"""Options of the server that matter without one."""


@click.command(cls=ConfigurableCommand)
@click.option("-i", "--input-file", required=True, help="Requests, a JSON object a line; - is standard input.")
@click.option("-o", "--output-file", required=True, help="Where answers go, one a line; - is standard output.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Requests at a time.  [default: 2 x --max-num-seqs]",
)
@click.option("--model", "model_flag", help="The same as MODEL.")
@partial(server_options, fields=ANSWER_FIELDS)
@engine_options
def run_batch(input_file: str, output_file: str, concurrency: int | None, model_flag: str | None, **flags: Any) -> None:
    """Answer the requests of a file with MODEL (OpenAI's batch format).

    A line is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; each gets a line in the
    output file as soon as it is done. Started again, the run goes on: what the output file has is not asked again.
    """
    if model_flag is not None:
        if flags["model"] is not None and flags["model"] != model_flag:
            raise click.UsageError("MODEL and --model differ")
        flags["model"] = model_flag
    options = ServerOptions(**{field: flags.pop(field) for field in ANSWER_FIELDS})
    config = config_from(flags)
    set_up_logging(options)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        said = runner.run(answer_file(input_file, output_file, config, options, concurrency=concurrency))
    click.echo(said, err=True)


async def answer_file(
    input_file: str,
    output_file: str,
    config: EngineConfig,
    options: ServerOptions,
    *,
    concurrency: int | None = None,
    build: Build | None = None,
) -> str:
    """Answer a file of requests; gives a line on how it went. build: as of `octavo.server.lifecycle.serve`.

    Raises ConfigError for files and parsers that cannot be used, before a model is loaded, and EngineDeadError.
    """
    from octavo.engine.client import EngineClient
    from octavo.engine.process import start_engine
    from octavo.progress import ProgressBar
    from octavo.server.batch.results import open_results
    from octavo.server.batch.run import BatchRun, num_generated
    from octavo.server.batch.source import count_lines, numbered, open_input
    from octavo.server.formats import check_names
    from octavo.server.service import Service

    check_names(options)
    source = open_input(input_file)
    results = open_results(output_file)
    try:
        client = await EngineClient.connect(await start_engine(config, build=build))
        try:
            with ProgressBar(count_lines(source), enabled=True) as progress:
                run = BatchRun(
                    Service(client, options),
                    results,
                    on_done=lambda result: progress.advance(requests=1, tokens=num_generated(result)),
                )
                await run.run(numbered(source), concurrency=concurrency or 2 * client.info.max_num_seqs)
        finally:
            await client.shutdown()
    finally:
        results.close()
        if source is not sys.stdin.buffer:
            source.close()
    skipped = f", {run.num_skipped} were there already" if run.num_skipped else ""
    return f"{run.num_answered} answered, {run.num_refused} refused{skipped}: {output_file}"
