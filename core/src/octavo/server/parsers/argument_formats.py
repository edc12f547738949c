"""Tool formats that write arguments one by one: between tags, in braces without quotes, or as Python does."""

from __future__ import annotations

from octavo.server.parsers.grammar import CallTag, Move, State, ToolFormat

END = Move(to="after", end=True)


def function_tags(tag: str) -> ToolFormat:
    """`<function=f>`, `<parameter=k>`, in an outer tag that may be missing."""
    opening, ending = f"<{tag}>", f"</{tag}>"
    key, call = Move(to="key"), Move(to="name")
    value_ends = {"</parameter>": Move(to="parameters"), "</function>": END, "<parameter=": key}
    return ToolFormat(
        opens={opening: Move(to="opened"), "<function=": call},
        closes=(ending, "</function>"),
        states={
            "opened": State(kind="gap", marks={"<function=": call}),
            "name": State(kind="name", marks={">": Move(to="parameters")}),
            "parameters": State(kind="gap", marks={"<parameter=": key, "</function>": END, ending: END}),
            "key": State(kind="key", marks={">": Move(to="value")}),
            "value": State(
                kind="value",
                marks=value_ends | {f"\n{mark}": move for mark, move in value_ends.items()},
                trim=True,
            ),
        },
        tag=CallTag(
            begin=f"{opening}\n<function={{name}}>",
            end=f"</function>\n{ending}",
            style="qwen_xml",
            between="\n",
            trigger=opening,
        ),
    )


QWEN3_CODER = function_tags("tool_call")
SEED_OSS = function_tags("seed:tool_call")

GLM = ToolFormat(
    opens={"<tool_call>": Move(to="opened")},
    closes=("</tool_call>",),
    states={
        "opened": State(kind="gap", otherwise="name"),
        "name": State(
            kind="name",
            marks={"\n": Move(to="parameters"), "<arg_key>": Move(to="key"), "</tool_call>": END},
        ),
        "parameters": State(kind="gap", marks={"<arg_key>": Move(to="key"), "</tool_call>": END}),
        "key": State(kind="key", marks={"</arg_key>": Move(to="between")}),
        "between": State(kind="gap", marks={"<arg_value>": Move(to="value")}),
        "value": State(kind="value", marks={"</arg_value>": Move(to="parameters")}),
    },
    tag=CallTag(begin="<tool_call>{name}", end="</tool_call>", style="glm_xml", between="\n", trigger="<tool_call>"),
)


def invocations(calls: str, *, prefix: str = "", style: str, value_starts: dict[str, bool | None]) -> ToolFormat:
    """`<calls><invoke name="f"><parameter name="k">v</parameter></invoke></calls>`, tag names with a prefix.

    value_starts: what ends a key, and whether it says that the value is text.
    """
    opening, ending = f"<{prefix}{calls}>", f"</{prefix}{calls}>"
    invoke, parameter = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
    invoke_end, parameter_end = f"</{prefix}invoke>", f"</{prefix}parameter>"
    over = Move(to="section", end=True)
    return ToolFormat(
        opens={opening: Move(to="section")},
        states={
            "section": State(kind="gap", marks={invoke: Move(to="name"), invoke_end: over, ending: END}),
            "name": State(kind="name", marks={'">': Move(to="parameters")}),
            "parameters": State(kind="gap", marks={parameter: Move(to="key"), invoke_end: over, ending: END}),
            "key": State(
                kind="key", marks={mark: Move(to="value", is_text=is_text) for mark, is_text in value_starts.items()}
            ),
            "value": State(kind="value", marks={parameter_end: Move(to="parameters"), invoke_end: over}),
        },
        tag=CallTag(
            begin=f'{invoke}{{name}}">',
            end=f"{invoke_end}\n",
            style=style,
            before=f"{opening}\n",
            after=ending,
            trigger=opening,
        ),
    )


MINIMAX_M2 = invocations("minimax:tool_call", style="minimax_xml", value_starts={'">': None})
DSML = {'" string="true">': True, '" string="false">': False, '">': None}
DEEPSEEK_V32 = invocations("function_calls", prefix="｜DSML｜", style="deepseek_xml", value_starts=DSML)
DEEPSEEK_V4 = invocations("tool_calls", prefix="｜DSML｜", style="deepseek_xml", value_starts=DSML)


def braces(opening: str, ending: str, quote: str, *, style: str, closes: tuple[str, ...] = ()) -> ToolFormat:
    """`call:f{k:"v",n:42}` between two marks: keys are bare, strings stand between two quote marks."""
    return ToolFormat(
        opens={opening: Move(to="opened")},
        closes=(ending, *closes),
        states={
            "opened": State(kind="gap", marks={"call:": Move(to="name")}),
            "name": State(kind="name", marks={"{": Move(to="words", keep=True), ending: END}),
            "words": State(kind="words", marks={quote: Move(to="quote"), ending: END}, then="after"),
            "quote": State(kind="quote", marks={quote: Move(to="words")}),
        },
        tag=CallTag(begin=f"{opening}call:{{name}}", end=ending, style=style, trigger=opening),
    )


GEMMA4 = braces("<|tool_call>", "<tool_call|>", '<|"|>', style="gemma", closes=("<|tool_response>",))
FUNCTION_GEMMA = braces(
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    style="escaped",
    closes=("<start_function_response>",),
)

CALL = Move(to="call")
PYTHON_CALLS = {
    "call": State(kind="pythonic", marks={"]": END}, then="listed"),
    "listed": State(kind="gap", marks={",": CALL, "]": END}),
}
"""`[f(a=1), g()]`, behind the bracket."""

PYTHONIC = ToolFormat(
    leads={"[": CALL},
    states=PYTHON_CALLS,
    tag=CallTag(begin="{name}(", end=")", style="pythonic", before="[", between=", ", after="]"),
)


def pythonic_between(opening: str, ending: str, *, leads: bool) -> ToolFormat:
    """A list of Python calls between two marks, or (`leads`) without them as the whole answer."""
    return ToolFormat(
        opens={opening: Move(to="opened")},
        leads={"[": CALL} if leads else {},
        closes=(ending,),
        states={"opened": State(kind="gap", marks={"[": CALL}), **PYTHON_CALLS},
        tag=CallTag(
            begin="{name}(",
            end=")",
            style="pythonic",
            before=f"{opening}[",
            between=", ",
            after=f"]{ending}",
            trigger=opening,
        ),
    )


LLAMA4_PYTHONIC = pythonic_between("<|python_start|>", "<|python_end|>", leads=True)
LFM2 = pythonic_between("<|tool_call_start|>", "<|tool_call_end|>", leads=False)

OLMO3 = ToolFormat(
    opens={"<function_calls>": Move(to="lines")},
    states={
        "lines": State(kind="gap", marks={"</function_calls>": END}, otherwise="call"),
        "call": State(kind="pythonic", marks={"</function_calls>": END}, then="lines"),
    },
    tag=CallTag(
        begin="{name}(",
        end=")",
        style="pythonic",
        before="<function_calls>\n",
        between="\n",
        after="\n</function_calls>",
        trigger="<function_calls>",
    ),
)
"""One call a line."""
