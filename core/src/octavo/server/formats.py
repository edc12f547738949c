"""Which of the formats in `server.parsers` the served model gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.extensions import load_extensions
from octavo.server.options import ServerOptions
from octavo.server.parsers.detect import GENERIC
from octavo.server.parsers.registry import Format, choose

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer


def check_names(options: ServerOptions) -> None:
    """Raise ConfigError for a parser that does not exist, before a model is loaded."""
    choose(load_extensions(), tool_call_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser)


def model_format(tokenizer: Tokenizer | None, options: ServerOptions) -> Format:
    """The format that the operator named, or that the chat templates show. Raises ConfigError for an unknown name."""
    templates: Mapping[str, str] = {}
    if tokenizer is not None and tokenizer.chat_template is not None:
        templates = tokenizer.chat_template.templates

    def has_token(text: str) -> bool:
        return tokenizer is not None and len(tokenizer.encode(text, add_special_tokens=False)) == 1

    return choose(
        load_extensions(),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        template="\n".join(templates.values()),
        has_token=has_token,
        response_template=tokenizer.response_template if tokenizer is not None else None,
    )


def plain_format() -> Format:
    """Tool calls as plain JSON: for a model whose own format no grammar describes."""
    return choose(load_extensions(), tool_call_parser=GENERIC, reasoning_parser="none")
