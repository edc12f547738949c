"""The table of kernels keeps the names of those who wrote them apart."""

from __future__ import annotations

from typing import Any

import pytest

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.errors import ConfigError
from octavo.ops.attention import ReferenceAttention
from octavo.ops.bind import KernelTable
from octavo.ops.linear import ReferenceLinear
from octavo.ops.moe import ReferenceMoE


def test_an_op_kernel_may_not_call_itself_the_reference() -> None:
    table = KernelTable()
    with pytest.raises(ConfigError, match=r"^registry\.op\('greedy'\): provider 'reference' is core's own"):
        table.op("greedy", lambda logits: logits.argmax(-1), provider="reference", priority=99)
    assert table.providers("greedy") == []


@pytest.mark.parametrize(
    ("family", "cls"), [("attention", ReferenceAttention), ("linear", ReferenceLinear), ("moe", ReferenceMoE)]
)
def test_a_kernel_class_may_not_keep_the_name_of_the_reference_that_it_extends(family: str, cls: type[Any]) -> None:
    table, own = KernelTable(), type("Own", (cls,), {})
    with pytest.raises(ConfigError, match=rf"^registry\.{family}\(Own\): provider 'reference' is core's own"):
        getattr(table, family)(own)
    own.name = "own"
    getattr(table, family)(own)
    assert table.classes(family) == [own]
