"""A browser, servers with scripted answers, and a page that tells of every error it had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, Route, expect, sync_playwright
from server_processes import ScriptedServer

CHROMIUM = "chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000
expect.set_options(timeout=WAIT_MS)

ARTICLE = """# Folding

A sheet is **folded** three times, see [Octavo](https://example.org/octavo).

| format | pages |
|:--|--:|
| quarto | 8 |
| octavo | 16 |

```python
def pages(folds):
    return 2 * 2 ** folds
```

1. Print
2. Fold

Done."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    'Call a tool as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>. Tools: {{ tools | tojson }}<|im_end|>\n'
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with reasoning and calls of tools written as Qwen 3 writes them."""
QUESTION = "How many pages?"
ANSWERS = {
    QUESTION: ARTICLE,
    "Say it briefly.": "Sixteen.",
    "Count.": " ".join(str(number) for number in range(1, 600)),
    "Half.": "a ½ é 漢",
    "Weather in Oslo?": (
        "<think>\nI should look.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ),
    '{"degrees": 4}': "It is **4 degrees**.",
}


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ScriptedServer]]:
    """Start servers of scripted answers: `start_server(delay=0.05, api_keys=["sesame"])`."""
    from octavo.testing.tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("page")
    make_tokenizer(folder / "model", vocab_size=384, chat_template=TEMPLATE)
    servers: list[ScriptedServer] = []
    engine = {"tokenizer": str(folder / "model"), "vocab_size": 384, "max_model_len": 8192, "max_num_seqs": 8}
    engine |= {"served_names": ["scripted-1b-instruct", "another-name"]}

    def start(*, answers: dict[str, str] = ANSWERS, delay: float = 0.0, **options: Any) -> ScriptedServer:
        log = folder / f"server-{len(servers)}.log"
        how = engine | {"answers": answers, "delay": delay}
        servers.append(ScriptedServer(log, options={"port": 0} | options, engine=how))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    """The server of most tests: fast, no key."""
    return start_server()


@pytest.fixture(scope="session")
def slow_server(start_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    """A server whose answers take a while."""
    return start_server(delay=0.01)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    path = shutil.which(CHROMIUM)
    assert path, "these tests drive Debian's chromium: apt-get install --no-install-recommends chromium"
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser: Browser, server: ScriptedServer) -> Iterator[Callable[..., Page]]:
    """Open the page: `open_page(width=360, color_scheme="dark")`. Scripts that fail, and what the policy forbids, fail
    the test at its end; so does a request to anywhere but the server."""
    contexts = []
    problems: list[str] = []

    def opened(url: str = server.url, *, width: int = 1360, height: int = 860, **how: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **how)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: (
                problems.append(f"console: {message.text}")
                if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                problems.append(f"request to {request.url}") if not request.url.startswith((url, "blob:")) else None
            ),
        )
        page.goto(url + "/")
        page.locator("#model option[value]").first.wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The page at desktop size."""
    return open_page()


@pytest.fixture
def ask() -> Callable[[Page, str], None]:
    """`ask(page, question)`: send it and wait for the end of the answer."""

    def asked(page: Page, question: str) -> None:
        page.locator("#question").fill(question)
        page.keyboard.press("Enter")
        page.locator("article.answer[aria-busy=false]").last.wait_for()
        page.locator("#send").wait_for()

    return asked


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None} | more
    return {"id": "x", "object": "chat.completion.chunk", "model": "stub", "choices": [choice]}


@pytest.fixture
def stub() -> Callable[..., list[dict[str, Any]]]:
    """`stub(page, [delta, ...], [...])`: each next chat is answered by these deltas instead of by the server.

    Returns the bodies of the requests, as they come. A delta with "finish_reason" ends an answer.
    """

    def stubbed(page: Page, *answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []

        def answer(route: Route) -> None:
            deltas = answers[min(len(bodies), len(answers) - 1)]
            bodies.append(route.request.post_data_json)
            chunks = [
                chunk(
                    {k: v for k, v in delta.items() if k != "finish_reason"}, finish_reason=delta.get("finish_reason")
                )
                for delta in deltas
            ]
            text = "".join(f"data: {json.dumps(part)}\n\n" for part in chunks) + "data: [DONE]\n\n"
            route.fulfill(status=200, content_type="text/event-stream; charset=utf-8", body=text)

        page.route("**/v1/chat/completions", answer)
        return bodies

    return stubbed
