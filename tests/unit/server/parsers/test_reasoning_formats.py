"""Reasoning, apart and together with tool calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

QWEN = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
WRITTEN = {
    "qwen3": "<think>\nwhy, {so}\n</think>\n\nanswer <b>",
    "deepseek_v3": "<think>why, {so}</think>answer <b>",
    "deepseek_r1": "why, {so}\n</think>\n\nanswer <b>",
    "kimi_k2": "<think>why, {so}</think>answer <b>",
    "step3": "why, {so}\n</think>\nanswer <b>",
    "minimax_m2": "why, {so}\n</think>\n\nanswer <b>",
    "olmo3": "<think>why, {so}</think>answer <b>",
    "glm45": "\n<think>why, {so}</think>\nanswer <b>",
    "granite": "Here is my thought process: why, {so}\n\nHere is my response: answer <b>",
    "granite_thinking_parser": "<think>why, {so}</think>answer <b>",
    "mistral": "[THINK]why, {so}[/THINK]answer <b>",
    "gemma4": "<|channel>thought\nwhy, {so}\n<channel|>answer <b>",
    "hunyuan_a13b": "<think>\nwhy, {so}\n</think>\n<answer>\nanswer <b>\n</answer>",
    "ernie45": "why, {so}\n</think>\n\n<response>\nanswer <b>\n</response>\n",
    "seed_oss": "<seed:think>why, {so}</seed:think>answer <b>",
    "openai_gptoss": (
        "<|channel|>analysis<|message|>why, {so}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>answer <b><|return|>"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_reasoning_and_answer_are_told_apart(name: str, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(WRITTEN[name], reasoning=name)
    assert (answer.reasoning, answer.content) == ("why, {so}", "answer <b>")


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"openai_gptoss"}))
def test_text_cut_inside_reasoning_stays_reasoning(name: str, parsing: SimpleNamespace) -> None:
    cut = WRITTEN[name].partition("so")[0]
    answer = parsing.parse(cut, reasoning=name)
    assert (answer.reasoning, answer.content) == ("why, {", "")


def test_harmony_cut_inside_analysis_stays_reasoning(parsing: SimpleNamespace) -> None:
    answer = parsing.parse("<|channel|>analysis<|message|>why, {", reasoning="openai_gptoss")
    assert (answer.reasoning, answer.content) == ("why, {", "")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45", "kimi_k2", "hunyuan_a13b", "ernie45"])
@pytest.mark.parametrize("opened", ["<think>\n", "<think>", "<think>\nSo far"])
def test_reasoning_that_the_prompt_opened(name: str, opened: str, parsing: SimpleNamespace) -> None:
    answer = parsing.parse("a</think>b", reasoning=name, prompt_tail=QWEN + opened)
    assert (answer.reasoning, answer.content) == ("a", "b")
    cut = parsing.parse("a", reasoning=name, prompt_tail=QWEN + opened)
    assert (cut.reasoning, cut.content) == ("a", "")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45"])
def test_reasoning_that_the_prompt_ended_is_over(name: str, parsing: SimpleNamespace) -> None:
    answer = parsing.parse("a b", reasoning=name, prompt_tail=QWEN + "<think>\n\n</think>\n\n")
    assert (answer.reasoning, answer.content) == ("", "a b")


def test_a_mark_in_an_earlier_turn_opens_nothing(parsing: SimpleNamespace) -> None:
    for prompt in (QWEN, "[INST] what is <think>?[/INST]", "<start_of_turn>user\n<think><end_of_turn>\nmodel\n"):
        assert parsing.parse("a b", reasoning="qwen3", prompt_tail=prompt).content == "a b"


def test_special_tokens_of_the_model_end_a_turn_too(parsing: SimpleNamespace) -> None:
    prompt = "((user)) what is <think>? ((bot)) "
    how = {"reasoning": "qwen3", "prompt_tail": prompt, "drop": frozenset({"((user))", "((bot))"})}
    assert parsing.parse("a b", **how).content == "a b"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "granite", "mistral", "gemma4", "seed_oss"])
def test_with_thinking_switched_off_all_is_content(name: str, parsing: SimpleNamespace) -> None:
    answer = parsing.run(parsing.make("hermes", name), ["a </think> b"], reasoning=False)
    assert (answer.content, answer.reasoning) == ("a </think> b", "")


def test_a_mark_in_the_middle_of_an_answer_is_text(parsing: SimpleNamespace) -> None:
    text = "Write <think> before and </think> behind."
    assert parsing.parse(text, reasoning="qwen3").content == text


def test_special_marks_open_reasoning_anywhere(parsing: SimpleNamespace) -> None:
    answer = parsing.parse("a [THINK]b[/THINK]c [THINK]d[/THINK]e", reasoning="mistral")
    assert (answer.content, answer.reasoning) == ("a c e", "bd")


def test_a_tool_call_ends_reasoning(parsing: SimpleNamespace) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
    for text in (f"<think>\nhm\n{call}", f"<think>\nhm\n</think>\n\n{call}", f"<think>\nhm\n{call}\n</think>\n\n"):
        answer = parsing.parse(text, "hermes", "qwen3")
        assert (answer.reasoning.strip(), answer.content) == ("hm", "")
        assert answer.values == [("weather", {"city": "x"})]


def test_what_is_no_call_in_reasoning_stays_reasoning(parsing: SimpleNamespace) -> None:
    answer = parsing.parse("<think>I may use <tool_call> tags.</think>Hi", "hermes", "qwen3")
    assert (answer.reasoning, answer.content) == ("I may use <tool_call> tags.", "Hi")


def test_reasoning_text_and_calls_in_one_answer(parsing: SimpleNamespace) -> None:
    answer = parsing.parse(
        "hm</think>Let me look.\n[TOOL_CALLS]weather[ARGS]{}", "mistral", "qwen3", prompt_tail=QWEN + "<think>\n"
    )
    assert (answer.reasoning, answer.content, answer.calls) == ("hm", "Let me look.\n", [("weather", "{}")])


def test_minimax_shows_its_reasoning_in_the_content(parsing: SimpleNamespace) -> None:
    answer = parsing.parse("why</think>b", reasoning="minimax_m2_append_think")
    assert (answer.reasoning, answer.content) == ("", "<think>why</think>b")


def test_the_parser_knows_whether_it_is_in_reasoning(parsing: SimpleNamespace) -> None:
    from octavo.server.parsers.registry import make_parser

    def make(**how: object) -> object:
        return make_parser(parsing.make("hermes", "qwen3"), tools=parsing.TOOLS, **how)

    parser = make(prompt_tail=QWEN + "<think>\n")
    assert parser.in_reasoning
    assert parser.expects_reasoning
    parser.feed("a</think>")
    assert not parser.in_reasoning
    parser = make(prompt_tail=QWEN)
    assert not parser.in_reasoning
    assert parser.expects_reasoning
    parser.feed("<think>a<tool_call>")
    assert parser.in_reasoning
    parser.feed('{"name": "f", ')
    assert not parser.in_reasoning
    assert not make(prompt_tail=QWEN + "<think>\n\n</think>\n\n").expects_reasoning
    assert not make(reasoning=False).expects_reasoning


def test_harmony_reads_on_where_the_prompt_ends(parsing: SimpleNamespace) -> None:
    start = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    for tail, text, expected in (
        (start, "<|channel|>final<|message|>yes", ("", "yes")),
        (f"{start}<|channel|>analysis<|message|>", "hm<|end|>", ("hm", "")),
        (f"{start}<|channel|>final<|message|>", "yes<|return|>", ("", "yes")),
        (start, "Plain text, no channels", ("", "Plain text, no channels")),
        ("", "<|channel|>final<|message|>yes", ("", "yes")),
    ):
        answer = parsing.parse(text, "openai", prompt_tail=tail)
        assert (answer.reasoning, answer.content) == expected


def test_harmony_takes_the_recipient_in_either_place(parsing: SimpleNamespace) -> None:
    start = "<|start|>assistant"
    for header in (
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary <|constrain|>json",
        "<|channel|>analysis to=functions.weather code",
    ):
        answer = parsing.parse(f'{header}<|message|>{{"city": "x"}}<|call|>', "openai", prompt_tail=start)
        assert answer.values == [("weather", {"city": "x"})]
        assert answer.content == answer.reasoning == ""
