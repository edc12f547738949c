"""Engines that replay the same work. `run(work)` serves all requests at once and returns the output tokens' count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from workload import Work


class Peer(Protocol):
    """An engine with a loaded model."""

    version: str

    def run(self, work: Sequence[Work]) -> int: ...


class Octavo:
    """Octavo's offline API in this process."""

    def __init__(self, model: Path, *, dtype: str, threads: int, max_model_len: int) -> None:
        import octavo

        self.version = octavo.__version__
        self._llm = octavo.LLM(
            str(model),
            platform="cpu",
            dtype=dtype,
            threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=64,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def run(self, work: Sequence[Work]) -> int:
        from octavo import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=w.num_output, ignore_eos=True, detokenize=False) for w in work
        ]
        outputs = self._llm.generate([w.prompt for w in work], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)


class Transformers:
    """`generate` in static batches, left-padded and sorted by output length, which suits it best."""

    def __init__(self, model: Path, *, dtype: str, threads: int, batch: int = 16) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.version = transformers.__version__
        self._batch = batch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def run(self, work: Sequence[Work]) -> int:
        import torch

        ordered = sorted(work, key=lambda w: w.num_output)
        with torch.inference_mode():
            for first in range(0, len(ordered), self._batch):
                group = ordered[first : first + self._batch]
                width = max(len(w.prompt) for w in group)
                longest = max(w.num_output for w in group)
                self._model.generate(
                    input_ids=torch.tensor([[0] * (width - len(w.prompt)) + w.prompt for w in group]),
                    attention_mask=torch.tensor([[0] * (width - len(w.prompt)) + [1] * len(w.prompt) for w in group]),
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
        # A static batch computes past a request's end; only what was asked for counts.
        return sum(w.num_output for w in work)
