"""Requests with a shape, as the engine sees them: they wait for a grammar, alone, and sample under its masks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Abort, Finish, Submit, int32, int64
from octavo.engine.shapes import Allowed, News, Want
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import Batch, KVGroup, Masks, StepResult
from octavo.sampling.params import SamplingParams
from octavo.structured.spec import StructuredOutputs

VOCAB = 64


class Spelling:
    """Grammars that each allow one text, given as the choice "1,2,3". `ready` says which numbers are prepared."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.taken: dict[int, list[int]] = {}
        self.news_to_come: deque[News] = deque()
        self.forgotten: list[int] = []
        self.broken: dict[int, str] = {}
        self.may_end: list[bool] = []
        self.warmed = 0

    def warm(self) -> None:
        self.warmed += 1

    def open(self, number: int, spec: StructuredOutputs, *, ends: Sequence[int], after: Sequence[int]) -> None:
        assert spec.choice is not None
        self.texts[number] = [int(part) for part in spec.choice[0].split(",")]
        self.taken[number] = []

    def ready(self, *numbers: int) -> None:
        self.news_to_come += [News(number=number, backend="spelling", seconds=1.0) for number in numbers]

    def news(self, timeout: float) -> list[News]:
        found = list(self.news_to_come)
        self.news_to_come.clear()
        return found

    def masks(self, wants: Sequence[Want]) -> Allowed:
        done, words = [], []
        for want in wants:
            self.may_end.append(want.may_end)
            if want.number in self.broken:
                continue
            self.taken[want.number] += want.tokens
            left = self.texts[want.number][len(self.taken[want.number]) :]
            done.append(not left)
            words.append(np.array([1 << left[0], 0], np.int64).astype(np.int32) if left else None)
        return Allowed(done=done, words=words, errors=dict(self.broken))

    def forget(self, numbers: Sequence[int]) -> None:
        self.forgotten += numbers

    def close(self) -> None:
        self.texts.clear()


class Obedient:
    """Samples the first token that a mask allows, and 9 where there is none."""

    kv_groups = (KVGroup(block_size=4, num_blocks=33),)

    def __init__(self) -> None:
        self.launched: deque[tuple[Batch, np.ndarray]] = deque()
        self.log: list[str] = []

    def launch(self, batch: Batch) -> None:
        self.log.append(f"launch {batch.step}")
        self.launched.append((batch, np.full((int(batch.samples.sum()), 1), 9, np.int32)))

    def mask(self, masks: Masks) -> None:
        self.log.append(f"mask {masks.step}")
        batch, tokens = self.launched[-1]
        assert batch.masked
        assert batch.step == masks.step
        for place, words in zip(masks.places.tolist(), masks.words, strict=True):
            tokens[place] = int(words[0]).bit_length() - 1

    def collect(self) -> StepResult:
        batch, tokens = self.launched.popleft()
        self.log.append(f"collect {batch.step}")
        rows = batch.rows[batch.samples]
        return StepResult(step=batch.step, rows=rows, tokens=tokens, counts=np.ones(len(rows), np.int32))

    def close(self) -> None:
        self.launched.clear()


class Case:
    """An engine with `Spelling` grammars; what each handle got."""

    def __init__(self, run_ahead: int = 1, executor=None) -> None:
        self.grammars, self.executor = Spelling(), executor or Obedient()
        self.loop = EngineLoop(
            self.executor,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(max_num_seqs=4),
            limits=ScheduleLimits(),
            max_model_len=64,
            run_ahead=run_ahead,
            grammars=self.grammars,
        )
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.failures: dict[int, tuple[str, str]] = {}

    def submit(self, handle: int, text: str | None = None, *, max_tokens: int = 8, **params) -> None:
        if text is not None:
            params["structured_outputs"] = StructuredOutputs(choice=(text,))
        tokens = np.array([5, 6, handle], "<i4").tobytes()
        submit = Submit(
            handle=handle,
            client=0,
            tokens=tokens,
            params=SamplingParams(**params),
            max_tokens=max_tokens,
            seed=0,
            eos=(2,),
        )
        self.loop.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit))

    def run(self, steps: int = 60) -> Case:
        for _ in range(steps):
            if not self.loop.has_work:
                break
            for deltas in self.loop.step().values():
                counts, tokens, start = int32(deltas.counts).tolist(), int32(deltas.tokens).tolist(), 0
                finishes = np.frombuffer(deltas.finish, np.int8).tolist()
                for handle, count, finish in zip(int64(deltas.handles).tolist(), counts, finishes, strict=True):
                    self.tokens.setdefault(handle, []).extend(tokens[start : start + count])
                    start += count
                    if finish:
                        assert handle not in self.finish, f"{handle} ends twice"
                        self.finish[handle] = Finish(finish)
                for failure in deltas.failures:
                    self.failures[failure.handle] = (failure.field, failure.message)
        return self


def test_grammars_can_be_loaded_ahead() -> None:
    case = Case()
    case.loop.warm()
    assert case.grammars.warmed == 1
    assert not case.loop.has_work


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_answer_follows_its_grammar_and_ends_with_it(run_ahead: int) -> None:
    case = Case(run_ahead)
    case.submit(1, "3,1,4,1,5")
    case.submit(2, max_tokens=4)
    case.grammars.ready(1)
    case.run()
    assert case.tokens == {1: [3, 1, 4, 1, 5], 2: [9] * 4}
    assert case.finish == {1: Finish.COMPLETE, 2: Finish.LENGTH}
    assert not case.loop.has_work


def test_with_run_ahead_a_step_is_launched_before_its_masks_are_made() -> None:
    case = Case(1)
    case.submit(1, "3,1,4")
    case.grammars.ready(1)
    case.run()
    assert case.executor.log[:6] == ["launch 1", "mask 1", "launch 2", "collect 1", "mask 2", "launch 3"]


def test_a_request_waits_for_its_grammar_without_holding_up_others() -> None:
    case = Case()
    case.submit(1, "3,1")
    case.submit(2, max_tokens=3)
    case.run(20)
    assert case.finish == {2: Finish.LENGTH}
    assert case.loop.has_work
    assert case.loop.stats.waiting == 1
    case.grammars.ready(1)
    case.run()
    assert case.finish[1] is Finish.COMPLETE
    assert (case.loop.stats.grammars, case.loop.stats.grammar_seconds) == (1, 1.0)


def test_a_refused_grammar_is_the_requests_own_failure() -> None:
    case = Case()
    case.submit(1, "3,1")
    case.submit(2, "4")
    case.grammars.news_to_come.append(News(number=1, error="no such keyword", field="structured_outputs.json"))
    case.grammars.ready(2)
    case.run()
    assert case.failures == {1: ("structured_outputs.json", "no such keyword")}
    assert case.tokens == {2: [4]}


def test_an_answer_that_cannot_go_on_fails_alone() -> None:
    case = Case()
    case.submit(1, "3,1,4,1")
    case.submit(2, "4,4,4,4")
    case.grammars.ready(1, 2)
    case.run(3)
    case.grammars.broken[1] = "the library gave up"
    case.run()
    assert case.finish == {1: Finish.ERROR, 2: Finish.COMPLETE}
    assert case.failures[1] == ("", "the library gave up")
    assert case.tokens[2] == [4, 4, 4, 4]


@pytest.mark.parametrize("prepared", [False, True])
def test_an_aborted_request_is_forgotten(prepared: bool) -> None:
    case = Case()
    case.submit(1, "3,1,4,1,5,9,2,6")
    if prepared:
        case.grammars.ready(1)
    case.run(3)
    case.loop.receive(Abort(client=0, handles=(1,)))
    case.submit(2, "7")
    case.grammars.ready(2)
    case.run()
    assert case.finish[1] is Finish.ABORT
    assert case.finish[2] is Finish.COMPLETE
    assert 1 in case.grammars.forgotten


def test_a_grammar_that_is_ready_too_late_is_dropped() -> None:
    case = Case()
    case.submit(1, "3,1")
    case.loop.receive(Abort(client=0, handles=(1,)))
    case.grammars.ready(1)
    case.submit(2, "4")
    case.grammars.ready(2)
    case.run()
    assert case.tokens == {1: [], 2: [4]}


def test_min_tokens_are_kept_by_the_masks() -> None:
    case = Case()
    case.submit(1, "3,1,4,1", min_tokens=2)
    case.grammars.ready(1)
    case.run()
    assert case.grammars.may_end == [False, False, True, True, True]
    assert case.finish[1] is Finish.COMPLETE


def test_a_failed_step_ends_those_that_wait_for_a_grammar_too() -> None:
    case = Case()
    case.submit(1, "3,1")
    case.loop.fail_all("broken")
    assert not case.loop.has_work
    case.submit(2, "4")
    case.grammars.ready(1, 2)
    case.run()
    assert case.tokens == {2: [4]}


def test_an_executor_that_cannot_mask_refuses_the_request() -> None:
    class Plain:
        kv_groups = Obedient.kv_groups

        def launch(self, batch: Batch) -> None: ...
        def collect(self) -> StepResult: ...
        def close(self) -> None: ...

    case = Case(executor=Plain())
    case.submit(1, "3")
    case.run()
    assert case.failures[1][0] == "structured_outputs"
