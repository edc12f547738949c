"""Logprobs of ids that a request named have no rank, and are shown beside the likeliest."""

from __future__ import annotations

from octavo.outputs import Logprob
from octavo.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, chat_logprobs

ROW = {7: Logprob(-0.5, 1), 8: Logprob(-1.0, 2), 9: Logprob(-1.5, 3), 40: Logprob(-7.0, None), 41: Logprob(-3.0, None)}


def test_completions_show_named_ids_behind_the_likeliest():
    writer = CompletionLogprobsWriter(TokenNames(None, as_ids=True), num_top=2)
    (top,) = writer.write([7], [ROW]).top_logprobs
    assert top == {"token_id:7": -0.5, "token_id:8": -1.0, "token_id:40": -7.0, "token_id:41": -3.0}


def test_chats_show_named_ids_behind_the_likeliest():
    (entry,) = chat_logprobs([7], [ROW], TokenNames(None, as_ids=True), num_top=1).content
    assert [(one.token, one.logprob) for one in entry.top_logprobs] == [
        ("token_id:7", -0.5),
        ("token_id:40", -7.0),
        ("token_id:41", -3.0),
    ]
