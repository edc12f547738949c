"""The patch detector: does loading a platform change anything that is not its own?

    python -m octavo.testing.conformance.patches NAME      prints the changed names as a JSON list

Takes the identity of every attribute of octavo's modules and classes, and of torch's public callables, before the
platform is opened and after it has registered its kernels. Runs in a process of its own, which has loaded no plugin.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import types
from typing import Any

import octavo

TORCH = ("torch", "torch.nn.functional", "torch.accelerator", "torch.distributed", "torch.library", "torch:Tensor")
KIT = "octavo.testing.conformance"
BOOKKEEPING = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__non_callable_proto_members__", "_abc_impl"}
"""What Python itself writes into classes while they are used."""


def snapshot() -> dict[str, object]:
    """Dotted name -> the object itself (kept alive, so that identities stay unique)."""
    found: dict[str, object] = {}
    for name in octavo_modules():
        module = sys.modules[name]
        for attribute, value in vars(module).items():
            # Importing a submodule sets it as an attribute of its package: that is no patch.
            if not attribute.startswith("__") and not isinstance(value, types.ModuleType):
                note(found, f"{name}.{attribute}", value, home=name)
    for name in TORCH:
        home, _, cls = name.partition(":")
        owner: Any = importlib.import_module(home)
        owner = getattr(owner, cls) if cls else owner
        for attribute, value in vars(owner).items():
            if not attribute.startswith("_") and callable(value):
                found[f"{name}.{attribute}"] = value
    return found


def note(found: dict[str, object], name: str, value: object, *, home: str) -> None:
    """Record a value with what can be swapped inside it: a function's code, a class's attributes, a dict's entries."""
    found[name] = value
    if isinstance(value, types.FunctionType):
        found[f"{name}.__code__"] = value.__code__
    elif isinstance(value, type) and value.__module__ == home:
        for attribute, member in vars(value).items():
            if attribute not in BOOKKEEPING:
                found[f"{name}.{attribute}"] = member
                code = getattr(member, "__code__", None)
                if code is not None:
                    found[f"{name}.{attribute}.__code__"] = code
    elif isinstance(value, dict):
        for key, member in value.items():
            found[f"{name}[{key!r}]"] = member


def octavo_modules() -> list[str]:
    """Names of all loaded modules of octavo, the kit aside."""
    return [
        name
        for name, module in sys.modules.items()
        if module is not None and (name == "octavo" or name.startswith("octavo.")) and not name.startswith(KIT)
    ]


def import_everything() -> None:
    """Import all of octavo, so that nothing can be patched unseen. Modules whose optional parts are missing are left
    out: the platform cannot have them loaded either."""
    for module in pkgutil.walk_packages(octavo.__path__, "octavo.", onerror=lambda name: None):
        if not module.name.startswith((KIT, "octavo.testing.refdev")) and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(f"not looked at: {module.name} ({error})", file=sys.stderr)
    for name in TORCH:
        importlib.import_module(name.partition(":")[0])


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Names that were replaced or removed anywhere, or added to octavo."""
    replaced = [name for name, value in before.items() if name not in after or after[name] is not value]
    added = [name for name in after if name not in before and name.startswith("octavo")]
    return sorted({*replaced, *added})


def detect(name: str) -> list[str]:
    """Open platform `name` in this process and say what that changed."""
    from octavo.testing.conformance.settings import Settings
    from octavo.testing.conformance.subject import Subject

    import_everything()
    loaded = set(octavo_modules())
    before = snapshot()
    subject = Subject(name, Settings())
    list(subject.ops())
    fresh = set(octavo_modules()) - loaded
    after = {k: v for k, v in snapshot().items() if not any(k.startswith(f"{module}.") for module in fresh)}
    return changes(before, after)


if __name__ == "__main__":
    print(json.dumps(detect(sys.argv[1])))
