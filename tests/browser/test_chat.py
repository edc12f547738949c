"""Chat in the browser, over a real server with a scripted model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from playwright.sync_api import expect

QUESTION = "How many pages?"


def bodies_of(page):
    """The bodies of the chats that a page asks for, as they come."""
    bodies = []
    page.on(
        "request",
        lambda request: bodies.append(request.post_data_json) if request.url.endswith("/completions") else None,
    )
    return bodies


def num_aborts(url):
    """Requests that the engine stopped because their client left."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("octavo:aborts_total{"))


def test_an_answer_streams_as_markdown_with_its_figures(page, ask):
    ask(page, QUESTION)
    answer = page.get_by_role("article", name="Answer 1")
    expect(answer.get_by_role("heading", name="Folding", exact=True)).to_be_visible()
    expect(answer.get_by_role("cell", name="16")).to_be_visible()
    expect(answer.get_by_role("listitem")).to_have_count(2)
    link = answer.get_by_role("link", name="Octavo")
    assert link.get_attribute("href") == "https://example.org/octavo"
    assert "noopener" in link.get_attribute("rel")
    expect(answer.locator(".stats")).to_contain_text(re.compile(r"^\d+ tokens · \d.*tok/s · first after"))
    answer.get_by_role("button", name="Copy").first.click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "def pages(folds):\n    return 2 * 2 ** folds"
    answer.locator(".answer-foot").get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("# Folding\n")


def test_stopping_keeps_what_came_and_frees_the_engine(open_page, slow_server):
    page = open_page(slow_server.url)
    before = num_aborts(slow_server.url)
    page.locator("#question").fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-body")).to_contain_text("1 2 3")
    page.get_by_role("button", name="Stop the answer").click()
    expect(page.get_by_text("You stopped this answer.").first).to_be_visible()
    expect(page.locator("#question")).to_be_focused()
    shown = page.locator(".answer-body").inner_text()
    assert shown.startswith("1 2 3")
    assert "599" not in shown
    for _ in range(200):
        if num_aborts(slow_server.url) > before:
            break
        page.wait_for_timeout(100)
    assert num_aborts(slow_server.url) == before + 1
    page.reload()
    page.get_by_role("button", name="Count.", exact=True).click()
    expect(page.locator(".answer-body")).to_contain_text("1 2 3")


def test_editing_a_question_asks_again_without_what_came_after_it(page, ask):
    bodies = bodies_of(page)
    ask(page, QUESTION)
    ask(page, "Say it briefly.")
    page.get_by_role("button", name="Edit this question").first.click()
    box = page.get_by_role("article", name="Question").first.get_by_role("textbox")
    expect(box).to_be_focused()
    box.fill("Say it briefly.")
    page.get_by_role("button", name="Ask again").click()
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("article", name="Answer 1")).to_contain_text("Sixteen.")
    assert [body["messages"][-1]["content"] for body in bodies] == [QUESTION, "Say it briefly.", "Say it briefly."]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 1]


def test_leaving_the_editor_changes_nothing(page, ask):
    ask(page, QUESTION)
    page.get_by_role("button", name="Edit this question").click()
    page.keyboard.type("something else")
    page.keyboard.press("Escape")
    expect(page.get_by_role("article", name="Question")).to_contain_text(QUESTION)
    expect(page.get_by_role("button", name="Edit this question")).to_be_focused()


def test_retrying_asks_the_same_again(page, ask):
    bodies = bodies_of(page)
    ask(page, QUESTION)
    page.get_by_role("button", name="Retry").click()
    page.locator("article.answer[aria-busy=false]").wait_for()
    expect(page.get_by_role("article")).to_have_count(2)
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]


def test_conversations_are_kept_until_they_are_deleted(page, ask):
    ask(page, QUESTION)
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_text("Ask the model something.")).to_be_visible()
    page.locator("summary", has_text="System prompt").click()
    page.get_by_label("System prompt of this conversation").fill("Be brief.")
    bodies = bodies_of(page)
    ask(page, "Say it briefly.")
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("listitem")
    expect(listed).to_have_count(2)
    page.get_by_role("button", name=QUESTION, exact=True).click()
    expect(page.get_by_role("article", name="Answer 1")).to_contain_text("Folding")
    assert page.locator("#system").input_value() == ""
    page.get_by_role("button", name="Say it briefly.", exact=True).click()
    assert page.locator("#system").input_value() == "Be brief."
    page.get_by_role("button", name=f"Delete “{QUESTION}”").click()
    expect(listed).to_have_count(1)
    page.reload()
    expect(listed).to_have_count(1)


def test_an_answer_goes_on_while_another_conversation_is_on_show(open_page, slow_server):
    page = open_page(slow_server.url)
    page.locator("#question").fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-body")).to_contain_text("1 2 3")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Count.", exact=True).click()
    expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
    expect(page.locator(".answer-body")).to_contain_text("598 599", timeout=120_000)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_export_writes_the_messages_as_the_api_takes_them(page, ask, tmp_path: Path):
    expect(page.get_by_role("button", name="Export this conversation as JSON")).to_be_disabled()
    ask(page, "Say it briefly.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation as JSON").click()
    assert download.value.suggested_filename == "say-it-briefly.json"
    download.value.save_as(tmp_path / "out.json")
    whole = json.loads((tmp_path / "out.json").read_text())
    assert whole["messages"] == [
        {"role": "user", "content": "Say it briefly."},
        {"role": "assistant", "content": "Sixteen."},
    ]
    assert whole["model"] == "scripted-1b-instruct"


def test_sampling_fields_are_sent_as_they_were_typed_and_kept(page, ask):
    bodies = bodies_of(page)
    typed = {"Temperature": "0.7", "Top p": "0.9", "Top k": "40", "Min p": "0.05", "Max tokens": "5", "Seed": "42"}
    typed |= {
        "Presence penalty": "0.1",
        "Frequency penalty": "-0.2",
        "Repetition penalty": "1.1",
        "Stop at": "END\n\\n",
    }
    for label, value in typed.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Model").select_option("another-name")
    ask(page, QUESTION)
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 5, "seed": 42}
    expected |= {"presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1, "stop": ["END", "\n"]}
    assert bodies[0].items() >= (expected | {"model": "another-name"}).items()
    expect(page.get_by_text("Cut off: the limit of tokens was reached.").first).to_be_visible()
    page.reload()
    for label, value in typed.items():
        expect(page.get_by_label(label, exact=True)).to_have_value(value)
    expect(page.get_by_label("Model")).to_have_value("another-name")


def test_an_error_is_told_in_the_servers_words_at_the_field_it_names(page, ask, server):
    page.get_by_label("Temperature").fill("-9")
    ask(page, QUESTION)
    refused = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "temperature": -9}
    )
    words = refused.json()["error"]["message"]
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(words)
    expect(alert).to_contain_text("400 · temperature")
    field = page.get_by_label("Temperature")
    expect(field).to_have_attribute("aria-invalid", "true")
    assert words in page.locator(f"#{field.get_attribute('aria-describedby')}").inner_text()
    page.get_by_role("button", name="Show the setting").click()
    expect(field).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.press("Backspace")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    field.fill("")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("article", name="Answer 1")).to_contain_text("Folding")


def test_what_is_no_number_is_refused_by_the_server_too(page, ask):
    page.get_by_label("Top k").fill("many")
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("top_k")
    expect(page.get_by_label("Top k")).to_have_attribute("aria-invalid", "true")


def test_a_connection_that_breaks_is_told_and_what_came_is_kept(open_page, start_server):
    server = start_server(delay=0.02)
    page = open_page(server.url)
    page.locator("#question").fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-body")).to_contain_text("1 2 3")
    server.stop()
    expect(page.get_by_role("alert")).to_contain_text("connection", ignore_case=True)
    expect(page.locator(".answer-body")).to_contain_text("1 2 3")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")


def test_an_error_in_the_midst_of_a_stream_is_told(page):
    half = 'data: {"choices":[{"index":0,"delta":{"content":"Half"}}]}'
    text = half + '\n\ndata: {"error":{"message":"the engine died","code":"engine_dead"}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=text))
    page.locator("#question").fill("x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the engine died")
    expect(page.get_by_role("alert")).to_contain_text("engine_dead")
    expect(page.locator(".answer-body")).to_have_text("Half")


def test_a_proxys_error_page_is_told_as_text(page):
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=502, content_type="text/html", body="<h1>Bad gateway</h1>"),
    )
    page.locator("#question").fill("x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("<h1>Bad gateway</h1>")


def test_a_key_is_asked_for_sent_and_forgotten_with_the_tab(browser, start_server):
    server = start_server(api_keys=["sesame"])
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("button", name="Enter a key").click()
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("sesame")
    key.press("Tab")
    expect(page.get_by_label("Model")).to_have_value("scripted-1b-instruct")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#live-running")).to_have_text("0")
    page.locator("#question").fill("Say it briefly.")
    page.locator("#question").press("Enter")
    expect(page.locator(".answer-body")).to_have_text("Sixteen.")
    assert "sesame" not in json.dumps(page.evaluate("Object.entries(localStorage)"))
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("scripted-1b-instruct")
    other = context.new_page()
    other.goto(server.url)
    expect(other.get_by_role("button", name="Enter a key")).to_be_visible()
    other.get_by_role("button", name="Enter a key").click()
    other.get_by_label("API key").fill("wrong")
    other.locator("#question").fill("Say it briefly.")
    other.locator("#question").press("Enter")
    expect(other.get_by_role("alert")).to_contain_text("invalid_api_key")
    expect(other.get_by_label("API key")).to_have_attribute("aria-invalid", "true")
    context.close()


def test_the_page_works_behind_a_prefix_that_a_proxy_strips(browser, start_server):
    server = start_server(root_path="/models/octavo")
    page = browser.new_page()
    outside = []

    def strip(route):
        path = route.request.url.removeprefix(server.url)
        if not path.startswith("/models/octavo/"):
            outside.append(path)
        route.continue_(url=server.url + path.removeprefix("/models/octavo"))

    page.route(f"{server.url}/**", strip)
    page.goto(f"{server.url}/models/octavo/")
    page.locator("#question").fill("Say it briefly.")
    page.locator("#question").press("Enter")
    expect(page.locator(".answer-body")).to_have_text("Sixteen.")
    expect(page.locator("#live-running")).to_have_text("0")
    assert outside == []
    page.close()


def test_a_full_storage_is_told_and_the_page_goes_on(page, ask):
    page.evaluate(
        """() => {
          let number = 0;
          for (let size = 2 ** 22; size > 4; ) {
            try {
              localStorage.setItem(`filler${(number += 1)}`, "x".repeat(size));
            } catch {
              size /= 2;
            }
          }
        }"""
    )
    ask(page, "Say it briefly.")
    expect(page.locator("#notice")).to_contain_text("storage is full")
    expect(page.locator(".answer-body")).to_have_text("Sixteen.")


def test_probabilities_are_what_a_storage_that_is_nearly_full_leaves_out(page):
    left = page.evaluate(
        """async () => {
          const store = await import(new URL("page/store.js", document.baseURI));
          localStorage.setItem("filler", "x".repeat(4_800_000));
          const tokens = [["x".repeat(1_000_000), null, -1, []]];
          const answer = { role: "assistant", content: "a", reasoning: "", tool_calls: [], tokens, stats: {} };
          const messages = [{ role: "user", content: "q" }, { ...answer, mode: "text", finish: "stop" }];
          const whole = { ...store.newConversation(), messages };
          const saved = store.saveConversation(whole);
          return [saved, store.loadConversations()[0].messages[1].tokens, whole.messages[1].tokens.length];
        }"""
    )
    assert left == [True, [], 1]
    page.reload()
    page.get_by_role("button", name="q", exact=True).click()
    expect(page.locator(".answer-body")).to_have_text("a")


def test_an_unknown_model_is_told_at_the_choice_of_models(page, ask):
    page.locator("#model option").first.evaluate("option => { option.value = 'gone' }")
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("model_not_found")
    expect(page.get_by_label("Model")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Show the setting").click()
    expect(page.get_by_label("Model")).to_be_focused()
