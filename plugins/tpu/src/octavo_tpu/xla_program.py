"""One step as one program of torch_xla.

    make    the graph runs once, lazily, on stand-ins for the tensors it reads  ->  XLA  ->  one program
    run     the program on the buffers that those tensors have now; each tensor it changes takes the new buffer

Dynamo lists what the step reads; many of these are views, and change with what they are views of:

    uploaded [4, N]         reads    owner       program
    |- q_starts [S + 1]       x  -->   x    -->  uploaded ... -> uploaded, with the context lengths
    '- seqs [3, S]            x  --^             kv cache ... -> kv cache, with the new keys

So a program takes and gives back whole tensors, the owners. The buffers of those that it changes are donated: XLA
writes the result where the old value lies, and no second cache exists.

torch_xla's own backend for torch.compile ("openxla") does not serve here: it ends in a segmentation fault on tensors
that share memory and are written (2.9.0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor, fx
from torch_xla.debug import metrics
from torch_xla.experimental.scan import _scan_impl_flat
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from octavo_tpu.xla_sharding import keep_sharding

XLA: Any = torch_xla._XLAC


def count_until(ends: Tensor, values: Tensor, *, right: bool) -> Tensor:
    """torch.searchsorted for few `ends`: int64, how many of them each value has reached (right) or passed."""
    reached = values[..., None] >= ends if right else values[..., None] > ends
    return reached.sum(dim=-1)


def scan(
    body: Callable[..., Sequence[Tensor]],
    state: Sequence[Tensor],
    items: Sequence[Tensor],
    beside: Sequence[Tensor] = (),
) -> list[Tensor]:
    """torch's operator scan as one loop of XLA. beside: what else the body reads; it goes through the loop unchanged,
    as torch_xla would compute anew in each round what it took to make what a body just finds."""
    num = len(state)

    def step(carry: list[Tensor], item: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outputs = list(body(*carry[:num], *item, *carry[num:]))
        return [*outputs[:num], *carry[num:]], outputs[num:]

    carry, results = _scan_impl_flat(step, [*state, *beside], list(items))
    return [*carry[:num], *results]


INSTEAD: dict[Any, Any] = {torch.searchsorted: count_until, torch.ops.higher_order.scan: scan}
"""Operators that torch_xla computes on the host, so that their result would be a constant of the program, or does not
have -> the same, of others."""


class Program:
    """A graph from Dynamo, compiled for its inputs. Called with nothing it runs on them, and gives the graph's outputs.

    Raises RuntimeError naming the operators if some of them would be computed on the host.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        for node in graph.graph.nodes:
            node.target = INSTEAD.get(node.target, node.target)
        graph.recompile()
        owners = list({id(owner): owner for owner in map(owner_of, inputs)}.values())
        torch_xla.sync(wait=True)
        buffers = XLA._get_tensors_handle(owners)
        assert len(set(buffers)) == len(owners), "two tensors of a step have one buffer"
        standins = [torch.clone(owner) for owner in owners]  # of the same buffers: nothing is copied
        stands_for = {id(owner): standin for owner, standin in zip(owners, standins, strict=True)}
        host = fallbacks()
        given = [of_standin(t, stands_for[id(owner_of(t))]) for t in inputs]
        outputs = list(graph(*given))
        if on_host := sorted(name for name, count in fallbacks().items() if count != host.get(name)):
            raise RuntimeError(f"torch_xla would compute on the host: {', '.join(on_host)}")
        changed = XLA._check_tensor_need_materialization(standins)
        self._changed = [owner for owner, yes in zip(owners, changed, strict=True) if yes]
        results = [standin for standin, yes in zip(standins, changed, strict=True) if yes]
        keep_sharding(self._changed, results)
        # Where the graph gives back an input, as one that it has filled, that input is the output.
        inputs_by_standin = {id(standin): t for standin, t in zip(given, inputs, strict=True)}
        self._outputs = [inputs_by_standin.get(id(output)) for output in outputs]
        results += [output for output, t in zip(outputs, self._outputs, strict=True) if t is None]
        for owner in self._changed:
            XLA._set_buffer_donation(owner, True)
        _, values = XLA._get_tensors_xla_device_data_node(results)
        owner_with = dict(zip(buffers, owners, strict=True))
        # What is no owner's is a number that the graph holds.
        self._parameters = [
            owner_with.get(buffer, value) for buffer, value in zip(XLA._get_tensors_handle(values), values, strict=True)
        ]
        with alias_with_buffer_donor_config():
            self._hash = XLA._get_graph_hash(results)
            XLA._xla_warm_up_cache(results, [])

    def __call__(self) -> tuple[Tensor, ...]:
        results = XLA._run_cached_graph(self._hash, self._parameters)
        for owner, new in zip(self._changed, results, strict=False):
            take(owner, new)
        made = iter(results[len(self._changed) :])
        return tuple(next(made) if t is None else t for t in self._outputs)


def take(owner: Tensor, new: Tensor) -> None:
    """Let `owner`, and so its views, have the buffer of `new`: nothing is copied."""
    torch._functionalize_replace(owner, torch._from_functional_tensor(new))
    torch._functionalize_commit_update(owner)
    torch._functionalize_sync(owner)


def owner_of(t: Tensor) -> Tensor:
    """The tensor of which `t` is a view, at last; itself if it is none."""
    return t if t._base is None else t._base


def of_standin(t: Tensor, standin: Tensor) -> Tensor:
    """`t`, of the stand-in of its owner."""
    return standin if t._base is None else t._view_func_unsafe(standin)


def fallbacks() -> dict[str, int]:
    """How often each operator was computed on the host so far."""
    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
