"""`octavo bench serve`: load on a running server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.bench.workload import WARMUP_LENGTHS, WARMUP_SEED, Work, make_work
from octavo.cli.bench_options import COUNT, NATURAL, output_options, workload_options
from octavo.cli.bench_report import counter, environment, milliseconds, seconds, show
from octavo.cli.config_file import ConfigurableCommand
from octavo.cli.table import columns
from octavo.errors import EngineError

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

BUSY_CLIENT = 0.8
"""Above this share of one CPU the load generator itself may be what is measured."""


@click.command(cls=ConfigurableCommand)
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens.")
@click.option("--model", help="Name of the model; the first one that the server lists if left out.")
@click.option(
    "--endpoint",
    type=click.Choice(("/v1/completions", "/v1/chat/completions")),
    default="/v1/completions",
    show_default=True,
    help="Which API is called. Chat takes text, so it needs --tokenizer.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Bearer token.  [env: OPENAI_API_KEY]")
@workload_options
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the requests and their arrival times.")
@click.option("--tokenizer", help="Folder, .gguf file or repository; needed for chat and sharegpt.")
@click.option("--vocab-size", type=COUNT, help="Draw ids below this, for a model with fewer than 30000.")
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    show_default=True,
    help="Requests a second, arriving as a Poisson process; inf sends all at once.",
)
@click.option("--max-concurrency", type=COUNT, help="Most requests at a time; others wait here, off the clock.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of exactly the drawn length.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Randomness.")
@click.option("--num-warmups", type=NATURAL, default=1, show_default=True, help="Short requests before the clock runs.")
@click.option("--metric-percentiles", default="90,99", show_default=True, help="Percentiles, by commas.")
@click.option(
    "--goodput", multiple=True, help="Goal such as ttft:200 (ttft, tpot, e2el in ms) for request_goodput. Repeatable."
)
@output_options
def serve(
    output_json: Path | None, as_json: bool, metric_percentiles: str, goodput: tuple[str, ...], **flags: Any
) -> None:
    """Send streaming requests to a running server and measure when their tokens arrive.

    TTFT: time to first token. TPOT: time per further token of an answer. ITL: between two events of a stream.
    E2EL: to the end of the answer.
    """
    from octavo.bench.summary import read_goals, read_percentiles, summarize

    percentiles, goals = read_percentiles(metric_percentiles), read_goals(goodput)
    facts, answers, duration, cpu = run_load(**flags)
    figures = summarize(answers, duration=duration, percentiles=percentiles, goals=goals)
    figures["client_cpu_share"] = cpu / duration
    show(facts | figures, served_table(figures, percentiles), output_json=output_json, as_json=as_json)
    for error, count in figures["errors"].items():
        click.echo(f"{count} failed: {error}", err=True)
    if figures["client_cpu_share"] > BUSY_CLIENT:
        click.echo("This client used nearly a whole CPU: it may have been the bottleneck.", err=True)
    if not figures["completed"]:
        raise EngineError(f"all {figures['failed']} requests failed; the reasons are above")


def run_load(
    *,
    base_url: str,
    model: str | None,
    endpoint: str,
    api_key: str,
    num_prompts: int,
    dataset_name: str,
    dataset_path: Path | None,
    input_len: int | None,
    output_len: int | None,
    seed: int,
    tokenizer: str | None,
    vocab_size: int | None,
    request_rate: float,
    max_concurrency: int | None,
    ignore_eos: bool,
    temperature: float,
    num_warmups: int,
) -> tuple[dict[str, Any], list[Any], float, float]:
    """(facts about the run, answers, seconds, CPU seconds of this process)."""
    import uvloop

    from octavo.bench.serve import arrival_times, first_model, replay, request_bodies, warm_up
    from octavo.bench.sse_client import Client

    base_url = base_url.rstrip("/")
    client = Client(base_url + endpoint, api_key=api_key)
    loaded = load(tokenizer)
    if vocab_size is None and loaded is not None:
        vocab_size = loaded.vocab_size
    work = make_work(
        dataset_name,
        num_prompts=num_prompts,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        vocab_size=vocab_size,
        path=dataset_path,
        tokenizer=loaded,
    )
    model = model or first_model(base_url, api_key=api_key)

    def bodies_of(some: list[Work], *, ignore_eos: bool) -> list[bytes]:
        return request_bodies(
            some, endpoint=endpoint, model=model, tokenizer=loaded, ignore_eos=ignore_eos, temperature=temperature
        )

    bodies = bodies_of(work, ignore_eos=ignore_eos)
    first = make_work(
        "random",
        num_prompts=num_warmups,
        seed=WARMUP_SEED,
        input_len=WARMUP_LENGTHS[0],
        output_len=WARMUP_LENGTHS[1],
        vocab_size=vocab_size,
    )
    first_bodies = bodies_of(first, ignore_eos=False)
    arrivals = arrival_times(num_prompts, request_rate=request_rate, seed=seed)

    async def measure() -> tuple[list[Any], float, float]:
        await warm_up(client, first_bodies)
        with counter("Requests", num_prompts) as on_answer:
            cpu = time.process_time()
            answers, duration = await replay(
                client, bodies, arrivals, max_concurrency=max_concurrency, on_answer=on_answer
            )
            cpu = time.process_time() - cpu
        client.close()
        return answers, duration, cpu

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers, duration, cpu = runner.run(measure())
    facts = environment() | {
        "base_url": base_url,
        "endpoint": endpoint,
        "model_id": model,
        "dataset_name": dataset_name,
        "input_len": input_len,
        "output_len": output_len,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "seed": seed,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(request_rate) else request_rate,
        "max_concurrency": max_concurrency,
    }
    return facts, answers, duration, cpu


def load(tokenizer: str | None) -> Tokenizer | None:
    """The tokenizer that was named, if any."""
    if tokenizer is None:
        return None
    from octavo.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer)


def served_table(figures: Mapping[str, Any], percentiles: tuple[float, ...]) -> str:
    """Totals, then a line per latency."""
    rows = [
        ("completed", figures["completed"]),
        ("failed", figures["failed"]),
        ("most at once", figures["max_concurrent_requests"]),
        ("duration", seconds(figures["duration"])),
        ("input tokens", figures["total_input_tokens"]),
        ("output tokens", figures["total_output_tokens"]),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("total tokens/s", f"{figures['total_token_throughput']:.1f}"),
    ]
    if "request_goodput" in figures:
        rows.append(("requests/s in goal", f"{figures['request_goodput']:.2f}"))
    rows.append(("client's CPU", f"{figures['client_cpu_share']:.0%}"))
    keys = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
    spreads = [
        (name.upper(), *(milliseconds(figures[f"{key}_{name}_ms"]) for key in keys))
        for name in ("ttft", "tpot", "itl", "e2el")
    ]
    header = ("MS", *(key.upper() for key in keys))
    return f"{columns(('SERVED', 'VALUE'), rows)}\n\n{columns(header, spreads)}"
