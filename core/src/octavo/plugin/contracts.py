"""The behaviour a platform can supply, as Protocols. Shapes: T tokens, S sequences, H heads, D head_dim, B blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from octavo.plugin.data import DeviceDesc, MemInfo, Support
from octavo.plugin.specs import (
    AttentionSpec,
    BatchLimits,
    KVLayout,
    KVPlan,
    KVSpec,
    LinearSpec,
    MoESpec,
    OpContext,
)
from octavo.plugin.step import Admit, Batch, KVGroup, Masks, StepResult

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Tensor = torch.Tensor

Packed = Any
"""Whatever a kernel's `prepare` returns and its `apply` takes back; opaque to core."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Device(Protocol):
    """The only way core touches hardware. `TorchDevice` in `octavo.plugin.torch` serves most platforms."""

    type: str
    index: int

    @property
    def torch_device(self) -> torch.device: ...
    def activate(self) -> None: ...
    def synchronize(self) -> None: ...
    def stream(self, priority: int = 0) -> Stream: ...
    def event(self) -> Event: ...
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]: ...
    def memory(self) -> MemInfo: ...
    def reset_peak(self) -> None: ...
    def empty_cache(self) -> None: ...
    def pin(self, t: Tensor) -> Tensor: ...
    def inference(self) -> AbstractContextManager[Any]: ...
    def describe(self) -> DeviceDesc: ...


@dataclass(frozen=True, kw_only=True)
class KVView:
    """The cache of one layer. k, v: [B, num_kv_heads, block_size, content], strided as `KVLayout.order` says.

    content: head_dim; in int8 four more, see `octavo.ops.attention.quantized`.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class AttnBatch:
    """What attention must know of a step, for one KV group. Device tensors, and host copies for planning.

    q_starts int32 [S + 1]: first token of each sequence in the packed batch; kv_lens int32 [S]: context length after
    this step; block_table int32 [S, max_blocks], a part of a wider one: its rows lie stride(0) apart; slots int64 [T]:
    where token t's K and V go, block * block_size + offset; padding tokens point into block 0, which nobody reads.
    num_decodes: the first sequences that have exactly one query token.
    Padded sequences have kv_len 0 and no tokens.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    q_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slots: Tensor
    q_starts_host: NDArray[np.int32]
    kv_lens_host: NDArray[np.int32]


AttnPlan = Any
"""What `AttentionBackend.plan` prepares for all layers of a group; opaque to core."""


@dataclass(frozen=True, kw_only=True)
class AttnLayer:
    """What differs between layers of one backend. sinks: float32 [H] or None.

    k_scale, v_scale: the cache holds k / k_scale and v / v_scale; a number, or float32 [num_kv_heads].
    """

    index: int
    sinks: Tensor | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0


class AttentionBackend(Protocol):
    """Paged attention: one class. `run` writes the new K and V into the cache, then attends.

    A class that says `takes_written_kv: ClassVar[bool] = True` is handed None for k and v where they lie in the cache
    already: core then rotates and writes by the one op `qkv_norm_rope_write`. Given k and v, it still writes them.
    A class may have `start_step(plan)`: device work that all layers of a step share. Core calls it once a step before
    the first `run`, inside a recorded step too, when the batch's tensors hold the step's values.
    A class says `graph_safe: ClassVar[bool] = False` if a step recorded with one plan cannot serve the next step: if
    `plan(batch, graph=True)` does not refill memory that the recorded `run` reads. Steps then run eagerly.
    An instance may have `why`, a text for people: how it chose to work. `octavo explain` shows it.
    """

    name: ClassVar[str]

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support: ...
    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout | None: ...
    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None: ...
    def plan(self, batch: AttnBatch, *, graph: bool) -> AttnPlan: ...
    def run(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: AttnPlan, out: Tensor) -> Tensor:
        """q, out [T, H, D]; k, v [T, num_kv_heads, D]. Fills and returns `out`."""
        ...


def start_step(backend: AttentionBackend, plan: AttnPlan) -> None:
    """Do what layers share, if the backend has something to do: before the first `run` with this plan."""
    if (start := getattr(backend, "start_step", None)) is not None:
        start(plan)


class LinearKernel(Protocol):
    """A matrix multiplication. `prepare` takes the checkpoint's tensors by suffix: "weight" [N, K] of a plain one, else
    those that the `QuantFormat` of the spec's scheme names, cut to this rank's share.

    A kernel that multiplies in fp8 may have an attribute `scaled_rows_from`: from that many tokens on its `apply` also
    takes x as `octavo.plugin.torch.ScaledRows`, which the norm before it then makes (op `add_rms_norm_fp8`), and its
    method `apply_scaled(x, w, bias) -> ScaledRows` gives a gated product in the form that the next one takes.

    A kernel that can give back rows of its packed weight, exactly as `prepare` got them, may have a method
    `look_up(w, ids, first, scale) -> Tensor` that does what the op `embedding_part` does. A vocabulary that serves both
    ends of a model is then kept once.
    """

    name: ClassVar[str]

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support: ...
    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Packed: ...
    def apply(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        """x [T, K], contiguous -> [T, N] in the spec's out_dtype."""
        ...


class MoEKernel(Protocol):
    """Routed experts. `prepare` takes "gate_up" [E, 2I, K] and "down" [E, K, I]; of quantized ones every tensor as
    "gate_up.SUFFIX" and "down.SUFFIX", those of all experts stacked: [E, ...]."""

    name: ClassVar[str]

    @classmethod
    def supports(cls, spec: MoESpec, device: Device) -> Support: ...
    def prepare(self, weights: Mapping[str, Tensor], spec: MoESpec, device: Device) -> Packed: ...
    def apply(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w: Packed, expert_map: Tensor | None
    ) -> Tensor: ...


def always(context: OpContext) -> Support:
    """The `supports` of a kernel that takes everything."""
    return Support(ok=True)


A = TypeVar("A", bound=AttentionBackend)
L = TypeVar("L", bound=LinearKernel)


class KernelRegistry(Protocol):
    """Where `register_kernels` puts kernels. Higher priority is asked first; reference kernels are asked last."""

    def op(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        provider: str,
        priority: int = 0,
        supports: Callable[[OpContext], Support] = always,
        inplace: bool = False,
        graph_safe: bool = True,
    ) -> None: ...
    def attention(self, cls: type[Any], *, priority: int = 0) -> None: ...
    def linear(self, cls: type[Any], *, priority: int = 0) -> None: ...
    def moe(self, cls: type[Any], *, priority: int = 0) -> None: ...


class ExtensionRegistry(Protocol):
    """Where `register_extensions` puts hardware-neutral things. Core's own built-ins register here too."""

    def model(self, model_type: str, target: str) -> None:
        """A class made of `octavo.plugin.models`. `target` is "package.module:Class", imported when first used."""
        ...

    def quant_format(self, name: str, target: str) -> None: ...
    def logits_processor(self, name: str, target: str) -> None:
        """A `LogitsProcessor`, imported at start-up."""
        ...

    def drafter(self, name: str, target: str) -> None:
        """A `Drafter`, for `--speculative-config '{"method": name, ...}'`."""
        ...

    def tool_parser(self, name: str, target: str) -> None:
        """A `ToolFormat` of `octavo.plugin.parsers`, for `--tool-call-parser`: "package.module:NAME"."""
        ...

    def reasoning_parser(self, name: str, target: str) -> None:
        """A `ReasoningFormat` of `octavo.plugin.parsers`, for `--reasoning-parser`."""
        ...


class LogitsProcessor(Protocol):
    """Changes the logits of one request that names it: `SamplingParams(extra_args={name: value})`, `vllm_xargs` in the
    API. One object for each request.

    What it holds must be a function of the request's tokens: after preemption a new object takes over in mid-answer.
    It runs behind a recorded step, never inside one; steps without such requests cost nothing. What it raises ends
    its own request only.
    """

    def __init__(self, value: Any, admit: Admit) -> None: ...
    @classmethod
    def check(cls, value: Any, vocab_size: int) -> None:
        """Raise ValueError if a request's value is wrong: called before the request is queued."""
        ...

    @classmethod
    def apply(cls, processors: Sequence[Any], logits: Tensor, tokens: Tensor, lengths: Sequence[int]) -> None:
        """Change logits float32 [N, V] in place: row i for processors[i], before temperature and filters.

        tokens int32 [N, L], on the device: row i knows tokens[i, :lengths[i]], prompt and answer. Copying them to the
        host waits for the step before.
        """
        ...


class Communicator(Protocol):
    """Collectives of one group of ranks. With one rank every call returns its input."""

    rank: int
    size: int

    def all_reduce(self, t: Tensor) -> Tensor: ...
    def all_gather(self, t: Tensor, dim: int) -> Tensor: ...
    def reduce_scatter(self, t: Tensor, dim: int) -> Tensor: ...
    def all_to_all(self, t: Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor: ...
    def broadcast(self, t: Tensor, src: int) -> Tensor: ...
    def send(self, t: Tensor, dst: int) -> None: ...
    def recv(self, like: Tensor, src: int) -> Tensor: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BatchKey:
    """One padded shape of a step. max_context, max_q_len: longest context and most query tokens of a sequence, 0: any.

    max_q_len 1 is a decode step: token i belongs to sequence i.
    """

    num_tokens: int
    num_seqs: int
    max_context: int = 0
    max_q_len: int = 0


Handle = Any
Step = Callable[[], Any]


class GraphRunner(Protocol):
    """Records the whole step once per key and replays it. Capture and ahead-of-time compilation are one contract.

    `fn` takes no argument: it reads the runner's persistent input buffers, which keep their addresses, and returns
    its outputs, which `run` returns again; they hold until the next `run`. A step runs once in each `run`: one that
    cannot be recorded is simply called.

    `keys`: the shapes worth recording. Core prepares decode shapes and those of few tokens before the first request,
    the largest first, and each other one behind the first step of its shape; with `PlatformCaps.graph` "aot" all of
    them at once. `prepare` may run `fn` as often as it likes, or leave it to the first `run` to record: core calls it
    with sequences that are nobody's.
    """

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]: ...
    def prepare(self, key: BatchKey, fn: Step) -> Handle: ...
    def run(self, handle: Handle) -> Any: ...
    def close(self) -> None: ...


class ModelExecutor(Protocol):
    """Runs steps. Core's runner is one; a platform may bring its own (`make_executor`): numpy in, token ids out.

    Ready when made: weights loaded, KV taken. `launch` may return before the step is done; `collect` waits for the
    oldest launched step and returns its result.
    """

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        """The block tables the scheduler has to fill, in the order of `Batch.blocks`."""
        ...

    def launch(self, batch: Batch) -> None: ...
    def collect(self) -> StepResult: ...
    def close(self) -> None: ...


@runtime_checkable
class MaskingExecutor(ModelExecutor, Protocol):
    """A `ModelExecutor` that can serve structured outputs; one without `mask` is never given a masked batch.

    With `Batch.masked`, `launch` starts everything but sampling. `mask` comes after it, before the next `launch` and
    before the step is collected, and starts that. Steps before it may be collected in between. If the engine failed
    there is no `mask`: the next `launch` samples without, and nobody reads it.
    """

    def mask(self, masks: Masks) -> None: ...


class WorkerView(Protocol):
    """What a plugin may see of a worker in `worker_event`."""

    @property
    def device(self) -> Device: ...
    @property
    def rank(self) -> int: ...


__all__ = [
    "AttentionBackend",
    "AttnBatch",
    "AttnLayer",
    "AttnPlan",
    "BatchKey",
    "Communicator",
    "Device",
    "Event",
    "ExtensionRegistry",
    "GraphRunner",
    "Handle",
    "KVPlan",
    "KVView",
    "KernelRegistry",
    "LinearKernel",
    "MoEKernel",
    "MaskingExecutor",
    "ModelExecutor",
    "Packed",
    "Stream",
    "WorkerView",
    "always",
    "start_step",
]
