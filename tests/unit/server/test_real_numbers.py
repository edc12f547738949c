"""What only real logits show, over HTTP: a tiny random model behind a whole server."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from octavo.models.llama import Llama
from octavo.runner import scoring
from octavo.server.options import ServerOptions
from octavo.testing.tiny import make_model

pytestmark = pytest.mark.anyio
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
FREE = {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "llama", seed=3)


async def ids_of(server, **body) -> list[int]:
    ids: list[int] = (await server.both(PATH, FREE | body))["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_case_C2_tiny_temperatures_give_the_greedy_answer(serve_model, folder, dtype):
    server = await serve_model(folder, dtype=dtype)
    greedy = await ids_of(server, prompt="The printer", temperature=0)
    for temperature in (1e-4, 1e-5, 1e-8, 1e-30):
        assert await ids_of(server, prompt="The printer", temperature=temperature) == greedy


async def test_case_C3_a_huge_top_k_is_off_and_does_not_disturb_a_greedy_row(serve_model, folder):
    server = await serve_model(folder)
    plain = {"prompt": [[7, 8], [7, 8]], "n": 2, "seed": 5, "temperature": 1, **FREE}
    answers = [(await server.both(PATH, plain | how))["choices"] for how in ({}, {"top_k": 9_999_999})]
    assert [c["token_ids"] for c in answers[0]] == [c["token_ids"] for c in answers[1]]
    greedy = await ids_of(server, prompt=[9, 10], temperature=0)
    assert await ids_of(server, prompt=[9, 10], temperature=0, top_k=9_999_999) == greedy


async def test_case_F1_order_and_batch_do_not_change_seeded_answers(serve_model, folder):
    server = await serve_model(folder)
    prompts = [[10 + i] * (3 + 5 * i) for i in range(6)]
    how = {"seed": 3, "temperature": 1.3}
    alone = [await ids_of(server, prompt=prompt, **how) for prompt in prompts]
    for seed in range(2):
        order = random.Random(seed).sample(range(6), 6)
        answer = await server.both(PATH, FREE | how | {"prompt": [prompts[i] for i in order]})
        assert [choice["token_ids"] for choice in answer["choices"]] == [alone[i] for i in order]


@pytest.mark.parametrize(
    ("penalty", "counts_the_prompt"),
    [({"presence_penalty": 2}, False), ({"frequency_penalty": 2}, False), ({"repetition_penalty": 1.8}, True)],
)
async def test_case_F4_only_the_repetition_penalty_counts_the_prompt(serve_model, folder, penalty, counts_the_prompt):
    server = await serve_model(folder, options=ServerOptions(max_logprobs=-1), logprobs_mode="processed_logits")
    body = {"prompt": [50] * 20, "temperature": 0, "logprobs": -1, "return_tokens_as_token_ids": True}
    body |= FREE | {"max_tokens": 2, "logit_bias": {"60": 100}}

    async def logits(**how) -> list[dict[str, float]]:
        (choice,) = (await server.ask(PATH, body | how))["choices"]
        rows: list[dict[str, float]] = choice["logprobs"]["top_logprobs"]
        return rows

    plain, held = await logits(), await logits(**penalty)
    assert (held[0]["token_id:50"] != pytest.approx(plain[0]["token_id:50"], abs=1e-3)) is counts_the_prompt
    assert held[0]["token_id:70"] == pytest.approx(plain[0]["token_id:70"], abs=1e-3), "it was never said"
    assert held[1]["token_id:60"] < plain[1]["token_id:60"] - 0.5, "the answer's own first token counts"


@pytest.mark.parametrize("chunk", [16, 7])
async def test_case_B8_scores_of_a_prompt_do_not_depend_on_chunks(serve_model, folder, chunk):
    body = {"prompt": list(range(20, 70)), "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    rows = []
    for engine in ({}, {"max_num_batched_tokens": chunk}):
        server = await serve_model(folder, **engine)
        rows.append((await server.ask(PATH, body))["choices"][0]["prompt_logprobs"])
    whole, pieces = rows
    assert [row and list(row) for row in pieces] == [row and list(row) for row in whole]
    assert whole[0] is None
    for one, other in zip(whole[1:], pieces[1:], strict=True):
        values = [[entry["logprob"] for entry in row.values()] for row in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


async def test_case_B9_memory_for_the_scores_of_a_long_prompt_is_that_of_a_slice(serve_model, tmp_path, monkeypatch):
    long = make_model(tmp_path / "long", "llama", max_position_embeddings=2048)
    server = await serve_model(long, max_model_len=2048, num_kv_blocks=256, max_num_batched_tokens=2048)
    most, compute = 0, Llama.logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return compute(self, hidden)

    monkeypatch.setattr(Llama, "logits", logits)
    body = {"prompt": [20 + i % 300 for i in range(2000)], "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
    assert len((await server.ask(PATH, body))["choices"][0]["prompt_logprobs"]) == 2000
    assert most == scoring.SLICE


@pytest.mark.parametrize("ends", [49, [0, 49], [49, 2]])
async def test_case_A9_every_end_of_the_generation_config_and_of_the_tokenizer_stops(serve_model, tmp_path, ends):
    folder = make_model(tmp_path / "model", "llama")
    for name, value in (("config.json", 0), ("generation_config.json", ends)):
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | {"eos_token_id": value}))
    server = await serve_model(folder)
    for end in (49, 2):  # <|im_end|>, which only the tokenizer may know
        body = {"prompt": [5, 6], "max_tokens": 9, "temperature": 0, "logit_bias": {str(end): 100}}
        answer = await server.both(PATH, body)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_token_ids": [40], "bad_words": ["{40}"]},
        {"allowed_token_ids": [2], "min_tokens": 3},
        {"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 3},
    ],
)
async def test_case_C15_a_set_of_no_tokens_is_refused_before_anything_is_computed(serve_model, folder, wrong):
    server = await serve_model(folder)
    if "bad_words" in wrong:
        wrong = wrong | {"bad_words": [server.service.tokenizer.decode([40])]}
    await server.refused(PATH, {"prompt": [5], **wrong}, field="allowed_token_ids")


@pytest.mark.parametrize(
    "parser",
    ["hermes", "qwen3_coder", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "pythonic", "glm45"))],
)
async def test_case_C16_descriptions_of_any_text_do_not_break_the_grammar_of_a_call(serve_model, tmp_path, parser):
    folder = make_model(tmp_path / "roomy", "llama", max_position_embeddings=2048)
    options = ServerOptions(tool_call_parser=parser, reasoning_parser="none")
    server = await serve_model(folder, options=options, max_model_len=2048, num_kv_blocks=256)
    text = 'a "quoted"\nline ] } \\ <|end|> </tool_call>'
    field = {"enum": ["Oslo", "Rome"], "description": text}
    schema = {"type": "object", "description": text, "properties": {"city": field}, "required": ["city"]}
    schema |= {"additionalProperties": False}
    tool = {"type": "function", "function": {"name": "find", "description": text, "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    (choice,) = (await server.both(CHAT, body | {"parallel_tool_calls": False, "temperature": 0}))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
