"""`octavo bench`: measure an engine in this process, or a running server, on seeded work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.bench.workload import check_dataset, make_work
from octavo.cli.bench_options import COUNT, NATURAL, output_options, workload_options
from octavo.cli.bench_report import counter, environment, seconds, show
from octavo.cli.bench_serve import serve
from octavo.cli.config_file import ConfigurableCommand
from octavo.cli.options import config_from, engine_options
from octavo.cli.table import columns
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.llm import LLM

no_detokenize = click.option("--disable-detokenize", is_flag=True, help="Leave out turning token ids into text.")


@click.group()
def bench() -> None:
    """Measure latency, throughput, or a running server.

    Requests are seeded: the same flags send the same token ids on every machine. Answers are greedy.
    """


bench.add_command(serve)


@bench.command(cls=ConfigurableCommand)
@click.option("--input-len", type=COUNT, default=32, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=COUNT, default=128, show_default=True, help="Tokens of an answer.")
@click.option("--batch-size", type=COUNT, default=8, show_default=True, help="Requests at once.")
@click.option("--num-iters", type=COUNT, default=30, show_default=True, help="Batches that are measured.")
@click.option("--num-iters-warmup", type=NATURAL, default=10, show_default=True, help="Batches before them.")
@no_detokenize
@output_options
@engine_options
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int,
    disable_detokenize: bool,
    output_json: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """How long MODEL takes for one batch, from start to last token. Every batch has new prompts."""
    from octavo.bench.offline import measure_latency
    from octavo.llm import LLM

    config = config_from(flags)
    if batch_size > config.scheduler.max_num_seqs:
        raise ConfigError(
            f"batch_size is {batch_size}, but only max_num_seqs = {config.scheduler.max_num_seqs} run at once: "
            "give a larger --max-num-seqs"
        )
    shape = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    with (
        LLM.from_config(config) as llm,
        counter("Measuring", num_iters + num_iters_warmup) as on_iteration,
    ):
        figures = measure_latency(
            llm,
            **shape,
            num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
            seed=config.model.seed,
            detokenize=not (disable_detokenize or config.model.skip_tokenizer_init),
            on_iteration=on_iteration,
        )
        facts = about(llm, flags) | shape
    rows = [("mean", seconds(figures["avg_latency"]))]
    rows += [(f"p{p}", seconds(value)) for p, value in figures["percentiles"].items()]
    rows += [("output tokens/s", f"{figures['output_throughput']:.1f}")]
    show(facts | figures, columns(("LATENCY", "VALUE"), rows), output_json=output_json, as_json=as_json)


@bench.command(cls=ConfigurableCommand)
@workload_options
@click.option("--num-warmups", type=NATURAL, default=8, show_default=True, help="Short requests before the clock runs.")
@no_detokenize
@output_options
@engine_options
def throughput(
    num_prompts: int,
    dataset_name: str,
    dataset_path: Path | None,
    input_len: int | None,
    output_len: int | None,
    num_warmups: int,
    disable_detokenize: bool,
    output_json: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Requests and tokens a second of MODEL when all requests are there from the beginning.

    --seed also draws the requests.
    """
    from octavo.bench.offline import measure_throughput
    from octavo.llm import LLM

    config = config_from(flags)
    check_dataset(dataset_name, input_len=input_len, output_len=output_len, path=dataset_path)
    with LLM.from_config(config) as llm:
        work = make_work(
            dataset_name,
            num_prompts=num_prompts,
            seed=config.model.seed,
            input_len=input_len,
            output_len=output_len,
            vocab_size=llm.info.vocab_size,
            path=dataset_path,
            tokenizer=llm.get_tokenizer() if dataset_name == "sharegpt" else None,
        )
        figures = measure_throughput(
            llm,
            work,
            num_warmups=num_warmups,
            detokenize=not (disable_detokenize or config.model.skip_tokenizer_init),
            show_progress=True,
        )
        facts = about(llm, flags) | {
            "dataset_name": dataset_name,
            "input_len": input_len,
            "output_len": output_len,
            "seed": config.model.seed,
            "num_warmups": num_warmups,
        }
    rows = [
        ("requests", figures["num_requests"]),
        ("input tokens", figures["total_input_tokens"]),
        ("output tokens", figures["total_output_tokens"]),
        ("elapsed", seconds(figures["elapsed_time"])),
        ("requests/s", f"{figures['requests_per_second']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("total tokens/s", f"{figures['tokens_per_second']:.1f}"),
    ]
    show(facts | figures, columns(("THROUGHPUT", "VALUE"), rows), output_json=output_json, as_json=as_json)


def about(llm: LLM, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The environment, the engine, and the engine flags that were given."""
    info = llm.info
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    return environment() | {
        "model": info.model,
        "platform": info.platform,
        "dtype": info.dtype,
        "engine_args": given,
    }
