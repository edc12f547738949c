"""Whole steps recorded by a torch backend that captures its streams: which shapes, how, and whose memory they use.

    prepare    current stream --wait--> side stream: run once, then record --wait--> current stream
    run        replay on the current stream, behind the uploads of the step's inputs

A decode step is bound by the host when it is launched kernel by kernel; a replayed node costs about a microsecond.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.plugin.contracts import BatchKey, Step
from octavo.plugin.specs import BatchLimits

if TYPE_CHECKING:
    import torch

__all__ = [
    "FEW_SEQS",
    "LONG_TOKENS",
    "MIXED_TOKENS",
    "Recorded",
    "StepRecorder",
    "decode_sizes",
    "lend",
    "recorded_shapes",
]

DECODE_STEPS = ((1, 1), (2, 2), (4, 4), (64, 8), (256, 16), (1 << 30, 32))
"""(up to, distance): batch sizes of decode steps. Padded rows cost a little arithmetic and no KV reads, so the distance
grows with the size."""

MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, *range(512, 2049, 128))
"""Steps with prompts in them. Under load nearly every step is one: a full batch of decodes and the next prompts.
Products of many tokens come in tiles of 128, so a finer distance would save nothing."""

LONG_TOKENS, FEW_SEQS = 1024, 4
"""Steps of so many tokens in so few sequences are recorded apart: their prompts are long, which other attention kernels
serve better, and few rows are sampled."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a decode graph: 1, 2, 4, 8, 16, ... and the largest."""
    sizes: list[int] = []
    size = 0
    for limit, distance in DECODE_STEPS:
        while size < min(limit, max_num_seqs):
            size = min((size // distance + 1) * distance, max_num_seqs)
            sizes.append(size)
    return sizes


def recorded_shapes(limits: BatchLimits) -> list[BatchKey]:
    """Decode steps of every size up to the largest batch, and steps that may hold prompts: many, or few long ones."""
    decode = [
        BatchKey(num_tokens=size, num_seqs=size, max_q_len=1)
        for size in decode_sizes(min(limits.max_num_seqs, limits.max_num_tokens))
    ]
    mixed = [
        BatchKey(num_tokens=tokens, num_seqs=min(tokens, limits.max_num_seqs))
        for tokens in MIXED_TOKENS
        if tokens <= limits.max_num_tokens
    ]
    long = [
        BatchKey(num_tokens=key.num_tokens, num_seqs=FEW_SEQS)
        for key in mixed
        if key.num_tokens >= LONG_TOKENS and key.num_seqs > FEW_SEQS
    ]
    return [*decode, *mixed, *long]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A graph and what its replay leaves: valid until the next replay of any graph."""

    graph: Any
    outputs: Any


class StepRecorder:
    """Implements `octavo.plugin.GraphRunner` by the graphs of a torch backend, a module such as `torch.<kind>`.

    backend: has Stream, stream, current_stream and graph_pool_handle. make_graph: an empty graph, with capture_begin,
    capture_end, replay and reset. give_back: (device index, pool) frees the pool of a recording that could not end:
    torch leaves it marked as recording, and aborts the process at its exit. lends: see `lend`; False for a backend
    whose memory torch cannot take by address: each recorded step then keeps its outputs.
    All graphs share one memory pool, as only one of them runs at a time: together they need what the largest needs.
    """

    def __init__(
        self,
        device: torch.device,
        backend: Any,
        *,
        make_graph: Callable[[], Any],
        give_back: Callable[[int, Any], object],
        lends: bool = True,
    ) -> None:
        self._device = device
        self._lends = lends
        self._backend = backend
        self._make_graph = make_graph
        self._give_back = give_back
        self._stream = backend.Stream(device)
        self._pool = backend.graph_pool_handle()
        self._recorded: list[Recorded] = []

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        """See `recorded_shapes`."""
        return recorded_shapes(limits)

    def prepare(self, key: BatchKey, fn: Step) -> Recorded:
        """Run `fn` once, which compiles its kernels and takes library workspaces, then record it.

        Raises RuntimeError naming the shape if something in the step cannot be recorded.
        """
        current = self._backend.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._backend.stream(self._stream):
            fn()
            self._stream.synchronize()
            graph, outputs = self._record(key, fn)
        current.wait_stream(self._stream)
        recorded = Recorded(graph=graph, outputs=lend(outputs) if self._lends else outputs)
        self._recorded.append(recorded)
        return recorded

    def _record(self, key: BatchKey, fn: Step) -> tuple[Any, Any]:
        graph = self._make_graph()
        # "thread_local": what other threads of the process do on the device meanwhile is none of our business.
        try:
            with no_garbage_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = fn()
                finally:
                    self._end(graph)
        except RuntimeError as error:
            raise RuntimeError(
                f"a step of {key.num_tokens} tokens in {key.num_seqs} sequences cannot be recorded: {error}; "
                "--enforce-eager runs without recorded steps"
            ) from error
        return graph, outputs

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._give_back(self._device.index, self._pool)
            raise

    def run(self, handle: Recorded) -> Any:
        handle.graph.replay()
        return handle.outputs

    def close(self) -> None:
        """Free the graphs and their memory."""
        for recorded in self._recorded:
            recorded.graph.reset()
        self._recorded.clear()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collecting a tensor or a graph of someone else's would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Memory:
    """Device memory that its tensor no longer owns, in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def lend(outputs: Any) -> Any:
    """The same outputs over memory that goes back to the graphs' pool, where the next recorded graph reuses it.

    A graph's logits alone are hundreds of megabytes; owned, they would add up over all graphs. Core has read a step's
    outputs on the stream before it replays the next one. Takes tensors and dataclasses of them.
    """
    import torch

    if isinstance(outputs, torch.Tensor):
        if not outputs.is_contiguous() or outputs.numel() == 0:
            return outputs
        flat = torch.as_tensor(Memory(outputs), device=outputs.device)
        return flat.view(outputs.dtype).view(outputs.shape)
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return replace(outputs, **{f.name: lend(getattr(outputs, f.name)) for f in fields(outputs)})
    return outputs
