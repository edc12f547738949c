"""The op catalogue: name -> definition. Each op has a plain-PyTorch reference, sample inputs and tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OpDef:
    """One op.

    reference: the plain-PyTorch function; its docstring is the op's contract (shapes, units, in-place or not).
    samples: (dtype) -> argument tuples that cover its shapes, for conformance tests; made with a fixed seed.
    tolerance: absolute and relative error allowed against the float32 reference, by dtype name.
    params: sample arguments -> what a model says of them when it binds the op (`OpContext.params`).
    given_up: names of arguments that the caller does not read again, so that a kernel may leave anything in them.
    parts: for a composite, names of the ops it is made of; then `reference(ops, ...)` takes them, bound, first.
    """

    name: str
    reference: Callable[..., Any]
    samples: Callable[[str], Iterable[tuple[Any, ...]]]
    tolerance: Mapping[str, float] = field(default_factory=dict)
    params: Callable[[tuple[Any, ...]], Mapping[str, object]] = lambda sample: {}
    given_up: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Names of the op's arguments, in order."""
        return list(signature(self.reference).parameters)[bool(self.parts) :]

    def build(self, bound: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The reference of a composite over bound parts."""
        from functools import partial
        from types import SimpleNamespace

        return partial(self.reference, SimpleNamespace(**bound))


DEFAULT_TOLERANCE: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

CATALOGUE: dict[str, OpDef] = {}


def define(op: OpDef) -> OpDef:
    """Add an op to the catalogue."""
    assert op.name not in CATALOGUE, f"op {op.name} is defined twice"
    CATALOGUE[op.name] = op
    return op


def reference(name: str) -> Callable[..., Any]:
    """The reference of an op as a plain function of its arguments; a composite's is made of its parts' references."""
    op = CATALOGUE[name]
    return op.build({part: reference(part) for part in op.parts}) if op.parts else op.reference
