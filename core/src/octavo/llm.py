"""Offline inference in this process: `LLM(model).generate(prompts)`. Names as in vLLM.

    prompts ─> Frontend ─Submit─> EngineLoop.receive ;  EngineLoop.step ─Deltas─> Frontend ─> outputs

The same frontend and the same loop as behind the server, called one after the other: no process, socket or thread.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from octavo.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, checked_as_sampled
from octavo.config import EngineConfig, make_config
from octavo.engine.backlog import Backlog
from octavo.engine.door import Prepared
from octavo.engine.frontend import Frontend, Item, Request
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Abort, Deltas, ResetPrefixCache, Stats
from octavo.engine.pump import describe
from octavo.errors import ConfigError, EngineDeadError, EngineError, RequestError
from octavo.interrupt import deferred_interrupt
from octavo.outputs import OutputMerger, RequestOutput
from octavo.progress import ProgressBar
from octavo.sampling.params import SamplingParams
from octavo.uncollected import uncollected

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids, "prompt": text to show} (and "cache_salt")."""
Message = Mapping[str, Any]
"""One turn of a conversation: {"role": ..., "content": ...}."""

PORTION = 32
"""Answers whose news are read between two steps. The engine's next step waits for that, so it is kept short."""


class LLM:
    """A model and its engine in this process.

    model: a folder, a .gguf file, a hub repository, or "" for the packaged demo model. platform: "auto" or a name
    that `octavo plugin list` shows. Further engine arguments are those of `octavo.config.make_config`
    (max_num_seqs, gpu_memory_utilization, enable_prefix_caching ...).
    seed: draws the seeds of requests that have none, so that a script gives the same samples each time it is run.

    Not for several threads at once. Use it as a context manager, or `close()` it, to free the model's memory.
    Raises ConfigError, PlatformError or ModelError when the engine cannot be built.
    """

    def __init__(
        self,
        model: str = "",
        *,
        tokenizer: str | None = None,
        platform: str = "auto",
        seed: int = 0,
        dtype: str = "auto",
        max_model_len: int | None = None,
        **engine_args: Any,
    ) -> None:
        self._open(
            make_config(
                model=model,
                tokenizer=tokenizer,
                platform=platform,
                seed=seed,
                dtype=dtype,
                max_model_len=max_model_len,
                **engine_args,
            )
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An LLM of a whole EngineConfig, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    @classmethod
    def from_engine(cls, engine: EngineLoop, info: ModelInfo, tokenizer: Tokenizer | None, *, seed: int = 0) -> LLM:
        """An LLM around an engine that already exists, for example one with a scripted executor in tests."""
        llm = cls.__new__(cls)
        llm._attach(engine, info, tokenizer, seed)
        return llm

    def _open(self, config: EngineConfig) -> None:
        with uncollected():
            # Importing octavo must not import torch; building an engine does.
            from octavo import launch
            from octavo.tokenizer import load_tokenizer_for

            tokenizer = load_tokenizer_for(config.model)
            engine, info = launch.build_engine(config)
        self._attach(engine, info, tokenizer, config.model.seed)

    def _attach(self, engine: EngineLoop, info: ModelInfo, tokenizer: Tokenizer | None, seed: int) -> None:
        self.info = info
        self._engine: EngineLoop | None = engine
        self._tokenizer = tokenizer
        self._frontend = Frontend(tokenizer, info, seed=seed)
        self._num_requests = 0
        self._busy = False
        # Defaults that nobody asked for must fit any prompt: max_tokens becomes a cap within the room left.
        default = self.get_default_sampling_params()
        self._default_params = (msgspec.structs.replace(default, max_tokens=None), default.max_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; the results are in their order.

        sampling_params: one for all, one per prompt, or None for the model's defaults. priority: likewise (lower is
        sooner; needs scheduling_policy="priority"). use_tqdm: a progress bar when the work takes long and stderr is
        a terminal.
        Raises RequestError when a prompt or its parameters are wrong (before any work), EngineError when a request
        failed; the others are then aborted and the LLM can be used further.
        """
        if lora_request is not None:
            raise RequestError("LoRA adapters are not supported yet; leave out lora_request", field="lora_request")
        batch = as_prompts(prompts)
        params = per_prompt(sampling_params, len(batch), "sampling_params")
        priorities = per_prompt(priority, len(batch), "priority")
        # Everything is checked before the first request exists.
        prepared = [self._prepare(*each) for each in zip(batch, params, priorities, strict=True)]
        requests = [self._frontend.add(one, request_id=self._new_id()) for one in prepared]
        mergers = {request: OutputMerger() for request in requests}
        # A stop string ends its answer only once it is read.
        portion = None if any(one.params.stop for one in prepared) else PORTION
        with ProgressBar(len(requests), enabled=use_tqdm) as progress:
            for request, delta in self._run(requests, portion=portion):
                mergers[request].add(delta)
                progress.update(delta)
        return [cast(RequestOutput, merger.result()) for merger in mergers.values()]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: object | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to prompts, best first; the results are in the prompts' order.

        concurrency_limit: most prompts that are searched for at a time; None: all. Raises as `generate`.
        """
        if lora_request is not None:
            raise RequestError("LoRA adapters are not supported yet; leave out lora_request", field="lora_request")
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, not {type(params).__name__}", field="params")
        batch = as_prompts(prompts)
        sampling = params.sampling()
        checked = checked_as_sampled(sampling)
        searches = [
            BeamSearch(sampling, self._prepare(prompt, checked, place), self._frontend.door)
            for prompt, place in zip(batch, per_prompt(priority, len(batch), "priority"), strict=True)
        ]
        at_once = concurrency_limit or len(searches) or 1
        with ProgressBar(len(searches), enabled=use_tqdm) as progress:
            for first in range(0, len(searches), at_once):
                group = searches[first : first + at_once]
                while searching := [search for search in group if not search.done]:
                    self._step_beams(searching)
                    for search in searching:
                        if search.done:
                            progress.update(search.result(""))
        return [search.output() for search in searches]

    def _step_beams(self, searches: Sequence[BeamSearch]) -> None:
        """One more token for every beam of these searches, all in one batch."""
        prompts: list[Prompt] = []
        params, priorities = [], []
        for search in searches:
            for token_ids, how in search.requests():
                prompts.append({"prompt_token_ids": token_ids, "cache_salt": search.cache_salt})
                params.append(how)
                priorities.append(search.prepared.priority)
        answers = iter(self.generate(prompts, params, priority=priorities, use_tqdm=False))
        for search in searches:
            search.advance([next(answers) for _ in search.running])

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt as it is generated: each RequestOutput holds what is new. Closing the iterator aborts."""
        request = self._frontend.add(self._prepare(prompt, sampling_params), request_id=self._new_id())
        # Closed by name: a Python may keep what a closed generator was looping over (3.12 does).
        with closing(self._run([request], portion=None)) as news:
            for _, delta in news:
                yield delta

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. Raises RequestError when the model's chat template refuses one."""
        if not messages:
            raise RequestError("messages must not be empty", field="messages")
        several = not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        tokenizer = self.get_tokenizer()
        prompts = []
        rendering: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template": chat_template,
            "template_kwargs": chat_template_kwargs,
        }
        for conversation in conversations:
            text = tokenizer.render_chat(conversation, **rendering)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode_rendered(text)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError when it was not loaded."""
        if self._tokenizer is None:
            raise ConfigError("no tokenizer is loaded; leave out skip_tokenizer_init")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate() uses when it is given none: the model's generation_config over the usual defaults."""
        return SamplingParams(**cast("dict[str, Any]", self.info.default_sampling))

    def reset_prefix_cache(self) -> None:
        """Forget the cached prompt blocks."""
        self._live_engine().receive(ResetPrefixCache(client=0))

    @property
    def stats(self) -> Stats:
        """The engine's gauges and counters."""
        stats: Stats = self._live_engine().stats
        return stats

    def close(self) -> None:
        """Free the engine. Safe to call twice; using the LLM afterwards raises EngineDeadError."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live_engine(self) -> EngineLoop:
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._engine

    def _new_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests - 1)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, priority: int | None = None) -> Prepared:
        """The prompt in any of its forms, checked and tokenized."""
        self._live_engine()
        default_max_tokens = None
        if params is None:
            params, default_max_tokens = self._default_params
        elif not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params"
            )
        settings: dict[str, Any] = {"default_max_tokens": default_max_tokens, "priority": priority or 0}
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                raise RequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids' (and 'cache_salt'), not {sorted(prompt)}",
                    field="prompt",
                )
            settings |= {"cache_salt": prompt.get("cache_salt", ""), "text": prompt.get("prompt")}
        content = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        return self._frontend.door.prepare(content, params, **settings)

    def _run(
        self, requests: Sequence[Request], *, portion: int | None
    ) -> Generator[tuple[Request, RequestOutput], None, None]:
        """Step the engine until these requests have ended. However it is left, nothing keeps running.

        portion: most answers that are read after a step; None: all that have news.
        """
        engine = self._live_engine()
        if self._busy:
            self._abort(engine, requests)
            raise EngineError("a stream of this LLM is still open: read it to its end or close it first")
        self._busy = True
        try:
            for request in requests:
                for submit in request.submits():
                    engine.receive(submit)
            backlog = Backlog(portion)
            num_open = len(requests)
            while num_open:
                if engine.has_work:
                    backlog.put(self._step(engine))
                for request, item in self._read(engine, backlog.take()):
                    if isinstance(item, Exception):
                        raise item
                    num_open -= item.finished
                    yield request, item
        finally:
            self._busy = False
            self._abort(engine, requests)

    def _step(self, engine: EngineLoop) -> Collection[Deltas]:
        """One step. Ctrl-C waits until it is over: half a step would leave the engine half updated."""
        with deferred_interrupt():
            try:
                return engine.step().values()
            except Exception as error:
                engine.fail_all(describe(error))
                self._frontend.drop_all()
                raise EngineError(f"the engine failed in a step: {describe(error)}") from error

    def _read(self, engine: EngineLoop, messages: Sequence[Deltas]) -> list[tuple[Request, Item]]:
        """What these messages tell; what the frontend has to answer goes to the engine."""
        items: list[tuple[Request, Item]] = []
        for one in messages:
            news, answers = self._frontend.process(one)
            items += news
            for answer in answers:
                engine.receive(answer)
        return items

    def _abort(self, engine: EngineLoop, requests: Sequence[Request]) -> None:
        """End what is still running and let the engine forget it, so that the next call finds it idle."""
        handles: list[int] = []
        for request in requests:
            if not request.ended:
                message, _ = self._frontend.abort(request)
                handles += message.handles
        if handles:
            engine.receive(Abort(client=0, handles=tuple(handles)))
        while engine.has_work and not self._busy:
            self._step(engine)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Token ids alone are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    many = list(cast("Sequence[Prompt]", prompts))
    if many and isinstance(many[0], int):
        return [cast("Sequence[int]", many)]
    return many


def per_prompt(value: Any, num_prompts: int, field: str) -> list[Any]:
    """One value for all prompts, or one each."""
    if not isinstance(value, list | tuple):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(value)} {field}: give one, or one per prompt", field=field)
    return list(value)
