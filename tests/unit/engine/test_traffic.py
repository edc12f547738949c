"""Random traffic over random settings. Whatever they are, every request ends, its tokens are those of its script,
and all blocks come back; the scripted executor checks each read and write of KV memory on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.messages import Finish
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup

EOS = 0
POOLS = (
    (KVGroup(block_size=4, num_blocks=17),),
    (KVGroup(block_size=16, num_blocks=6),),
    (KVGroup(block_size=1, num_blocks=70),),
    (KVGroup(block_size=4, num_blocks=18), KVGroup(block_size=4, num_blocks=17, window=7)),
    (KVGroup(block_size=4, num_blocks=18), KVGroup(block_size=8, num_blocks=10, window=12)),
    (KVGroup(block_size=4, num_blocks=17, window=1),),
    (
        KVGroup(block_size=2, num_blocks=40),
        KVGroup(block_size=2, num_blocks=33, window=5),
        KVGroup(block_size=4, num_blocks=17),
    ),
)
LIMITS = st.builds(
    ScheduleLimits,
    mix_prefill_decode=st.booleans(),
    max_prefills_per_step=st.sampled_from([None, 1, 2]),
    max_batch_context_tokens=st.sampled_from([None, 1, 60, 200]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "groups": st.sampled_from(POOLS),
        "run_ahead": st.sampled_from([0, 1]),
        "caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 2, 3, 5, 8, 20, 64]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "limits": LIMITS,
        "drafter": st.sampled_from([None, None, "right", "wrong", "mixed"]),
        "num_drafts": st.integers(1, 6),
    }
)
WIDTHS = st.sampled_from(["one", "three", "random"])


@dataclass
class Traffic:
    """Requests made from a seed, so that the same ones can be sent to differently set engines."""

    seed: int
    prompts: list[list[int]] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)

    def __post_init__(self):
        rng = random.Random(self.seed)
        stems = [[rng.randrange(1, 9) for _ in range(30)] for _ in range(2)]
        for handle in range(rng.randrange(1, 14)):
            tail = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 8))]
            self.prompts.append(rng.choice(stems)[: rng.randrange(0, 30)] + tail)
            params = {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
            params |= {"logprobs": 1} if rng.random() < 0.2 else {}
            self.requests.append(
                {
                    "handle": handle,
                    "max_tokens": rng.choice([0, 1, 2, 5, 10, 25]),
                    "priority": rng.randrange(3),
                    "lora": rng.choice([0, 0, 0, 1]),
                    "eos": rng.choice([(), (EOS,), (7, 8)]),
                    **params,
                }
            )

    def expected(self, handle, script):
        """The answer, from the script alone."""
        request, out = self.requests[handle], []
        for token in script(tuple(self.prompts[handle]))[: request["max_tokens"]]:
            out.append(token)
            if token in request["eos"]:
                return out, Finish.STOP
        return out, Finish.LENGTH


def width_of(name):
    if name == "random":
        return lambda step, row: (step * 7 + row * 5) % 4 + 1
    return {"one": 1, "three": 3}[name]


def script(prompt):
    """Every token depends on the whole prompt and its place. EOS turns up now and then."""
    return random.Random(repr(prompt)).choices(range(40), k=40)


def logprob_positions(d, handle, prompt):
    blocks = [b for b in d.logprobs if b.handle == handle and b.prompt == prompt]
    return [p for b in blocks for p in range(b.start, b.start + len(b.ranks) // 4)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(options=SETTINGS, width=WIDTHS, seed=st.integers(0, 10**6), pause=st.integers(0, 3))
def test_every_request_gets_its_own_answer_whatever_the_settings(drive, options, width, seed, pause):
    traffic = Traffic(seed)
    d = drive(script, width=width_of(width), **options)
    for prompt, request in zip(traffic.prompts, traffic.requests, strict=True):
        d.submit(prompt, **request)
        d.step(pause)
    d.run().assert_clean()
    whole = None if options["enable_chunked_prefill"] else options["max_num_batched_tokens"]
    for handle, (prompt, request) in enumerate(zip(traffic.prompts, traffic.requests, strict=True)):
        if handle in d.failures:
            assert d.failures[handle].client_error
            assert whole is not None
            assert len(prompt) > whole
            continue
        assert (d.tokens[handle], d.finish[handle]) == traffic.expected(handle, script)
        if "prompt_logprobs" in request:
            assert logprob_positions(d, handle, True) == list(range(1, len(prompt)))
        if "logprobs" in request:
            positions = logprob_positions(d, handle, False)
            assert positions == list(range(len(prompt), len(prompt) + len(d.tokens[handle])))
    served = [h for h in range(len(traffic.prompts)) if h not in d.failures]
    stats = d.stats
    assert stats.prompt_tokens == sum(len(traffic.prompts[h]) for h in served)
    assert stats.generation_tokens == sum(len(d.tokens[h]) for h in served)
    assert stats.prefix_hits <= stats.prefix_queries <= stats.prompt_tokens


@settings(max_examples=60, deadline=None, derandomize=True)
@given(options=SETTINGS, width=WIDTHS, seed=st.integers(0, 10**6), data=st.data())
def test_random_aborts_and_failures_leak_nothing_and_disturb_nobody(drive, options, width, seed, data):
    traffic = Traffic(seed)
    rng = random.Random(seed + 1)
    fail_rows = {rng.randrange(1, 30): [rng.randrange(6)] for _ in range(2)}
    d = drive(script, width=width_of(width), fail_rows=fail_rows, **options)
    aborted = set()
    for prompt, request in zip(traffic.prompts, traffic.requests, strict=True):
        d.submit(prompt, **request)
        d.step(rng.randrange(3))
        if rng.random() < 0.4:
            victim = rng.randrange(len(traffic.prompts))
            aborted.add(victim)
            d.abort(victim, finished=rng.random() < 0.3)
    most = data.draw(st.integers(0, 20))
    d.step(most)
    d.abort(*range(0, len(traffic.prompts), 3))
    aborted |= set(range(0, len(traffic.prompts), 3))
    d.run().assert_clean()
    for handle in range(len(traffic.prompts)):
        expected, finish = traffic.expected(handle, script)
        if handle in d.failures or handle in aborted:
            assert d.tokens[handle] == expected[: len(d.tokens[handle])]
        else:
            assert (d.tokens[handle], d.finish[handle]) == (expected, finish)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["fcfs", "priority"]))
def test_cache_is_hit_under_pressure_and_still_exact(drive, seed, policy):
    rng = random.Random(seed)
    stem = [rng.randrange(1, 9) for _ in range(24)]
    d = drive(script, groups=POOLS[3], policy=policy, max_num_batched_tokens=8, run_ahead=1)
    prompts = [stem + [rng.randrange(1, 9) for _ in range(3)] for _ in range(12)]
    for handle, prompt in enumerate(prompts):
        d.submit(prompt, handle=handle, max_tokens=20, eos=(), priority=handle % 2)
        d.step(2)
    d.run().assert_clean()
    assert d.stats.prefix_hits > 0
    for handle, prompt in enumerate(prompts):
        assert d.tokens[handle] == script(tuple(prompt))[:20]
