"""`octavo chat`: talk with a model in the terminal, in this process."""

from __future__ import annotations

from typing import Any

import click

from octavo.cli.options import config_from, engine_options
from octavo.cli.sampling import sampling_options, take_sampling, with_defaults
from octavo.errors import RequestError
from octavo.llm import LLM
from octavo.sampling.params import SamplingParams

HELP = "Type a message. /clear forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."


@click.command()
@click.option("--system", default=None, help="System message: how the model should behave.")
@sampling_options
@engine_options
def chat(system: str | None, **flags: Any) -> None:
    """Talk with MODEL. Every turn reuses the cached beginning of the conversation."""
    given = take_sampling(flags)
    with LLM.from_config(config_from(flags)) as llm:
        params = with_defaults(llm.get_default_sampling_params(), given)
        click.secho(f"{llm.info.served_names[0]} on {llm.info.platform}. {HELP}", dim=True, err=True)
        beginning = [{"role": "system", "content": system}] if system else []
        messages = list(beginning)
        while (text := read_line()) is not None:
            if text == "/exit":
                return
            if text == "/clear":
                messages = list(beginning)
                continue
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = stream_answer(llm, messages, params)
            except RequestError as error:
                # The turn does not fit or the template refuses it: the conversation before it is still good.
                messages.pop()
                click.secho(str(error), fg="red", err=True)
                continue
            messages.append({"role": "assistant", "content": answer})


def read_line() -> str | None:
    """The user's next line; None at the end of input or on Ctrl-C."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None


def stream_answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes and return it; Ctrl-C ends it early and keeps what there is."""
    pieces: list[str] = []
    stream = llm.stream({"prompt_token_ids": llm.get_tokenizer().encode_chat(messages)}, params)
    try:
        for delta in stream:
            for output in delta.outputs:
                pieces.append(output.text)
                click.echo(output.text, nl=False)
    except KeyboardInterrupt:
        stream.close()
    click.echo()
    return "".join(pieces)
