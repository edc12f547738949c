"""The table of kernels: plugins register into it, models bind out of it, `octavo explain` prints it.

Order of choice for an op: the user's `--kernel op=provider`, then priority, then the reference. The first that supports
the context wins, and every refusal is kept with its reason. Binding happens while a model is built; what it returns is
a plain callable, so that nothing is dispatched on the step path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError
from octavo.ops.catalogue import CATALOGUE
from octavo.ops.gated import TwoSteps, asked_of
from octavo.plugin.contracts import Device, always
from octavo.plugin.data import Support
from octavo.plugin.specs import AttentionSpec, BatchLimits, LinearSpec, MoESpec, OpContext

REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One registered implementation of an op."""

    fn: Callable[..., Any]
    provider: str
    priority: int
    supports: Callable[[OpContext], Support]
    inplace: bool
    graph_safe: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was bound for one op or kernel in one context, and why not the others. why: what the kernel says itself."""

    what: str
    context: str
    provider: str
    refused: tuple[tuple[str, str], ...]
    why: str = ""


@dataclass
class KernelTable:
    """Implements `octavo.plugin.KernelRegistry`. `forced`: op or family -> provider, from the user.

    packs: name of a kernel pack -> the table of what it brought, all of which is here too.
    broken_packs: what is wrong with kernel packs that were left out; said when a kernel asked for is not there.
    """

    forced: Mapping[str, str] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    packs: dict[str, KernelTable] = field(default_factory=dict)
    broken_packs: list[str] = field(default_factory=list)
    _ops: dict[str, list[Provider]] = field(default_factory=dict)
    _classes: dict[str, list[tuple[int, type[Any]]]] = field(default_factory=dict)
    _bound: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)
    _linear: dict[LinearSpec, Any] = field(default_factory=dict)

    # -- registration (the public KernelRegistry contract) --

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
    ) -> None:
        if name not in CATALOGUE:
            raise ConfigError(f"{provider} registers unknown op {name!r}; known: {', '.join(sorted(CATALOGUE))}")
        refuse_reference(f"registry.op({name!r})", provider)
        entry = Provider(
            fn=fn, provider=provider, priority=priority, supports=supports, inplace=inplace, graph_safe=graph_safe
        )
        self._ops.setdefault(name, []).append(entry)

    def attention(self, cls: type[Any], *, priority: int = 0) -> None:
        self._add("attention", cls, priority)

    def linear(self, cls: type[Any], *, priority: int = 0) -> None:
        self._add("linear", cls, priority)

    def moe(self, cls: type[Any], *, priority: int = 0) -> None:
        self._add("moe", cls, priority)

    def _add(self, family: str, cls: type[Any], priority: int) -> None:
        refuse_reference(f"registry.{family}({cls.__name__})", cls.name)
        self._classes.setdefault(family, []).append((priority, cls))

    def add_all_of(self, other: KernelTable) -> None:
        """Take over every kernel that is registered in `other`, behind those of equal priority that are here."""
        for name, providers in other._ops.items():
            self._ops.setdefault(name, []).extend(providers)
        for family, entries in other._classes.items():
            self._classes.setdefault(family, []).extend(entries)

    # -- binding --

    def providers(self, name: str) -> list[Provider]:
        """The registered providers of an op, best first, the reference not among them."""
        return sorted(self._ops.get(name, []), key=lambda p: -p.priority)

    def classes(self, family: str) -> list[type[Any]]:
        """The registered kernel classes of "attention", "linear" or "moe", best first, the reference not among them."""
        return [cls for _, cls in sorted(self._classes.get(family, []), key=lambda entry: -entry[0])]

    def bind(
        self, name: str, *, dtype: str, device: Device, params: Mapping[str, object] | None = None
    ) -> Callable[..., Any]:
        """The callable for op `name` in this context. A composite's reference receives this table's bound parts."""
        definition = CATALOGUE[name]
        context = OpContext(op=name, dtype=dtype, device_type=device.type, params=dict(params or {}))
        key = (name, (dtype, device.type, tuple(sorted((params or {}).items()))))
        if key in self._bound:
            return self._bound[key]
        forced = self.forced.get(name)
        refused: list[tuple[str, str]] = []
        chosen: Provider | None = None
        for entry in self.providers(name):
            if forced not in (None, entry.provider):
                refused.append((entry.provider, f"--kernel {name}={forced}"))
                continue
            answer = entry.supports(context)
            if answer.ok:
                chosen = entry
                break
            refused.append((entry.provider, answer.reason))
        if chosen is None and forced not in (None, REFERENCE):
            known = [p.provider for p in self.providers(name)] + [REFERENCE]
            reasons = "; ".join(f"{p}: {r}" for p, r in refused if p == forced) or "no such provider"
            raise ConfigError(f"--kernel {name}={forced}: {reasons}; known: {', '.join(known)}{self._left_out()}")
        if chosen is not None:
            fn = chosen.fn
        elif definition.parts:
            # A part may need to know what the whole was told.
            parts = {part: self.bind(part, dtype=dtype, device=device, params=params) for part in definition.parts}
            fn = definition.build(parts)
        else:
            fn = definition.reference
        self._note(name, dtype, chosen.provider if chosen else REFERENCE, refused)
        self._bound[key] = fn
        return fn

    def _pick(
        self, family: str, spec: Any, device: Device, reference: type[Any], make: Callable[[type[Any]], Any]
    ) -> Any:
        forced = self.forced.get(family)
        refused: list[tuple[str, str]] = []
        for cls in [*self.classes(family), reference]:
            if forced not in (None, cls.name):
                refused.append((cls.name, f"--kernel {family}={forced}"))
                continue
            asked = asked_of(cls, spec) if isinstance(spec, LinearSpec) else spec
            answer = cls.supports(asked, device)
            if answer.ok:
                made = make(cls)
                self._note(family, describe(spec), cls.name, refused, why=getattr(made, "why", ""))
                return made
            refused.append((cls.name, answer.reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ConfigError(f"no {family} kernel takes {describe(spec)} ({reasons}){self._left_out()}")

    def attention_backend(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> Any:
        """A new backend instance for the spec."""
        from octavo.ops.attention import ReferenceAttention

        return self._pick("attention", spec, device, ReferenceAttention, lambda cls: cls(spec, limits, device))

    def linear_kernel(self, spec: LinearSpec, device: Device) -> Any:
        """The kernel instance for the spec; equal specs (names aside) share one. A class that does not take the spec's
        gate is asked for the product alone, and the op `act_and_mul` follows."""
        from octavo.ops.linear import ReferenceLinear

        def make(cls: type[Any]) -> Any:
            if asked_of(cls, spec) == spec:
                return cls()
            params = {"kind": spec.gate, "size": spec.out_features // 2}
            act_and_mul = self.bind("act_and_mul", dtype=spec.out_dtype, device=device, params=params)
            return TwoSteps(cls(), act_and_mul, str(spec.gate))

        if spec not in self._linear:
            self._linear[spec] = self._pick("linear", spec, device, ReferenceLinear, make)
        return self._linear[spec]

    def moe_kernel(self, spec: MoESpec, device: Device) -> Any:
        """The expert kernel for the spec."""
        from octavo.ops.moe import ReferenceMoE

        return self._pick("moe", spec, device, ReferenceMoE, lambda cls: cls())

    def _left_out(self) -> str:
        """What to add to the news that a kernel is not there."""
        return "".join(f"; left out: {reason}" for reason in self.broken_packs)

    def _note(self, what: str, context: str, provider: str, refused: list[tuple[str, str]], *, why: str = "") -> None:
        choice = Choice(what=what, context=context, provider=provider, refused=tuple(refused), why=why)
        if choice not in self.choices:
            self.choices.append(choice)


def refuse_reference(registration: str, provider: str) -> None:
    """The name says whose kernel was bound, and tests take what bears it for core's own: nobody else may."""
    if provider == REFERENCE:
        raise ConfigError(f"{registration}: provider {REFERENCE!r} is core's own; give the kernel another name")


def describe(spec: Any) -> str:
    """A spec in a few words, for messages and `octavo explain`."""
    if isinstance(spec, LinearSpec):
        fmt = spec.scheme.packing if spec.scheme else spec.act_dtype
        return f"{spec.out_features}x{spec.in_features} {fmt}{f' {spec.gate}-gated' if spec.gate else ''}"
    if isinstance(spec, AttentionSpec):
        window = f" window {spec.window}" if spec.window else ""
        return f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim} {spec.dtype}, kv {spec.kv_dtype}{window}"
    return str(spec)
