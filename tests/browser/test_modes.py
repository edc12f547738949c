"""Tools, JSON, reasoning, token probabilities and the live view."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

CALLS = [
    {"reasoning_content": "The user wants "},
    {"reasoning_content": "the weather."},
    {
        "tool_calls": [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "get_time", "arguments": "{}"}}]},
    {"finish_reason": "tool_calls"},
]


def choose(page, mode):
    page.locator(f"[name=mode][value={mode}]").check()


def test_calls_are_cards_and_their_results_go_on_with_the_conversation(page, ask, stub):
    bodies = stub(page, CALLS, [{"content": "It is **4 degrees**."}, {"finish_reason": "stop"}])
    choose(page, "tools")
    page.get_by_role("button", name="Use an example").first.click()
    page.get_by_label("Tool choice").select_option("get_weather")
    ask(page, "Weather in Oslo?")
    card = page.get_by_role("region", name="Call of get_weather")
    expect(card.get_by_role("heading", name="get_weather")).to_be_visible()
    expect(card.locator("pre")).to_have_text('{\n  "city": "Oslo"\n}')
    card.get_by_label("Result of get_weather").fill('{"degrees": 4}')
    page.get_by_label("Result of get_time").fill("12:00")
    page.get_by_role("button", name="Send the results").click()
    expect(page.get_by_role("article", name="Answer 2")).to_contain_text("It is 4 degrees.")
    expect(card.get_by_role("region", name="Result of get_weather")).to_have_text('{"degrees": 4}')
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    assert bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "The user wants the weather.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 4}'},
        {"role": "tool", "tool_call_id": "c2", "content": "12:00"},
    ]


def test_thinking_calls_and_results_pass_through_the_real_server(page, ask):
    choose(page, "tools")
    page.get_by_role("button", name="Use an example").first.click()
    ask(page, "Weather in Oslo?")
    first = page.get_by_role("article", name="Answer 1")
    expect(first.locator("summary")).to_have_text(re.compile("Thought for|Reasoning"))
    expect(first.locator(".reasoning-text")).to_have_text("I should look.")
    expect(first.locator(".answer-body")).to_have_text("")
    first.get_by_label("Result of get_weather").fill('{"degrees": 4}')
    page.get_by_role("button", name="Send the result").click()
    expect(page.get_by_role("article", name="Answer 2").locator("strong")).to_have_text("4 degrees")


def test_tools_that_are_no_json_are_told_at_their_field_before_anything_is_sent(page, ask, stub):
    bodies = stub(page, CALLS)
    choose(page, "tools")
    page.get_by_label("Tools as JSON").fill('[{"type": ')
    ask(page, "Weather?")
    expect(page.get_by_role("alert")).to_contain_text("tools is no valid JSON")
    expect(page.get_by_label("Tools as JSON")).to_have_attribute("aria-invalid", "true")
    assert bodies == []


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"title":"Moby-Dick","year":1851}', "Fits the schema."),
        ('{"title":"Moby-Dick"}', 'the value: lacks "year"'),
        ('{"title":"Moby', "Not valid JSON"),
    ],
)
def test_json_is_shown_readably_and_checked_against_its_schema(page, ask, stub, answer, verdict):
    bodies = stub(page, [{"content": answer[:9]}, {"content": answer[9:]}, {"finish_reason": "stop"}])
    choose(page, "json")
    page.locator("#schema-example").click()
    ask(page, "A book.")
    expect(page.locator(".verdict")).to_contain_text(verdict)
    sent = bodies[0]["response_format"]
    assert (sent["type"], sent["json_schema"]["strict"]) == ("json_schema", True)
    assert sent["json_schema"]["schema"]["required"] == ["title", "year"]
    if verdict == "Fits the schema.":
        expect(page.locator(".answer-body pre")).to_have_text(json.dumps(json.loads(answer), indent=2))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_folded_away_above_the_answer(page, ask, stub, field):
    stub(page, [{field: "Let me "}, {field: "think."}, {"content": "Yes."}, {"finish_reason": "stop"}])
    ask(page, "Really?")
    answer = page.get_by_role("article", name="Answer 1")
    expect(answer.locator(".answer-body")).to_have_text("Yes.")
    expect(answer.get_by_text("Let me think.")).to_be_hidden()
    answer.locator("summary").press("Enter")
    expect(answer.get_by_text("Let me think.")).to_be_visible()


def test_token_probabilities_are_reached_by_keyboard_and_by_pointer(page, ask):
    page.get_by_label("Alternatives").fill("3")
    page.get_by_label("Probabilities").check()
    ask(page, "Say it briefly.")
    tokens = page.get_by_role("listbox", name="Tokens of the answer")
    options = tokens.get_by_role("option")
    assert "".join(options.all_inner_texts()).startswith("Sixteen.")
    page.get_by_role("button", name="Edit this question").focus()
    page.keyboard.press("Tab")
    expect(options.first).to_be_focused()
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_visible()
    assert options.first.get_attribute("aria-describedby") == "tip"
    expect(tip.locator(".tip-row")).to_have_count(3)
    expect(tip.locator(".chosen .tip-share")).to_have_text(re.compile(r"^\s*\d+\.\d %$"))
    page.keyboard.press("ArrowRight")
    expect(options.nth(1)).to_be_focused()
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("End")
    expect(options.last).to_be_focused()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Copy")).to_be_focused()
    options.first.hover()
    expect(tip).to_be_visible()


def test_a_character_of_several_tokens_shows_their_bytes(page, ask):
    page.get_by_label("Probabilities").check()
    ask(page, "Half.")
    shown = page.get_by_role("option").all_inner_texts()
    assert "⟨e6⟩" in shown or "⟨e6 bc⟩" in shown, shown
    page.get_by_role("button", name="Probabilities").click()
    expect(page.locator(".answer-body")).to_have_text("a ½ é 漢")


def test_the_live_view_follows_the_server_and_says_it_in_words(open_page, slow_server):
    page = open_page(slow_server.url)
    expect(page.locator("#live-running")).to_have_text("0")
    page.locator("#question").fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator("#live-running")).to_have_text("1")
    expect(page.locator("#live-waiting")).to_have_text("0")
    expect(page.locator("#live-kv")).to_have_text(re.compile(r"^\d+(\.\d)? %$"))
    expect(page.locator("#live-speed")).to_have_text(re.compile(r"^[1-9]"))
    expect(page.locator("#sparkline")).to_have_attribute("aria-label", re.compile(r"now \d.*at most [1-9]"))
    expect(page.locator("#sparkline polyline")).to_have_count(1)


def test_nothing_is_polled_while_the_panel_is_closed(page):
    expect(page.locator("#live-running")).to_have_text("0")
    page.get_by_role("button", name="Settings and live view").click()
    polls = []
    page.on("request", lambda request: polls.append(request.url) if request.url.endswith("/metrics") else None)
    page.wait_for_timeout(4500)
    assert polls == []
