"""Tool calls in brackets: `[call get_weather]{"city": "Paris"}[/call]`, as states and the marks between them."""

from __future__ import annotations

from octavo.plugin.parsers import CallTag, Move, State, ToolFormat

BRACKET = ToolFormat(
    opens={"[call ": Move(to="name")},
    closes=("[/call]",),
    states={
        "name": State(kind="name", marks={"]": Move(to="arguments")}),
        "arguments": State(kind="arguments", marks={"[/call]": Move(to="after", end=True)}, then="after"),
    },
    tag=CallTag(begin="[call {name}]", end="[/call]", between="\n", trigger="[call "),
)
