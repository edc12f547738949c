"""Offline inference over a scripted engine: order, forms of prompts, errors, interrupts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from invariants import Invariants

import octavo
from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError, EngineDeadError, EngineError, RequestError
from octavo.llm import LLM
from octavo.plugin.data import ScheduleLimits
from octavo.sampling.params import SamplingParams
from octavo.testing.scripted import ScriptedExecutor
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import Tokenizer, load_tokenizer

INFO = ModelInfo(
    model="scripted",
    served_names=("scripted",),
    max_model_len=64,
    vocab_size=384,
    eos_token_ids=(2,),
    default_sampling={"temperature": 0.5, "top_k": 7, "max_tokens": 1000},
)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


def engine_of(executor: ScriptedExecutor, max_num_seqs: int = 8) -> EngineLoop:
    return EngineLoop(
        executor,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        limits=ScheduleLimits(),
        max_model_len=64,
        run_ahead=1,
    )


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., LLM]:
    """make(script, tokenizer=..., policy=..., **ScriptedExecutor settings)"""

    def make(script: Any = (40, 41), *, text: bool = True, max_num_seqs: int = 8, **settings: Any) -> LLM:
        executor = ScriptedExecutor(script, vocab_size=384, eos=2, **settings)
        return LLM.from_engine(engine_of(executor, max_num_seqs), INFO, tokenizer if text else None)

    return make


def echo(prompt: tuple[int, ...]) -> list[int]:
    """Repeats the prompt's last token."""
    return [prompt[-1]] * 60


def test_results_are_in_the_order_of_the_prompts(make: Any) -> None:
    llm = make(echo, max_num_seqs=4)
    prompts = [[100 + i] for i in range(20)]
    lengths = [SamplingParams(max_tokens=1 + i * 7 % 20, ignore_eos=True) for i in range(20)]
    results = llm.generate(prompts, lengths)
    assert [r.prompt_token_ids for r in results] == prompts
    assert [r.outputs[0].token_ids for r in results] == [
        p * (one.max_tokens or 0) for p, one in zip(prompts, lengths, strict=True)
    ]
    assert len({r.request_id for r in results}) == 20
    assert all(r.finished for r in results)


@pytest.mark.parametrize("max_num_seqs", [3, 100])
def test_answers_are_whole_when_they_are_read_in_portions(make: Any, max_num_seqs: int) -> None:
    llm = make(echo, max_num_seqs=max_num_seqs)
    lengths = [1 + i * 7 % 20 for i in range(100)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    results = llm.generate([[100 + i] for i in range(100)], params)
    assert [r.outputs[0].token_ids for r in results] == [[100 + i] * length for i, length in enumerate(lengths)]
    assert {r.outputs[0].finish_reason for r in results} == {"length"}
    assert llm.stats.running == 0


def test_stop_string_ends_its_answer_in_the_step_that_completes_it(make: Any, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode(" there was a dog and a cat and a bird")
    llm = make(script, max_num_seqs=100)
    results = llm.generate([[5]] * 70, SamplingParams(max_tokens=50, stop=("dog",)))
    assert {r.outputs[0].text for r in results} == {" there was a "}
    assert llm.stats.generation_tokens == 70 * len(results[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("prompts", "ids", "text"),
    [
        ([5, 6], [[5, 6]], None),
        (np.array([5, 6]), [[5, 6]], None),
        ([[5], [6]], [[5], [6]], None),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]], None),
        ([{"prompt_token_ids": [5], "prompt": "shown"}], [[5]], "shown"),
        ([], [], None),
    ],
)
def test_prompts_come_in_every_form(make: Any, prompts: Any, ids: list[list[int]], text: str | None) -> None:
    results = make().generate(prompts)
    assert [r.prompt_token_ids for r in results] == ids
    assert all(r.prompt == text for r in results)


def test_text_in_text_out(make: Any, tokenizer: Tokenizer) -> None:
    llm = make(tokenizer.encode(" there was a dog"))
    for prompt in ("Once upon a time", {"prompt": "Once upon a time"}):
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=30))
        assert (result.prompt, result.outputs[0].text) == ("Once upon a time", " there was a dog")
        assert result.outputs[0].finish_reason == "stop"


def test_case_X_generation_config_defaults_hold_offline_and_fit_any_prompt(make: Any, invariants: Invariants) -> None:
    llm = make(echo)
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.5, 7, 1000)
    (result,) = llm.generate([5] * 60)
    assert len(result.outputs[0].token_ids) == 4
    invariants(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        ([[5], [999]], None, "prompt"),
        ([[5]], [SamplingParams()] * 2, "sampling_params"),
        ([[5]], {"temperature": 1}, "sampling_params"),
        ({"text": "x"}, None, "prompt"),
        ({"prompt": "x", "image": 1}, None, "prompt"),
        ({"prompt": None}, None, "prompt"),
        ([[5], None], None, "prompt"),
        ([[5]], SamplingParams(max_tokens=64), "max_tokens"),
    ],
)
def test_wrong_requests_are_refused_before_any_work(make: Any, prompts: Any, params: Any, field: str) -> None:
    llm = make()
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert caught.value.field == field
    assert llm.stats.steps == 0
    assert llm.generate([5])[0].finished


def test_wrong_priority_of_one_prompt_leaves_nothing_behind(make: Any) -> None:
    llm = make(echo)
    with pytest.raises(RequestError, match="priority"):
        llm.generate([[5], [6]], LONG, priority=[0, 2**40])
    results = llm.generate([[5], [6]], LONG, priority=[1, -1])
    assert [r.outputs[0].token_ids for r in results] == [[5] * 40, [6] * 40]


def test_lora_is_refused_by_name(make: Any) -> None:
    with pytest.raises(RequestError, match="lora_request"):
        make().generate([5], lora_request=object())


def test_chat_renders_the_template_and_answers(make: Any, tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, ...]] = []

    def answer(prompt: tuple[int, ...]) -> list[int]:
        seen.append(prompt)
        return tokenizer.encode("fine")

    llm = make(answer)
    conversation = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(conversation, SamplingParams(max_tokens=8))
    assert result.outputs[0].text == "fine"
    assert result.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(seen[0]) == tokenizer.encode_chat(conversation)
    assert len(llm.chat([conversation, conversation], SamplingParams(max_tokens=8))) == 2
    with pytest.raises(RequestError):
        llm.chat([])


def test_without_a_tokenizer_ids_go_in_and_out(make: Any) -> None:
    llm = make(text=False)
    (result,) = llm.generate([5])
    assert (result.outputs[0].token_ids, result.outputs[0].text) == ([40, 41, 2], "")
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_failing_step_is_an_engine_error_and_the_llm_stays_usable(make: Any) -> None:
    llm = make(echo, fail_at_step=3)
    with pytest.raises(EngineError, match="scripted failure of step 3"):
        llm.generate([[5], [6]], LONG)
    assert llm.stats.running == 0
    assert llm.generate([[7]], LONG)[0].outputs[0].token_ids == [7] * 40


def test_failing_row_ends_the_call_and_frees_everything(make: Any) -> None:
    llm = make(echo, fail_rows={2: [0]})
    with pytest.raises(EngineError, match="row 0"):
        llm.generate([[5], [6]], LONG)
    assert (llm.stats.running, llm.stats.kv_usage) == (0, 0)
    assert llm.generate([[7]], LONG)[0].finished


def test_interrupt_waits_for_the_step_then_aborts_everything(make: Any) -> None:
    calls = 0

    def press(step: int, row: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            signal.raise_signal(signal.SIGINT)
        return 1

    llm = make(echo, width=press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], LONG)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (llm.stats.running, llm.stats.waiting, llm.stats.kv_usage) == (0, 0, 0)
    assert llm.generate([[7]], LONG)[0].outputs[0].token_ids == [7] * 40


def test_stream_yields_deltas_and_closing_it_aborts(make: Any) -> None:
    llm = make(echo)
    deltas = list(llm.stream([9], LONG))
    assert len(deltas) == 40
    assert [d.finished for d in deltas[-2:]] == [False, True]
    stream = llm.stream([9], LONG)
    next(stream)
    with pytest.raises(EngineError, match="still open"):
        llm.generate([5])
    stream.close()
    assert llm.stats.running == 0
    assert llm.generate([5])[0].finished


def test_prefix_cache_is_used_and_can_be_reset(make: Any) -> None:
    llm = make()
    prompt = list(range(5, 45))
    assert [llm.generate(prompt)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert [llm.generate(salted)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    llm.reset_prefix_cache()
    assert llm.generate(prompt)[0].num_cached_tokens == 0


def test_case_F2_answers_have_their_own_index(make: Any, invariants: Invariants) -> None:
    llm = make()
    (result,) = llm.generate([5], SamplingParams(n=3, seed=7))
    assert [o.index for o in result.outputs] == [0, 1, 2]
    invariants(llm)


def test_closed_llm_says_so(make: Any) -> None:
    executor = ScriptedExecutor([40], vocab_size=384, eos=2)
    with LLM.from_engine(engine_of(executor), INFO, None) as llm:
        assert llm.generate([5])
        assert not executor.closed
    assert executor.closed
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([5])


def test_unknown_engine_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="gpu_memory"):
        octavo.LLM("model", gpu_memory=1)
