"""Whether another package's attention can be trusted with a kind of layer: it must agree with plain attention.

Asked once per backend, kind and card, before the backend is chosen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, Device, start_step

TOLERANCE = 2e-2
LENS = ((((37, 1), (5, 1), (130, 1)), 2, 2), (((20, 1), (0, 9), (16, 33)), 5, 1))
"""A decode step and a mixed one: (context, new tokens) of each sequence, padding tokens, padding sequences."""


@cache
def objection(backend_class: type[Any], spec: AttentionSpec, device: Device) -> str:
    """Why the backend must not serve layers of this kind; empty if it agrees with plain attention.

    Its class says by `load` what it needs from its package, and `load` raises if that is not there.
    """
    from octavo.testing.conformance import paged

    try:
        backend_class.load()
    except Exception as error:  # whatever breaks in the other package is a reason to do without it
        return f"it cannot be loaded: {first_line(error)}"
    layout = backend_class.kv_layout(paged.kv_spec_of(spec))
    limits = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=256)
    for lens, pad_tokens, pad_seqs in LENS:
        case = paged.Case(spec=spec, lens=lens, pad_tokens=pad_tokens, pad_seqs=pad_seqs)
        inputs = paged.build(case, layout, device)
        out = torch.empty_like(inputs.q)
        try:
            with device.inference():
                backend = backend_class(spec, limits, device)
                plan = backend.plan(inputs.batch, graph=False)
                start_step(backend, plan)
                layer = AttnLayer(index=0, sinks=inputs.sinks)
                backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
                found = out.cpu().float()
        except Exception as error:
            return f"it fails its self-test: {first_line(error)}"
        if found.isnan().any():
            return f"it fails its self-test: NaN on {lens}"
        difference = (found[: case.num_tokens] - paged.dense(case, inputs)).abs().max().item()
        if difference > TOLERANCE:
            return f"it fails its self-test: off by {difference:.3g} on {lens}"
    return ""


def first_line(error: Exception) -> str:
    """The error in one line, also if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
