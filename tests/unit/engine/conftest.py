"""A driver for the engine tests: an EngineLoop over a ScriptedExecutor, and what each request got out of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Abort, Deltas, Failure, Finish, LogprobBlock, Submit, int32, int64
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.sampling.params import SamplingParams
from octavo.speculate.drafting import Drafting
from octavo.testing.scripted import ScriptedExecutor

EOS = 0
ONE_GROUP = (KVGroup(block_size=4, num_blocks=65),)


def counting(prompt: tuple[int, ...]) -> Sequence[int]:
    """An answer that is easy to read: one more each time."""
    return range(prompt[-1] + 1, prompt[-1] + 1000)


def hashed(prompt: tuple[int, ...]) -> Sequence[int]:
    """An answer in which every token depends on the whole prompt and all tokens before."""
    return random.Random(repr(prompt)).choices(range(1, 250), k=400)


class Seer:
    """A drafter that knows the script of every prompt submitted, and says of it what `kind` lets it: "right" all,
    "wrong" nothing that is true, "mixed" sometimes this, sometimes that, sometimes nothing."""

    def __init__(self, script, kind):
        self.script, self.kind = script, kind
        self.prompts: list[list[int]] = []
        self.rng = random.Random(5)
        self.asked = 0

    def propose(self, batch):
        self.asked += len(batch.rows)
        drafts = np.full((len(batch.rows), int(batch.most.max())), -1, np.int32)
        for out, tokens, most in zip(drafts, batch.tokens, batch.most.tolist(), strict=True):
            assert not tokens.flags.writeable
            coming = self.coming(tokens.tolist())[:most]
            if self.kind == "wrong":
                coming = [token % 200 + 1 for token in coming]
            if self.kind == "mixed":
                coming = [t if self.rng.random() < 0.7 else 3 for t in coming[: self.rng.randrange(most + 1)]]
            out[: len(coming)] = coming
        return drafts

    def coming(self, tokens):
        """What the scripts say behind these tokens: behind the longest prompt that they can be of."""
        for prompt in sorted(self.prompts, key=len, reverse=True):
            if tokens[: len(prompt)] == prompt:
                answer = list(self.script(tuple(prompt)))
                said = tokens[len(prompt) :]
                if answer[: len(said)] == said:
                    return answer[len(said) :]
        return []


class Drive:
    """Submit, abort and step; then look at `tokens`, `finish`, `failures`, `cached` by handle."""

    def __init__(
        self,
        script=counting,
        *,
        groups=ONE_GROUP,
        run_ahead=0,
        max_model_len=128,
        caching=True,
        limits=ScheduleLimits(),  # noqa: B008 - frozen
        executor=None,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        policy="fcfs",
        enable_chunked_prefill=True,
        max_queue=None,
        drafter=None,
        num_drafts=3,
        vocab_size=256,
        **scripted,
    ):
        """drafter: a kind of `Seer`, or an object."""
        self.seer = Seer(script, drafter) if isinstance(drafter, str) else drafter
        self.executor = executor or ScriptedExecutor(script, kv_groups=groups, eos=EOS, **scripted)
        self.loop = EngineLoop(
            self.executor,
            cache=CacheConfig(enable_prefix_caching=caching),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                enable_chunked_prefill=enable_chunked_prefill,
                max_queue=max_queue,
            ),
            limits=limits,
            max_model_len=max_model_len,
            run_ahead=0 if drafter else run_ahead,
            drafting=drafter and Drafting(self.seer, name="seer", num_tokens=num_drafts, vocab_size=vocab_size),
        )
        self.free_at_start = self.loop.stats.free_blocks
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, Finish] = {}
        self.failures: dict[int, Failure] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: list[LogprobBlock] = []
        self.clients: dict[int, set[int]] = defaultdict(set)
        self.finish_order: list[int] = []

    def submit(
        self, prompt, *, handle, max_tokens=4, client=0, eos=(EOS,), priority=0, lora=0, salt=b"", leader=0, **params
    ):
        if isinstance(self.seer, Seer):
            self.seer.prompts.append(list(prompt))
        self.loop.receive(
            Submit(
                handle=handle,
                client=client,
                tokens=np.array(prompt, np.int32).tobytes(),
                params=SamplingParams(max_tokens=None, **params),
                max_tokens=max_tokens,
                seed=handle,
                eos=tuple(eos),
                priority=priority,
                lora=lora,
                salt=salt,
                leader=leader,
            )
        )

    def abort(self, *handles, client=0, finished=False):
        self.loop.receive(Abort(client=client, handles=handles, finished=finished))

    def step(self, times=1):
        for _ in range(times):
            self.take(self.loop.step())

    def run(self, most_steps=5000):
        while self.loop.has_work:
            assert most_steps > 0, "the engine does not come to an end"
            most_steps -= 1
            self.step()
        return self

    def take(self, deltas: dict[int, Deltas]):
        for client, delta in deltas.items():
            at, tokens = 0, int32(delta.tokens).tolist()
            for handle, count, finish, cached in zip(
                int64(delta.handles).tolist(),
                int32(delta.counts).tolist(),
                np.frombuffer(delta.finish, np.int8).tolist(),
                int32(delta.cached).tolist(),
                strict=True,
            ):
                assert handle not in self.finish, f"news of {handle} after its end"
                self.tokens[handle] += tokens[at : at + count]
                self.cached[handle] = cached
                self.clients[handle].add(client)
                at += count
                if finish:
                    self.finish[handle] = Finish(finish)
                    self.finish_order.append(handle)
            assert at == len(tokens)
            self.failures |= {failure.handle: failure for failure in delta.failures}
            self.logprobs += delta.logprobs

    @property
    def batches(self):
        return self.executor.batches

    @property
    def stats(self):
        return self.loop.stats

    def assert_clean(self):
        """Nothing is left behind: blocks, rows, sequences."""
        assert not self.loop.has_work
        stats = self.stats
        assert (stats.free_blocks, stats.running, stats.waiting) == (self.free_at_start, 0, 0)
        assert stats.kv_usage == 0


@pytest.fixture(scope="session")
def drive():
    """The driver's class: `drive(script, run_ahead=1, ...)` makes an engine."""
    return Drive


@pytest.fixture(scope="session")
def hashed_script():
    return hashed
