"""The plugin API as data: every hook, Protocol and dataclass of `octavo.plugin`, with signatures and defaults, what the
modules beside it and those of `octavo.triton` give to plugins, and the ops.

    python -m octavo.testing.api_snapshot > tests/compat/plugin_api_1_0/api_snapshot.json

There is a file for each version, and none of them changes once its version is published. A test compares the newest
with the code, so that no change of the API goes unseen: an addition raises the minor number of `PLUGIN_API`, a removal
or a new meaning the major one. Another looks whether the versions that are still served are still offered.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterable
from typing import Any

import octavo.ops  # (fills the catalogue)
import octavo.plugin
from octavo.ops.catalogue import CATALOGUE, OpDef
from octavo.plugin import hookspecs
from octavo.plugin.version import PLUGIN_API

MODULES = ("models", "parsers", "recording", "torch")
"""The modules of the door that are imported by their own names: all that their `__all__` lists."""

TRITON = {
    "activation": ("act_and_mul",),
    "attention_backend": ("TritonAttention",),
    "attention_tuning": ("AttentionTuning", "DecodeCut"),
    "attention_write": ("kv_write",),
    "gemv": ("INTERPRETED", "GemvConfig", "default_config"),
    "int4": ("Int4Config", "pack"),
    "linear_fp8": ("Fp8Linear",),
    "linear_int4": ("Int4Linear", "PackedInt4"),
    "linear_plain": ("TorchLinear", "TritonLinear", "few_tokens_refusal", "refusal"),
    "linear_tuning": ("ProductTuning",),
    "ops": ("register_ops",),
    "overlap": ("IN_ORDER", "Overlap"),
    "skinny": ("SkinnyConfig",),
}
"""Module of `octavo.triton` -> what platforms import of it; the rest is its own. Values of defaults are left out: they
are tuning."""


def snapshot() -> dict[str, Any]:
    """The whole API, plain data with sorted keys."""
    exported = {name: getattr(octavo.plugin, name) for name in sorted(octavo.plugin.__all__)}
    classes = {name: value for name, value in exported.items() if inspect.isclass(value)}
    protocols = {name: cls for name, cls in classes.items() if getattr(cls, "_is_protocol", False)}
    data = {name: cls for name, cls in classes.items() if dataclasses.is_dataclass(cls)}
    return {
        "api": ".".join(map(str, PLUGIN_API)),
        "names": sorted(exported),
        "hooks": {name: hook(function) for name, function in hooks().items()},
        "protocols": {name: members(cls) for name, cls in protocols.items()},
        "dataclasses": {name: fields(cls) for name, cls in data.items()},
        "modules": {name: exports(f"octavo.plugin.{name}") for name in MODULES},
        "triton": {name: exports(f"octavo.triton.{name}", names, values=False) for name, names in TRITON.items()},
        "ops": {name: op(definition) for name, definition in sorted(CATALOGUE.items())},
    }


def exports(module: str, names: Iterable[str] | None = None, *, values: bool = True) -> dict[str, Any]:
    """What a module gives, by default all of its `__all__`: functions by signature, classes by members, other values by
    their type."""
    found = importlib.import_module(module)
    return {name: exported(getattr(found, name), values=values) for name in sorted(names or found.__all__)}


def op(definition: OpDef) -> dict[str, Any]:
    """One op as a kernel of it sees it: its arguments, those it may overwrite, and the keys of `OpContext.params`."""
    found = inspect.signature(definition.reference)
    called = found.replace(parameters=[found.parameters[name] for name in definition.arguments])
    return {
        "signature": str(called).replace("'", ""),
        "given_up": sorted(definition.given_up),
        "params": sorted({key for sample in definition.samples("float32") for key in definition.params(sample)}),
    }


def exported(value: Any, *, values: bool = True) -> Any:
    """One exported name, as data. values: with those of defaults."""
    if not inspect.isclass(value):
        return signature(value, values=values) if inspect.isfunction(value) else type(value).__name__
    if dataclasses.is_dataclass(value):
        return methods(value, values=values) | fields(value, values=values)
    if issubclass(value, tuple):
        return {name: str(kind) for name, kind in inspect.get_annotations(value).items()} | methods(value)
    return (
        members(value)
        if getattr(value, "_is_protocol", False)
        else methods(value, "__init__", "__call__", values=values)
    )


def methods(cls: type, *special: str, values: bool = True) -> dict[str, str]:
    """Public methods and properties of a class, its parents' included, and the special ones named."""
    found = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        kind = {property: "property", classmethod: "classmethod"}.get(type(value), "")
        plain = value.fget if kind == "property" else getattr(value, "__func__", value)
        public = not name.startswith("_") or name in special
        if public and inspect.isfunction(plain) and ours(plain):
            found[name] = f"{kind}{signature(plain, values=values)}"
    return found


def hooks() -> dict[str, Any]:
    """The hook specs by name, in the order in which they are written."""
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


def hook(function: Any) -> dict[str, Any]:
    """One hook: its signature, whether it must be there, and whether the first answer wins."""
    return {
        "signature": signature(function),
        "mandatory": function.__name__ in hookspecs.MANDATORY,
        "firstresult": bool(getattr(function, f"{hookspecs.PROJECT}_spec")["firstresult"]),
    }


def members(protocol: type) -> dict[str, str]:
    """Attributes and methods of a Protocol with their types or signatures."""
    found = {name: str(kind) for name, kind in vars(protocol).get("__annotations__", {}).items()}
    for name, value in vars(protocol).items():
        plain = value.__func__ if isinstance(value, classmethod) else value
        if isinstance(plain, property):
            found[name] = f"property{signature(plain.fget)}"
        elif inspect.isfunction(plain) and (not name.startswith("_") or (name == "__init__" and ours(plain))):
            kind = "classmethod" if isinstance(value, classmethod) else ""
            found[name] = f"{kind}{signature(plain)}"
    return dict(sorted(found.items()))


def signature(function: Any, *, values: bool = True) -> str:
    """A signature as it is written: annotations unquoted, a default that is a function by its name."""

    def shown(parameter: inspect.Parameter) -> inspect.Parameter:
        if not values and parameter.default is not inspect.Parameter.empty:
            return parameter.replace(default=Written("..."))
        if inspect.isfunction(parameter.default):
            return parameter.replace(default=Written(parameter.default.__name__))
        return parameter

    found = inspect.signature(function)
    parameters = [shown(parameter) for parameter in found.parameters.values()]
    return str(found.replace(parameters=parameters)).replace("'", "")


class Written(str):
    """Text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def ours(function: Any) -> bool:
    """Whether a method was written by us: typing puts an __init__ of its own into Protocols."""
    return bool(function.__module__.startswith("octavo"))


def fields(cls: type, *, values: bool = True) -> dict[str, str]:
    """Fields of a dataclass: type, and default if there is one."""
    found = {}
    for field in dataclasses.fields(cls):
        default = ""
        if inspect.isfunction(field.default):
            default = f" = {field.default.__name__}"
        elif field.default is not dataclasses.MISSING:
            default = f" = {field.default!r}" if not isinstance(field.default, frozenset) else named_set(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = f" = {getattr(field.default_factory, '__name__', 'factory')}()"
        found[field.name] = f"{field.type}{default if values or not default else ' = ...'}"
    return found


def named_set(value: frozenset[str]) -> str:
    """A set in sorted order: its own order differs between runs."""
    return f" = {{{', '.join(map(repr, sorted(value)))}}}"


if __name__ == "__main__":
    print(json.dumps(snapshot(), indent=2))
