"""The plugin API as data: every hook, Protocol and dataclass of `octavo.plugin`, with signatures and defaults, and what
the modules beside it export.

    python -m octavo.testing.api_snapshot > tests/contract/api_snapshot.json

A test compares the file with the code, so that no change of the API goes unseen. An addition raises the minor number of
`PLUGIN_API` (before 1.0 is frozen: when a release is made), a removal or a new meaning the major one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from typing import Any

import octavo.plugin
from octavo.plugin import hookspecs
from octavo.plugin.version import PLUGIN_API

MODULES = ("models", "parsers", "recording", "torch")
"""The modules of the door that are imported by their own names: all that their `__all__` lists."""


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
        "modules": {name: exports(name) for name in MODULES},
    }


def exports(module: str) -> dict[str, Any]:
    """What a module of the door exports: functions by signature, classes by members, other values by their type."""
    found = importlib.import_module(f"octavo.plugin.{module}")
    return {name: exported(getattr(found, name)) for name in sorted(found.__all__)}


def exported(value: Any) -> Any:
    """One exported name, as data."""
    if not inspect.isclass(value):
        return signature(value) if inspect.isfunction(value) else type(value).__name__
    if dataclasses.is_dataclass(value):
        return methods(value) | fields(value)
    if issubclass(value, tuple):
        return {name: str(kind) for name, kind in inspect.get_annotations(value).items()} | methods(value)
    return members(value) if getattr(value, "_is_protocol", False) else methods(value, "__init__", "__call__")


def methods(cls: type, *special: str) -> dict[str, str]:
    """Public methods and properties of a class, its parents' included, and the special ones named."""
    found = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        plain = value.fget if isinstance(value, property) else value
        public = not name.startswith("_") or name in special
        if public and inspect.isfunction(plain) and ours(plain):
            found[name] = f"{'property' if plain is not value else ''}{signature(plain)}"
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


def signature(function: Any) -> str:
    """A signature as it is written: annotations unquoted, a default that is a function by its name."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(default=Written(parameter.default.__name__))
        if inspect.isfunction(parameter.default)
        else parameter
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters)).replace("'", "")


class Written(str):
    """Text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def ours(function: Any) -> bool:
    """Whether a method was written by us: typing puts an __init__ of its own into Protocols."""
    return bool(function.__module__.startswith("octavo"))


def fields(cls: type) -> dict[str, str]:
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
        found[field.name] = f"{field.type}{default}"
    return found


def named_set(value: frozenset[str]) -> str:
    """A set in sorted order: its own order differs between runs."""
    return f" = {{{', '.join(map(repr, sorted(value)))}}}"


if __name__ == "__main__":
    print(json.dumps(snapshot(), indent=2))
