"""The language model inside a checkpoint that also sees or hears.

Such checkpoints put the decoder's tensors under a prefix, one of two by their age; the rest belongs to encoders and
projectors, which text alone does not need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.errors import CheckpointError
from octavo.weights.mapped import MappedTensor

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}


def text_part(tensors: Iterable[MappedTensor], *, path: str) -> list[MappedTensor]:
    """The decoder's tensors under the names they have in a text-only checkpoint.

    Raises CheckpointError if there are none."""
    found = [
        replace(tensor, name=ours + tensor.name.removeprefix(theirs))
        for tensor in tensors
        for theirs, ours in PREFIXES.items()
        if tensor.name.startswith(theirs)
    ]
    if not found:
        raise CheckpointError(f"holds no language model: no tensor begins with {' or '.join(PREFIXES)}", path=path)
    return found
