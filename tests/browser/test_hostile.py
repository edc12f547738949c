"""What a model writes stays text: known tricks and random ones, in every place where the page shows a model's words."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import expect

FOLDER = Path(__file__).parent / "js"
HARMLESS = """() => {
  const inside = [...document.querySelectorAll("#transcript *, #list *, #tip *, #announcer *, #notice *")];
  const bad = inside.filter((node) =>
    /^(script|iframe|img|object|embed|style|link|base|meta|video|audio|math)$/i.test(node.tagName) ||
    [...node.attributes].some(({ name, value }) =>
      /^on|^src/i.test(name) || (name === "href" && !/^(https?:|mailto:|#icon-)/.test(value))));
  return { pwned: window.pwned ?? null, bad: bad.map((node) => node.outerHTML.slice(0, 200)), title: document.title };
}"""


@pytest.fixture(scope="module")
def tricks() -> list[str]:
    node = shutil.which("node")
    assert node, "the page's modules are tested by Node.js 20 or newer"
    script = "import('./hostile.mjs').then((m) => console.log(JSON.stringify([...m.hostileTexts(400)])))"
    done = subprocess.run([node, "-e", script], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=True)
    texts: list[str] = json.loads(done.stdout)
    assert len(texts) > 400
    return texts


def test_hostile_markdown_makes_no_element_that_runs_or_loads(page, tricks):
    """Drawn by the page's own code, one text after another; `open_page` fails on any request elsewhere."""
    page.evaluate(
        """async (texts) => {
          const { parseMarkdown } = await import(new URL("page/markdown.js", document.baseURI));
          const { build } = await import(new URL("page/dom.js", document.baseURI));
          for (const text of texts) document.getElementById("transcript").append(...parseMarkdown(text).map(build));
        }""",
        tricks,
    )
    found = page.evaluate(HARMLESS)
    assert found == {"pwned": None, "bad": [], "title": "Octavo"}
    assert page.locator("#transcript a").count() > 10
    for link in page.locator("#transcript a").all()[:5]:
        assert link.get_attribute("target") == "_blank"


def test_hostile_answers_are_harmless_as_text_reasoning_calls_results_and_tokens(page, ask, stub, tricks):
    trick = "\n\n".join(tricks[:36])
    call = {"index": 0, "id": trick, "function": {"name": trick, "arguments": json.dumps({"x": trick})}}
    stub(
        page,
        [{"reasoning": trick}, {"content": trick}, {"tool_calls": [call]}, {"finish_reason": "tool_calls"}],
        [{"content": trick}, {"finish_reason": trick}],
    )
    ask(page, trick)
    page.locator("summary").first.click()
    page.locator(".card textarea").fill(trick)
    page.get_by_role("button", name="Send the result").click()
    page.get_by_role("article", name="Answer 2").wait_for()
    page.reload()
    page.locator(".conversation").first.click()
    page.get_by_role("article", name="Answer 2").wait_for()
    assert page.evaluate(HARMLESS) == {"pwned": None, "bad": [], "title": "Octavo"}
    expect(page.locator("#transcript")).to_contain_text("<img src=x onerror")


def test_hostile_errors_models_and_tokens_are_harmless(page, tricks):
    trick = tricks[1]
    error = {"error": {"message": trick, "param": trick, "code": trick}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": trick, "max_model_len": trick}]}))
    page.reload()
    page.locator("#question").fill("x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(trick)
    assert page.evaluate(HARMLESS)["bad"] == []
    page.unroute("**/v1/chat/completions")
    token = {
        "token": trick,
        "bytes": None,
        "logprob": -1,
        "top_logprobs": [{"token": trick, "bytes": None, "logprob": -1}],
    }
    part = {"choices": [{"index": 0, "delta": {"content": trick}, "logprobs": {"content": [token]}}]}
    body = f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Retry").click()
    page.locator(".token[role=option]").first.focus()
    expect(page.get_by_role("tooltip")).to_contain_text("onerror")
    assert page.evaluate(HARMLESS) == {"pwned": None, "bad": [], "title": "Octavo"}


def test_broken_storage_does_not_break_the_page(page):
    page.evaluate(
        """() => {
          localStorage.setItem(`octavo:${location.pathname}:settings`, "{");
          localStorage.setItem(`octavo:${location.pathname}:c:1`, "null");
          localStorage.setItem(`octavo:${location.pathname}:c:2`, '{"id": 3}');
        }"""
    )
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    expect(page.locator(".conversation")).to_have_count(0)


def test_the_policy_refuses_inline_scripts_markup_of_strings_eval_and_other_origins(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    outcome = page.evaluate(
        """async () => {
          const tried = {};
          await new Promise((done) => setTimeout(done)); // what the debugger itself runs may use eval
          const attempt = async (name, act) => {
            try { await act(); tried[name] = "allowed"; } catch (error) { tried[name] = error.name; }
          };
          await attempt("markup", () => { document.body.innerHTML = "<b>x</b>"; });
          await attempt("eval", () => (0, eval)("1"));
          await attempt("elsewhere", () => fetch("https://example.org/"));
          const script = document.createElement("script");
          await attempt("inline", () => { script.append("window.pwned = 1"); document.body.append(script); });
          tried.pwned = window.pwned ?? null;
          const image = document.createElement("img");
          tried.image = await new Promise((done) => {
            image.onerror = () => done("refused");
            image.onload = () => done("allowed");
            image.src = "https://example.org/x.png";
            document.body.append(image);
          });
          return tried;
        }"""
    )
    assert outcome["markup"] == "TypeError"
    assert outcome["eval"] == "EvalError"
    assert outcome["elsewhere"] == "TypeError"
    assert outcome["pwned"] is None
    assert outcome["image"] == "refused"
    page.close()
