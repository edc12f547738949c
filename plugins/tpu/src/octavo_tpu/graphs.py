"""Whole steps compiled ahead: one program a shape, from `begin_step` to the commit of the tokens.

    prepare    Dynamo follows the step's Python once  ->  one graph of operators  ->  XLA  ->  one program
    run        the program, on the tensors that it was compiled with

The program's inputs are the very tensors the step reads: weights, the request table, the KV cache. What the step
changes in place is given to the program to overwrite, so no second cache exists; see `donation` and `xla_program` for
how each runtime does that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.plugin import BatchKey, BatchLimits
from octavo.plugin.contracts import Step
from octavo_tpu import BUCKETS
from octavo_tpu.runtimes import Runtime


def compiled_shapes(limits: BatchLimits) -> list[BatchKey]:
    """Decode steps and steps that may hold prompts, each up to the largest that can come."""
    most = min(limits.max_num_seqs, limits.max_num_tokens)
    decode = [BatchKey(num_tokens=size, num_seqs=size, max_q_len=1) for size in sizes_up_to(BUCKETS.num_seqs, most)]
    mixed = [
        BatchKey(num_tokens=size, num_seqs=min(size, limits.max_num_seqs))
        for size in sizes_up_to(BUCKETS.num_tokens, limits.max_num_tokens)
    ]
    return [*decode, *mixed]


def sizes_up_to(buckets: Sequence[int], most: int) -> list[int]:
    """The buckets below `most`, and `most` itself: nothing larger can come."""
    return [*(size for size in buckets if size < most), most]


class CompiledSteps:
    """Implements `octavo.plugin.GraphRunner`."""

    def __init__(self, device: Runtime) -> None:
        self._device = device

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        """See `compiled_shapes`."""
        return compiled_shapes(limits)

    def prepare(self, key: BatchKey, fn: Step) -> Callable[[], Any]:
        """Compile and run a step. Raises RuntimeError naming the shape if it cannot be one program."""
        compiled = torch.compile(
            own_code(fn),
            backend=self._device.compile_backend,
            fullgraph=True,
            dynamic=False,
            # Each handle is called with nothing and reads the same tensors for ever, so there is nothing to check.
            options={"guard_filter_fn": no_guards},
        )
        try:
            compiled()
            self._device.synchronize()
        except Exception as error:
            raise RuntimeError(
                f"a step of {key.num_tokens} tokens in {key.num_seqs} sequences cannot be compiled: {error}; "
                "--enforce-eager runs without compiled steps"
            ) from error
        return compiled

    def run(self, handle: Callable[[], Any]) -> Any:
        return handle()

    def close(self) -> None:
        """Programs go with their handles."""


def no_guards(guards: Sequence[object]) -> list[bool]:
    """Keep none of the guards. torch.compiler has the like, but not in the versions that torch_xla needs."""
    return [False] * len(guards)


def own_code(fn: Step) -> Step:
    """The same function with a code object of its own: Dynamo keeps programs by code object, and the steps of all
    shapes are closures over one."""
    assert isinstance(fn, types.FunctionType)
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
