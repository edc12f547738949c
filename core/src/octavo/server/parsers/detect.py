"""Tells a model's formats from its chat template, which holds the marks it was trained on."""

from __future__ import annotations

from collections.abc import Callable

HasToken = Callable[[str], bool]

TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_list"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<function_calls>",), "olmo3"),
    (("<|action_start|>",), "internlm"),
    (("<tool_calls>",), "jamba"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
    (("[func_name1(",), "pythonic"),
)
"""(texts that a template must all hold, the format), the most telling first."""

REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("<|channel>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>",), "qwen3"),
    (("<think>",), "qwen3"),
)

TOKEN_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|python_tag|>", "llama3_json"),
)
"""Special tokens that tell the format where the template says nothing of tools."""

GENERIC = "json"
"""What a model is held to that has no format of its own."""


def detect(template: str, has_token: HasToken) -> tuple[str, str | None]:
    """(tool format, reasoning format or None). template: the source used with tools, "" if the model has none."""
    by_token = (name for token, name in TOKEN_SIGNS if has_token(token))
    tools = _by_signs(template, TOOL_SIGNS) or next(by_token, GENERIC)
    return tools, _by_signs(template, REASONING_SIGNS)


def _by_signs(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((name for texts, name in signs if all(text in template for text in texts)), None)
