"""The patch detector: does loading a platform, or serving with it, change anything that is not its own?

    python -m octavo.testing.conformance.patches NAME [--no-device]      prints what `detect` finds as JSON

Takes the identity of every attribute of octavo's modules and classes, and of the public functions and methods of torch
and Triton, before the platform is opened, after it has registered its kernels, and after a tiny model has answered a
request on it. Runs in a process of its own, which has loaded no plugin.

A package that gives torch a device (`PlatformInfo.backend`) may change torch: what it put there is told apart by the
files that the code comes from, as names are easily given.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import octavo
from octavo.errors import OctavoError

FOREIGN = ("torch", "torch.nn.functional", "torch.distributed", "triton", "triton.language")
"""Looked at besides the modules right below `torch`, which hold every backend's own (`torch.<type>`)."""
KIT = "octavo.testing.conformance"
BOOKKEEPING = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__non_callable_proto_members__", "_abc_impl"}
"""What Python itself writes into classes while they are used."""
HAVE_INSIDE = (types.FunctionType, type)
WRITTEN_IN_PYTHON = re.compile(r"(torch|triton)\b(?!\._C\b)")
"""Homes of what is looked into: a backend's library goes on filling the classes that torch's own library makes."""


def snapshot() -> dict[str, object]:
    """Dotted name -> the object itself (kept alive, so that identities stay unique)."""
    found: dict[str, object] = {}
    for name in octavo_modules():
        for attribute, value in vars(sys.modules[name]).items():
            # Importing a submodule sets it as an attribute of its package: that is no patch.
            if not attribute.startswith("__") and not isinstance(value, types.ModuleType):
                note(found, f"{name}.{attribute}", value)
                # The inside of octavo's own is looked at where it is defined, not again at each import.
                if isinstance(value, HAVE_INSIDE) and value.__module__ == name:
                    look_inside(found, f"{name}.{attribute}", value)
    for name in foreign_modules():
        for attribute, value in vars(sys.modules[name]).items():
            if callable(value) and not attribute.startswith("_"):
                found[f"{name}.{attribute}"] = value
                if isinstance(value, HAVE_INSIDE) and WRITTEN_IN_PYTHON.match(str(value.__module__)):
                    # By the name that it has itself, as what it is found by changes when more of torch is loaded.
                    look_inside(found, f"{value.__module__}.{value.__qualname__}", value)
    return found


def note(found: dict[str, object], name: str, value: object) -> None:
    """Record a value and, of a dict, the entries."""
    found[name] = value
    if isinstance(value, dict):
        # Not its own `items`: transformers' registry imports all its models to answer that.
        for key, member in dict.items(value):
            found[f"{name}[{key!r}]"] = member


def look_inside(found: dict[str, object], name: str, value: types.FunctionType | type) -> None:
    """Record what can be swapped inside a function or class: code and defaults, attributes and methods.

    "(name)" stands for the whole: if that is no longer found, no more is its inside.
    """
    if f"({name})" in found:
        return
    found[f"({name})"] = value
    if isinstance(value, types.FunctionType):
        note_function(found, name, value)
    else:
        for attribute, member in vars(value).items():
            private = attribute.startswith("_") and not attribute.startswith("__") and not name.startswith("octavo")
            if attribute not in BOOKKEEPING and not private:
                found[f"{name}.{attribute}"] = member
                note_function(found, f"{name}.{attribute}", getattr(member, "__func__", member))


def note_function(found: dict[str, object], name: str, function: object) -> None:
    if isinstance(function, types.FunctionType):
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            note(found, f"{name}.{part}", getattr(function, part))


def octavo_modules() -> list[str]:
    """Names of all loaded modules of octavo, the kit aside."""
    return [
        name
        for name, module in sys.modules.items()
        if module is not None and (name == "octavo" or name.startswith("octavo.")) and not name.startswith(KIT)
    ]


def foreign_modules() -> list[str]:
    """Names of the loaded modules of torch and Triton whose public functions and classes are looked at."""
    below = [name for name in sys.modules if name.startswith("torch.") and name.count(".") == 1 and "._" not in name]
    return [name for name in dict.fromkeys([*FOREIGN, *below]) if sys.modules.get(name) is not None]


def import_everything() -> None:
    """Import all of octavo, so that nothing can be patched unseen. Modules whose optional parts are missing are left
    out: the platform cannot have them loaded either."""
    for module in pkgutil.walk_packages(octavo.__path__, "octavo.", onerror=lambda name: None):
        if not module.name.startswith((KIT, "octavo.testing.refdev")) and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(f"not looked at: {module.name} ({error})", file=sys.stderr)
    for name in FOREIGN:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # torch changes itself (torch.jit) when it compiles for the first time: let it do so now.
    import torch

    torch.compile(torch.neg, backend="eager")(torch.zeros(1))


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Names that were replaced or removed anywhere, added to octavo, or put before what a class of torch or Triton had
    inherited. Of what was replaced its inside is no news."""
    replaced = {name for name, value in before.items() if name not in after or after[name] is not value}
    added = {name for name in after.keys() - before.keys() if name.startswith("octavo") or hides(name, before)}
    names = replaced | added
    return sorted(
        name for name in names if not name.startswith("(") and not any(whole in names for whole in wholes(name))
    )


def hides(name: str, before: dict[str, object]) -> bool:
    """Whether a new name stands in a class, before one that a base of it has."""
    owner, _, attribute = name.rpartition(".")
    cls = before.get(f"({owner})")
    return isinstance(cls, type) and any(attribute in vars(base) for base in cls.__mro__[1:])


def wholes(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a.b", "(a.b)", "a", "(a)"."""
    while name := name.rpartition(".")[0]:
        yield from (name, f"({name})")


def made_by(packages: Sequence[str], value: object) -> bool:
    """Whether a function or class was written in these packages: all of its code, but for torch's own that it wraps.

    A function of the plugin that a backend's decorator only wraps is not the backend's.
    """
    files = [Path(code.co_filename) for code in codes(value, set())]
    theirs = [any(file.is_relative_to(folder) for folder in map(folder_of, packages)) for file in files]
    torch = folder_of("torch")
    return any(theirs) and all(one or file.is_relative_to(torch) for one, file in zip(theirs, files, strict=True))


def folder_of(package: str) -> Path:
    """Where an imported package lies; nowhere if it is not imported, as then it wrote nothing."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return Path(file).parent if file else Path("/nowhere")


UNSET = types.CellType()
"""A variable of an outer function that holds nothing yet."""


def codes(value: object, seen: set[int]) -> list[types.CodeType]:
    """The code of a function and of those in its closure; of a class that of its methods. Nothing else has code."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != UNSET]
        return [value.__code__, *(code for one in held for code in codes(one, seen))]
    if isinstance(value, classmethod | staticmethod):
        return codes(value.__func__, seen)
    if isinstance(value, property):
        return [code for part in (value.fget, value.fset, value.fdel) for code in codes(part, seen)]
    if isinstance(value, type):
        return [code for member in vars(value).values() for code in codes(member, seen)]
    return []


def detect(name: str, *, no_device: bool = False) -> dict[str, Any]:
    """Open platform `name` in this process and serve one request on it. no_device: ask it only what needs no device.

    loading, serving: names that this changed; backend: names in torch that the platform's backend changed, as it may;
    error: why the request could not be served, or "".
    """
    from octavo.testing.conformance.settings import Settings
    from octavo.testing.conformance.subject import Subject
    from octavo.testing.tiny import make_model

    with tempfile.TemporaryDirectory() as folder:
        # Before anything of the platform is imported, so that what this loads is seen in its own state.
        make_model(Path(folder), "llama", tokenizer=False)
        import_everything()
        ours = set(octavo_modules())

        def look() -> dict[str, object]:
            fresh = set(octavo_modules()) - ours
            return {k: v for k, v in snapshot().items() if not any(k.startswith(f"{module}.") for module in fresh)}

        before = look()
        subject = Subject(name, Settings(), no_device=no_device)
        subject.platform.launch(subject.config)
        if not no_device:
            list(subject.ops())
        loaded = look()
        error = "" if no_device else serve_one(subject, Path(folder))
        served = look()
    packages = subject.platform.info.backend
    loading, made_then = told_apart(changes(before, loaded), loaded, packages)
    serving, made_later = told_apart(changes(loaded, served), served, packages)
    return {"loading": loading, "serving": serving, "backend": sorted({*made_then, *made_later}), "error": error}


def told_apart(names: Sequence[str], after: dict[str, object], packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names that nobody may change, names in torch where these packages put something of theirs)."""
    theirs = [
        name for name in names if not name.startswith("octavo") and name in after and made_by(packages, after[name])
    ]
    return [name for name in names if name not in theirs], theirs


def serve_one(subject: Any, folder: Path) -> str:
    """Let the model answer a request. "" or what went wrong: whatever was patched may well show here, and is said."""
    from octavo.testing.conformance.engines import GREEDY, engine

    try:
        with engine(subject, folder) as llm:
            llm.generate([[17, 18, 19]], GREEDY, use_tqdm=False)
    except OctavoError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    print(json.dumps(detect(sys.argv[1], no_device="--no-device" in sys.argv[2:])))
