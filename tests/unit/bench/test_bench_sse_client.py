"""The streaming client against a server that answers with prepared bytes, cut anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import uvloop

from octavo.bench.sse_client import Answer, Client
from octavo.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*events: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def plain(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


class Replies:
    """Answers each request with the next response, piece by piece; b"" closes the connection."""

    def __init__(self, *responses: Sequence[bytes]) -> None:
        self.responses = list(responses)
        self.requests: list[bytes] = []
        self.num_connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.responses.pop(0):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


def ask(replies: Replies, *, count: int = 1, pause: float = 0.0, api_key: str = "") -> list[Answer]:
    """`count` requests one after the other."""

    async def run() -> list[Answer]:
        server = await asyncio.start_server(replies.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}/v1/completions", api_key=api_key)
        answers = []
        for _ in range(count):
            answers.append(await client.post(b'{"prompt": "x"}'))
            await asyncio.sleep(pause)
        client.close()
        server.close()
        await server.wait_closed()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def test_each_event_with_tokens_is_an_arrival_and_usage_counts_tokens() -> None:
    replies = Replies([HEAD + chunked(TOKEN)[len(HEAD) : -5], chunked(TOKEN, LAST, USAGE, DONE)[len(HEAD) :]])
    (answer,) = ask(replies, api_key="sesame")
    assert answer.error == ""
    assert len(answer.arrivals) == 2
    assert answer.started < answer.arrivals[0] < answer.arrivals[1] <= answer.ended
    assert (answer.num_prompt, answer.num_output) == (5, 3)
    head, _, body = replies.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer sesame" in head
    assert body == b'{"prompt": "x"}'


@pytest.mark.parametrize("size", [1, 7, 64])
def test_reads_may_be_cut_anywhere(size: int) -> None:
    whole = chunked(b": comment\n\n", TOKEN.replace(b"\n", b"\r\n"), TOKEN, LAST, USAGE, DONE)
    (answer,) = ask(Replies([whole[i : i + size] for i in range(0, len(whole), size)]))
    if size == 1:
        assert len(set(answer.arrivals)) == 2
    assert (answer.error, len(answer.arrivals), answer.num_output) == ("", 2, 3)


def test_chat_role_is_no_token_but_content_reasoning_and_ids_are() -> None:
    def delta(text: str) -> bytes:
        return b'data: {"choices": [{"delta": %s}]}\n\n' % text.encode()

    events = [delta('{"role": "assistant", "content": ""}'), delta('{"reasoning_content": "hm"}')]
    events += [delta('{"content": "yes"}'), b'data: {"choices": [{"text": "", "token_ids": [4]}]}\n\n', DONE]
    (answer,) = ask(Replies([chunked(*events)]))
    assert (answer.error, len(answer.arrivals)) == ("", 3)
    assert answer.num_output == 3, "without usage, events with tokens are counted"


def test_answer_of_one_token_without_text_still_has_a_first_token() -> None:
    (answer,) = ask(Replies([chunked(LAST, USAGE, DONE)]))
    assert (answer.error, len(answer.arrivals)) == ("", 1)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (
            [plain("429 Too Many Requests", b'{"error": "queue is full"}')],
            'HTTP status 429: {"error": "queue is full"}',
        ),
        ([chunked(TOKEN, b'data: {"error": {"message": "engine died"}}\n\n')], "the server reports {'message': 'eng"),
        ([chunked(TOKEN)], "the stream ended without [DONE]"),
        ([chunked(DONE)], "the stream brought no tokens"),
        ([chunked(b"data: {nonsense\n\n", DONE)], "an event cannot be read"),
        ([HEAD + chunked(TOKEN)[len(HEAD) : -5], b""], "the connection was closed"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "this is no HTTP response"),
        ([b""], "the connection was closed"),
    ],
)
def test_failure_is_told_in_the_answer(response: list[bytes], error: str) -> None:
    (answer,) = ask(Replies(response))
    assert answer.error.startswith(error)
    assert answer.ended >= answer.started


def test_connection_is_kept_for_the_next_request() -> None:
    replies = Replies(*[[chunked(TOKEN, DONE)]] * 3)
    assert [a.error for a in ask(replies, count=3)] == ["", "", ""]
    assert replies.num_connections == 1


def test_request_is_sent_again_when_the_server_closes_an_idle_connection() -> None:
    replies = Replies([chunked(TOKEN, DONE)], [b""], [chunked(TOKEN, DONE)])
    assert [a.error for a in ask(replies, count=2)] == ["", ""]
    assert (replies.num_connections, len(replies.requests)) == (2, 3)


def test_connection_closed_while_idle_is_not_used_again() -> None:
    replies = Replies([chunked(TOKEN, DONE), b""], [chunked(TOKEN, DONE)])
    assert [a.error for a in ask(replies, count=2, pause=0.05)] == ["", ""]
    assert (replies.num_connections, len(replies.requests)) == (2, 2)


def test_body_that_ends_with_the_connection_is_whole_once_done() -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    (answer,) = ask(Replies([head + TOKEN + DONE, b""]))
    assert (answer.error, len(answer.arrivals)) == ("", 1)


def test_absent_server_is_an_answer_too(unused_port: Callable[[], int]) -> None:
    answer = asyncio.run(Client(f"http://127.0.0.1:{unused_port()}/v1/completions").post(b"{}"))
    assert answer.error.startswith("cannot connect")


@pytest.fixture
def unused_port() -> Callable[[], int]:
    import socket

    def find() -> int:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            return port

    return find


@pytest.mark.parametrize("url", ["localhost:8000/v1/completions", "ftp://host/x", "http:///x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        Client(url)
