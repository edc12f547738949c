"""Whole engines on torch_xla, executed by XLA:CPU: tokens of core's reference, and nothing compiled while serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.testing.tiny import make_model
from one_engine import PROMPTS, SETTINGS, count

pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens_of(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers(llm, params)]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_compiled_steps_give_the_tokens_of_the_reference_and_compile_nothing_more(
    tmp_path: Path, tpu_xla_on_cpu: str, model_type: str
) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    with LLM(model, platform="refdev", **SETTINGS) as llm:
        expected = tokens_of(llm)
    with LLM(model, platform=tpu_xla_on_cpu, **SETTINGS) as llm:
        start = count("UncachedCompile")
        assert tokens_of(llm) == expected
        drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=9, detokenize=False)
        answers(llm, drawn, [[7] * n for n in (2, 31, 8, 100, 5, 64, 1, 1, 9)])
        assert count("UncachedCompile") == start > 0


def test_a_context_walked_in_rounds_gives_the_tokens_of_the_reference_by_one_loop_a_layer(
    tmp_path: Path, tpu_xla_on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo_tpu import attention, xla_program

    loops: list[int] = []

    def counted(*args: Any) -> list[torch.Tensor]:
        loops.append(len(args[2][0]))
        return xla_program.scan(*args)

    model = str(make_model(tmp_path, "gemma2", tokenizer=False))
    with LLM(model, platform="refdev", **SETTINGS) as llm:
        expected = tokens_of(llm)
    monkeypatch.setattr(attention, "ROUND_BYTES", 1)
    monkeypatch.setitem(xla_program.INSTEAD, torch.ops.higher_order.scan, counted)
    with LLM(model, platform=tpu_xla_on_cpu, **SETTINGS) as llm:
        assert tokens_of(llm) == expected
    assert loops == [8] * 4, "a page of 16 tokens a round; of 2 steps, 2 layers each"


def test_masks_penalties_and_logprobs_are_those_of_the_reference(tmp_path: Path, tpu_xla_on_cpu: str) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    shared: dict[str, Any] = {"max_tokens": 6, "detokenize": False}
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, **shared),
        SamplingParams(temperature=0.0, **shared),
        SamplingParams(temperature=0.0, logprobs=2, **shared),
        SamplingParams(temperature=0.0, min_tokens=4, logit_bias={9: 4.0}, allowed_token_ids=[9, 10, 11], **shared),
    ]
    found = []
    for platform in ("refdev", tpu_xla_on_cpu):
        with LLM(model, platform=platform, **SETTINGS) as llm:
            found.append(answers(llm, params))
    assert [list(a.token_ids) for a in found[0]] == [list(a.token_ids) for a in found[1]]
    for mine, theirs in zip(found[0][2].logprobs, found[1][2].logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        for token, logprob in mine.items():
            assert logprob.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_a_draw_by_seed_is_the_draw_of_the_reference(tpu_xla_on_cpu: str) -> None:
    import torch_xla

    from octavo.ops.sampling import sample

    logits = torch.randn(8, 384, generator=torch.Generator().manual_seed(0))
    arguments = (logits, torch.ones(8), torch.arange(8), torch.arange(8) + 40)
    with torch.no_grad():
        drawn = sample(*(t.to(torch_xla.device()) for t in arguments)).cpu()
    assert drawn.tolist() == sample(*arguments).tolist()


def test_an_operator_that_would_run_on_the_host_is_named(tpu_xla_on_cpu: str) -> None:
    import torch_xla
    from torch_xla.experimental.eager import eager_mode_context

    from octavo_tpu.xla_program import Program

    x = torch.arange(4.0).to(torch_xla.device())
    graph = torch.fx.symbolic_trace(lambda x: (torch.bucketize(x, x),))
    with (
        torch.no_grad(),
        eager_mode_context(False),
        pytest.raises(RuntimeError, match=r"compute on the host: aten::.*bucketize"),
    ):
        Program(graph, [x])


def test_a_program_changes_tensors_through_their_views_and_gives_their_buffers_away(tpu_xla_on_cpu: str) -> None:
    import torch_xla
    from torch_xla.experimental.eager import eager_mode_context

    from octavo_tpu.xla_program import XLA, Program

    def step(row: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        row.add_(x)
        return (row * 2,)

    with torch.no_grad(), eager_mode_context(True):
        whole = torch.zeros(3, 4).to(torch_xla.device())
        x = torch.ones(4).to(torch_xla.device())
        row, beside = whole[1], whole[1:, :2]
        with eager_mode_context(False):
            program = Program(torch.fx.symbolic_trace(step), [row, x])
        assert whole.sum().item() == 0, "to compile a step is not to run it"
        for times in (1, 2, 3):
            old = torch.clone(whole)  # another name of the buffer
            (doubled,) = program()
            assert doubled.cpu().tolist() == [2.0 * times] * 4
            assert beside.cpu().tolist() == [[times] * 2, [0, 0]]
        assert whole.cpu().sum().item() == 12
        with pytest.raises(RuntimeError, match="is deleted"):
            XLA._get_tensors_handle([old])
