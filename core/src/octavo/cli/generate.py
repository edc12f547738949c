"""`octavo generate`: complete prompts in this process."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from octavo.cli.config_file import ConfigurableCommand
from octavo.cli.options import config_from, engine_options
from octavo.cli.sampling import sampling_options, take_sampling, with_defaults
from octavo.llm import LLM
from octavo.outputs import RequestOutput


@click.command(cls=ConfigurableCommand)
@click.option(
    "-p", "--prompt", "prompts", multiple=True, help="Text to complete; standard input if left out. Repeatable."
)
@click.option("-n", "--n", "num_answers", type=int, default=1, show_default=True, help="Answers per prompt.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt, with token ids and finish reasons.")
@sampling_options
@engine_options
def generate(prompts: tuple[str, ...], num_answers: int, as_json: bool, **flags: Any) -> None:
    """Complete prompts with MODEL and print the text.

    One prompt with one answer is printed as it comes. --seed makes sampled answers repeatable.
    """
    given = {**take_sampling(flags), "n": num_answers}
    config = config_from(flags)
    if not prompts:
        if sys.stdin.isatty():
            raise click.UsageError("give --prompt, or text on standard input")
        prompts = (sys.stdin.read(),)
    with LLM.from_config(config) as llm:
        params = with_defaults(llm.get_default_sampling_params(), given)
        if len(prompts) == 1 and num_answers == 1 and not as_json:
            for delta in llm.stream(prompts[0], params):
                for output in delta.outputs:
                    click.echo(output.text, nl=False)
            click.echo()
            return
        for result in llm.generate(list(prompts), params):
            click.echo(msgspec.json.encode(result) if as_json else as_text(result))


def as_text(result: RequestOutput) -> str:
    """The answers to one prompt; numbered when there are several."""
    if len(result.outputs) == 1:
        return result.outputs[0].text
    return "\n".join(f"[{output.index}] {output.text}" for output in result.outputs)
