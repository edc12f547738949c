"""What of an older plugin API a newer one no longer offers, from their snapshots (`octavo.testing.api_snapshot`).

What plugins call or make may grow by what has a default. What core calls in plugins stays as it is: hooks aside, whose
new arguments an old plugin just does not take, nobody gives an old plugin's class a new method.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

CALLED_BY_PLUGINS = frozenset({"ExtensionRegistry", "KernelRegistry", "WorkerView"})
"""Protocols that core implements; plugins implement the others."""


def breaks(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """One line for each thing that a plugin for `old` may rely on and `new` does not keep."""
    yield from (f"{name} is no longer exported" for name in old["names"] if name not in new["names"])
    for section in ("hooks", "protocols", "dataclasses", "modules", "triton", "ops"):
        for name, was in old[section].items():
            if name in new[section]:
                yield from SECTIONS[section](name, was, new[section][name])
            else:
                yield f"{section}: {name} is gone"
    fresh = [name for name in new["hooks"] if name not in old["hooks"]]
    yield from (f"hook {name} is new and mandatory" for name in fresh if new["hooks"][name]["mandatory"])


def hook(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    same = all(new[fact] == old[fact] for fact in ("mandatory", "firstresult"))
    if not same or not grown(old["signature"], new["signature"], needs_default=False):
        yield f"hook {name} was {old}, is {new}"


def protocol(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    if name in CALLED_BY_PLUGINS:
        yield from narrowed(name, old, new, made=False)
    elif different := sorted(member for member in {*old, *new} if old.get(member) != new.get(member)):
        yield f"protocol {name}, which plugins implement, has changed: {', '.join(different)}"


def op(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if new["signature"] != old["signature"]:
        yield f"op {name}, which plugins implement, was {old['signature']}, is {new['signature']}"
    for fact in ("params", "given_up"):
        yield from (f"op {name}: {fact} has no {key} any more" for key in old[fact] if key not in new[fact])


def narrowed(where: str, old: Mapping[str, Any], new: Mapping[str, Any], *, made: bool) -> Iterator[str]:
    """Members of a class, or exports of a module, that are gone or take less. made: plugins make instances of it, so
    that a new field needs a default."""
    for name, was in old.items():
        now = new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from narrowed(f"{where}.{name}", was, now, made=True)
        elif now != was and not (is_call(was) and is_call(now) and grown(was, now)):
            yield f"{where}.{name} was {was}, is {now or 'gone'}"
    if made:
        fresh = [name for name, text in new.items() if name not in old and not is_call(text)]
        yield from (f"{where}.{name} is new and has no default" for name in fresh if " = " not in new[name])


SECTIONS: Mapping[str, Callable[[str, Any, Any], Iterator[str]]] = {
    "hooks": hook,
    "protocols": protocol,
    "dataclasses": partial(narrowed, made=True),
    "modules": partial(narrowed, made=False),
    "triton": partial(narrowed, made=False),
    "ops": op,
}


def is_call(text: Any) -> bool:
    """Whether a member is a function, as its snapshot shows it; else it is a field or a value."""
    return isinstance(text, str) and text.startswith(("(", "classmethod(", "property("))


def grown(old: str, new: str, *, needs_default: bool = True) -> bool:
    """Whether every call by signature `old` means the same by `new`. needs_default: of new arguments."""
    (old_kind, was), (new_kind, now) = parsed(old), parsed(new)
    old_row, new_row = positional(was.args), positional(now.args)
    old_named, new_named = named(was.args), named(now.args)
    fresh = [*new_row[len(old_row) :], *(text for text in new_named if text not in old_named)]
    return (
        (old_kind, returned(was), starred(was.args)) == (new_kind, returned(now), starred(now.args))
        and new_row[: len(old_row)] == old_row
        and set(old_named) <= set(new_named)
        and (not needs_default or all(" = " in text for text in fresh))
    )


def parsed(text: str) -> tuple[str, ast.FunctionDef]:
    """("classmethod", "property" or "", the function that a signature is of)."""
    kind, _, rest = text.partition("(")
    [function] = ast.parse(f"def f({rest}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return kind, function


def positional(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    return [written(arg, default) for arg, default in zip(plain, defaults, strict=True)]


def named(args: ast.arguments) -> list[str]:
    return [written(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]


def written(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default else "")


def starred(args: ast.arguments) -> list[str]:
    return [ast.unparse(arg) for arg in (args.vararg, args.kwarg) if arg]


def returned(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns else ""
