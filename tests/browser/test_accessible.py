"""The page for everybody: axe over every mode, keyboard, screen readers, small screens, still screens."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

QUESTION = "How many pages?"
SCREENS = [
    pytest.param({"color_scheme": scheme, "width": width, "height": height}, id=f"{name}-{scheme}")
    for name, width, height in (("desk", 1360, 860), ("phone", 360, 740))
    for scheme in ("light", "dark")
]
CALL = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


def violations(page):
    """Serious and critical findings of axe, WCAG 2.2 AA and best practice, as lines."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def look_at(page, *, panel=False):
    """Check what is on show; with `panel`, also the settings, which a phone has to open."""
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    if panel and page.viewport_size["width"] < 600:
        page.get_by_role("button", name="Settings and live view").click()
        page.evaluate("document.querySelectorAll('#controls details').forEach((part) => { part.open = true })")
        assert violations(page) == []
        page.keyboard.press("Escape")


@pytest.mark.parametrize("screen", SCREENS)
def test_axe_finds_nothing_serious_in_any_mode(open_page, ask, stub, screen):
    page = open_page(reduced_motion="reduce", **screen)
    look_at(page, panel=True)
    ask(page, QUESTION)
    look_at(page)
    page.get_by_role("button", name="Edit this question").click()
    look_at(page)
    page.keyboard.press("Escape")
    page.locator("#logprobs").check()
    ask(page, "Say it briefly.")
    page.locator(".token[role=option]").nth(1).focus()
    expect(page.get_by_role("tooltip")).to_be_visible()
    look_at(page)
    page.locator("#logprobs").uncheck()
    stub(
        page,
        [{"reasoning_content": "Hm."}, {"tool_calls": [CALL]}, {"finish_reason": "tool_calls"}],
        [{"content": '{"a": 1}'}, {"finish_reason": "stop"}],
    )
    page.locator("[value=tools]").check()
    page.locator("#tools").evaluate('e => { e.value = \'[{"name": "get_weather"}]\' }')
    ask(page, "Weather?")
    page.locator("summary", has_text="Thought").or_(page.locator("summary", has_text="Reasoning")).first.click()
    look_at(page, panel=True)
    page.locator("[value=json]").check()
    ask(page, "JSON?")
    expect(page.locator(".verdict")).to_be_visible()
    look_at(page)
    page.unroute("**/v1/chat/completions")
    page.locator("[value=text]").check()
    page.locator("#temperature").evaluate("e => { e.value = '-9' }")
    ask(page, "An error.")
    look_at(page, panel=True)
    if screen["width"] < 600:
        page.get_by_role("button", name="Conversations").click()
        assert violations(page) == []


def test_tab_walks_the_page_in_the_order_of_sight(page):
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    skip, rest = seen[0], seen[1:]
    assert skip == "Skip to the question"
    assert rest[:4] == ["list-toggle", "model", "settings-toggle", "new"]
    order = [rest.index(name) for name in ("question", "logprobs", "send")]
    assert order == sorted(order)


def test_the_first_tab_stop_leads_to_the_question(page):
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()


def test_landmarks_and_names_tell_the_parts_apart(page, ask):
    ask(page, QUESTION)
    for role, name in (
        ("navigation", "Conversations"),
        ("main", QUESTION),
        ("complementary", "Settings and live view"),
        ("form", "Question"),
        ("article", "Answer 1"),
    ):
        expect(page.get_by_role(role, name=name, exact=True)).to_have_count(1)
    expect(page.get_by_role("banner")).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_text("Octavo")


def test_a_screen_reader_hears_blocks_and_not_tokens(page):
    page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver((changes) => {
            for (const change of changes) for (const node of change.addedNodes) heard.push(node.textContent);
          }).observe(document.getElementById("announcer"), { childList: true, subtree: true, characterData: true });
        }"""
    )
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator("#announcer")).to_contain_text("The answer is complete.")
    assert page.evaluate("heard") == [
        "Folding",
        "A sheet is folded three times, see Octavo.",
        "format, pages. quarto, 8. octavo, 16",
        "Code in python, 2 lines.",
        "Print\nFold",
        "Done.",
        "The answer is complete.",
    ]
    expect(page.locator("#announcer")).to_have_attribute("aria-live", "polite")
    lively = page.evaluate(
        "[...document.querySelectorAll('[aria-live]:not(#announcer), [role=log], [role=status]')].length"
    )
    assert lively == 0, "a second live region would speak the tokens"


def test_a_phone_has_no_sideways_scroll_and_panels_that_give_the_focus_back(open_page, ask):
    page = open_page(width=360, height=740, has_touch=True)
    ask(page, QUESTION)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name, panel in (("Settings and live view", "#settings"), ("Conversations", "#list")):
        toggle = page.get_by_role("button", name=name, exact=True)
        expect(page.locator(panel)).to_be_hidden()
        toggle.click()
        expect(page.locator(panel)).to_be_visible()
        assert page.evaluate(f"document.querySelector('{panel}').contains(document.activeElement)")
        assert page.locator("#main").evaluate("main => main.inert")
        page.keyboard.press("Escape")
        expect(page.locator(panel)).to_be_hidden()
        expect(toggle).to_be_focused()
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("button, select, textarea, .modes label, .switch")]
          .filter((node) => node.offsetParent && !node.closest(".visually-hidden"))
          .map((node) => [node.id || node.textContent.trim(), node.getBoundingClientRect()])
          .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""
    )
    assert sizes == [], "too small to touch (24 px, WCAG 2.2)"


def test_nothing_moves_for_those_who_asked_for_that(open_page, slow_server):
    page = open_page(slow_server.url, reduced_motion="reduce", width=360)
    page.get_by_role("button", name="Settings and live view").click()
    page.keyboard.press("Escape")
    page.locator("#question").fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-body")).to_contain_text("1 2")
    assert page.evaluate("document.getAnimations().length") == 0


def test_at_four_times_the_size_the_page_still_flows(open_page, ask):
    """WCAG 1.4.10: 320 px wide, which is 1280 px at 400 %."""
    page = open_page(width=320, height=256)
    ask(page, QUESTION)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator("#send")).to_be_in_viewport()
