"""How models mark their reasoning."""

from __future__ import annotations

from octavo.server.parsers.grammar import ReasoningFormat

THINK_START = ("<think>",)
THINK_END = ("</think>", "\n</think>")

THINK = ReasoningFormat(start=THINK_START, end=THINK_END)
"""In tags that the model writes; the prompt may hold the first one, or both where thinking is off."""

THINK_FIRST = ReasoningFormat(start=THINK_START, end=THINK_END, begins=True)
"""The answer begins with reasoning whether a tag says so or not."""

THINK_SHOWN = ReasoningFormat(shown="<think>")
"""The reasoning stays in the content, tags and all, and the first tag stands in the prompt."""

SEED_OSS = ReasoningFormat(start=("<seed:think>",), end=("</seed:think>", "\n</seed:think>"))
MISTRAL = ReasoningFormat(
    start=("[THINK]", "<think>"), end=("[/THINK]", "\n[/THINK]", *THINK_END), anywhere=("[THINK]",)
)
GEMMA4 = ReasoningFormat(
    start=("<|channel>thought",), end=("<channel|>", "\n<channel|>"), anywhere=("<|channel>thought",)
)
GRANITE = ReasoningFormat(
    start=("Here is my thought process:", "Here's my thought process:"),
    end=tuple(
        f"{lead}{mark}" for lead in ("", "\n", "\n\n") for mark in ("Here is my response:", "Here's my response:")
    ),
)
HUNYUAN_A13B = ReasoningFormat(
    start=THINK_START, end=THINK_END, wraps=("<answer>", "<answer>\n", "</answer>", "\n</answer>")
)
ERNIE45 = ReasoningFormat(
    start=THINK_START,
    end=THINK_END,
    begins=True,
    wraps=("<response>", "<response>\n", "</response>", "\n</response>", "\n</response>\n"),
)
GPT_OSS = ReasoningFormat(part_of="openai")
