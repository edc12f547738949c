"""Tool formats whose arguments are JSON. The texts are in docs/tool-calling.md."""

from __future__ import annotations

from octavo.server.parsers.grammar import CallTag, Move, State, ToolFormat

ENVELOPE_TAG = '{"name": "{name}", "arguments": '
ITEM = Move(to="item")
OBJECT = Move(to="object", keep=True)
AFTER = Move(to="after")
LIST = {
    "item": State(kind="envelope", marks={"]": Move(to="after", end=True)}, then="listed"),
    "listed": State(kind="gap", marks={",": ITEM, "]": Move(to="after", end=True)}),
}
"""`[{...}, {...}]`, behind the bracket."""

STRICT_LIST = LIST | {"item": State(kind="envelope", marks=LIST["item"].marks, then="listed", strict=True)}


def one_by_one(opening: str, ending: str) -> ToolFormat:
    """Every call is an object between two marks. The second may be missing."""
    return ToolFormat(
        opens={opening: Move(to="object")},
        closes=(ending,),
        states={"object": State(kind="envelope", marks={ending: Move(to="after", end=True)}, then="after")},
        tag=CallTag(begin=f"{opening}\n{ENVELOPE_TAG}", end=f"}}\n{ending}", between="\n", trigger=opening),
    )


def in_a_list(*openings: str, ending: str = "", space: str = "") -> ToolFormat:
    """All calls are objects of one list behind a mark (the first one given is what models are held to)."""
    gap = Move(to="opened")
    return ToolFormat(
        opens=dict.fromkeys(openings, gap),
        closes=(ending,) if ending else (),
        states={"opened": State(kind="gap", marks={"[": ITEM, "{": OBJECT}), "object": OBJECT_STATE, **LIST},
        tag=CallTag(
            begin=ENVELOPE_TAG,
            end="}",
            before=f"{openings[0]}{space}[",
            between=", ",
            after=f"]{ending}",
            trigger=openings[0],
        ),
    )


OBJECT_STATE = State(kind="envelope", then="after")
STRICT_OBJECT = State(kind="envelope", then="after", strict=True)

HERMES = one_by_one("<tool_call>", "</tool_call>")

GRANITE = in_a_list("<|tool_call|>", "<tool_call>")

GRANITE_20B_FC = ToolFormat(
    opens={"<function_call>": Move(to="object")},
    states={"object": OBJECT_STATE},
    tag=CallTag(begin=f"<function_call> {ENVELOPE_TAG}", end="}", between=" ", trigger="<function_call>"),
)

PHI4_MINI = in_a_list("functools")

JAMBA = in_a_list("<tool_calls>", ending="</tool_calls>")

LLAMA3 = ToolFormat(
    opens={"<|python_tag|>": Move(to="tagged")},
    leads={"{": OBJECT},
    again={";": Move(to="tagged"), "{": OBJECT},
    states={"tagged": State(kind="gap", marks={"{": OBJECT}), "object": STRICT_OBJECT},
    tag=CallTag(begin='{"name": "{name}", "parameters": ', end="}", between="; "),
)

XLAM = ToolFormat(
    opens=dict.fromkeys(("```json", "```", "<tool_call>", "[TOOL_CALLS]"), Move(to="opened")),
    leads={"[": ITEM, "{": OBJECT},
    closes=("```", "</tool_call>"),
    states={
        "opened": State(kind="gap", marks={"[": ITEM, "{": OBJECT}),
        "object": STRICT_OBJECT,
        **STRICT_LIST,
    },
    tag=CallTag(begin=ENVELOPE_TAG, end="}", before="[", between=", ", after="]"),
)

MISTRAL = ToolFormat(
    opens={"[TOOL_CALLS]": Move(to="opened")},
    states={
        "opened": State(kind="gap", marks={"[": ITEM, "{": OBJECT}, otherwise="name"),
        "name": State(
            kind="name",
            marks={
                "[ARGS]": Move(to="arguments"),
                "[CALL_ID]": Move(to="number"),
                "{": Move(to="arguments", keep=True),
            },
        ),
        "number": State(kind="key", marks={"[ARGS]": Move(to="arguments")}),  # the model's own id is not used
        "arguments": State(kind="arguments", then="after"),
        "object": OBJECT_STATE,
        **LIST,
    },
    ids="short",
    tag=CallTag(begin="[TOOL_CALLS]{name}[ARGS]", end="", trigger="[TOOL_CALLS]"),
)
"""Both ways: since tokenizer version 11 each call has its own mark, before it one mark stood before a list."""

MISTRAL_LIST = ToolFormat(
    opens=MISTRAL.opens,
    states=MISTRAL.states,
    ids="short",
    tag=CallTag(begin=ENVELOPE_TAG, end="}", before="[TOOL_CALLS] [", between=", ", after="]", trigger="[TOOL_CALLS]"),
)

INTERNLM = ToolFormat(
    opens={"<|action_start|>": Move(to="opened")},
    closes=("<|action_end|>",),
    states={
        "opened": State(kind="gap", marks={"<|plugin|>": Move(to="object")}),
        "object": State(kind="envelope", marks={"<|action_end|>": Move(to="after", end=True)}, then="after"),
    },
    tag=CallTag(
        begin='<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ',
        end="}<|action_end|>",
        between="\n",
        trigger="<|action_start|>",
    ),
)

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK_V3 = ToolFormat(
    opens={CALLS: Move(to="section"), CALL: Move(to="type")},
    states={
        "section": State(
            kind="gap",
            marks={
                CALL: Move(to="type"),
                CALLS_END: Move(to="after", end=True),
                CALL_END: Move(to="section", end=True),
                "```": Move(to="section", end=True),
            },
        ),
        "type": State(kind="gap", marks={f"function{SEPARATOR}": Move(to="name")}),
        "name": State(
            kind="name",
            marks={
                "```json": Move(to="arguments"),
                "```": Move(to="arguments"),
                CALL_END: Move(to="section", end=True),
            },
        ),
        "arguments": State(
            kind="arguments",
            marks={"```": Move(to="section", end=True), CALL_END: Move(to="section", end=True)},
            then="section",
        ),
    },
    tag=CallTag(
        begin=f"{CALL}function{SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{CALL_END}",
        before=CALLS,
        between="\n",
        after=CALLS_END,
        trigger=CALLS,
    ),
)

DEEPSEEK_V31 = ToolFormat(
    opens={CALLS: Move(to="section"), CALL: Move(to="name")},
    states={
        "section": State(
            kind="gap",
            marks={
                CALL: Move(to="name"),
                CALLS_END: Move(to="after", end=True),
                CALL_END: Move(to="section", end=True),
            },
        ),
        "name": State(kind="name", marks={SEPARATOR: Move(to="arguments"), CALL_END: Move(to="section", end=True)}),
        "arguments": State(kind="arguments", marks={CALL_END: Move(to="section", end=True)}, then="section"),
    },
    tag=CallTag(begin=f"{CALL}{{name}}{SEPARATOR}", end=CALL_END, before=CALLS, after=CALLS_END, trigger=CALLS),
)

KIMI_K2 = ToolFormat(
    opens={"<|tool_calls_section_begin|>": Move(to="section"), "<|tool_call_begin|>": Move(to="name")},
    states={
        "section": State(
            kind="gap",
            marks={
                "<|tool_call_begin|>": Move(to="name"),
                "<|tool_call_end|>": Move(to="section", end=True),
                "<|tool_calls_section_end|>": Move(to="after", end=True),
            },
        ),
        "name": State(
            kind="name",
            marks={
                "<|tool_call_argument_begin|>": Move(to="arguments"),
                "<|tool_call_end|>": Move(to="section", end=True),
            },
        ),
        "arguments": State(kind="arguments", marks={"<|tool_call_end|>": Move(to="section", end=True)}, then="section"),
    },
    name=r"(?:functions\.)?(?P<name>.+?)(?::\d+)?",
    ids="name",
    tag=CallTag(
        begin="<|tool_call_begin|>functions.{name}:",
        number="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
    ),
)

HEADER = Move(to="header", keep=True)
MESSAGE_ENDS = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), AFTER)
MESSAGE_STARTS = {"<|channel|>": HEADER, "<|start|>": HEADER}
CALL_ENDS = dict.fromkeys(MESSAGE_ENDS, Move(to="after", end=True))
CALL_ENDS |= dict.fromkeys(MESSAGE_STARTS, Move(to="header", keep=True, end=True))

HARMONY = ToolFormat(
    whole=True,
    turn="<|start|>",
    states={
        "start": State(kind="blank", marks=MESSAGE_STARTS, keeps=True, otherwise="content"),
        "header": State(
            kind="header",
            marks={"<|message|>": Move(to="content")},
            routes=(
                (r"to=functions\.(?P<name>[\w.\-]+)", "arguments"),
                (r"<\|channel\|>\s*final", "content"),
                (r"", "reasoning"),
            ),
        ),
        "content": State(kind="content", marks=MESSAGE_ENDS | MESSAGE_STARTS),
        "reasoning": State(kind="reasoning", marks=MESSAGE_ENDS | MESSAGE_STARTS),
        "arguments": State(kind="arguments", marks=CALL_ENDS, then="after"),
        "after": State(kind="blank", marks=MESSAGE_ENDS | MESSAGE_STARTS, otherwise="content"),
    },
    stops=("<|call|>",),
    tag=CallTag(
        begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        end="<|call|>",
        between="<|start|>assistant",
        trigger="<|channel|>commentary to=functions.",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
)
"""Messages of channels: analysis and commentary are reasoning, final is the answer; one to `functions.f` is a call."""
