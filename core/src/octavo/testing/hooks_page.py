"""The page docs/hooks.md: all that a plugin may implement, from the code itself."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import ModuleType

import octavo.plugin
from octavo.testing.api_snapshot import hooks, signature, snapshot


def hooks_page() -> str:
    """Hooks, then behaviour (Protocols), then data, each with its contract."""
    api = snapshot()
    lines = [
        "# The plugin API",
        "",
        f"Version {api['api']}. A platform is a module of functions marked `@hookimpl`; a hook may take fewer",
        "arguments than listed here, by name. How to start: [writing a plugin](writing-a-plugin.md). Everything is",
        "imported from `octavo.plugin`.",
        "",
        "## Hooks",
        "",
    ]
    for name, function in hooks().items():
        facts = api["hooks"][name]
        lines += [f"### `{name}`", "", "```python", f"def {name}{facts['signature']}: ...", "```", ""]
        lines += [inspect.getdoc(function) or "", ""]
    lines += ["## Behaviour", "", "Protocols: any class with these members will do; none has to be inherited from.", ""]
    for name, members in api["protocols"].items():
        lines += [f"### `{name}`", "", inspect.getdoc(getattr(octavo.plugin, name)) or "", "", "```python"]
        lines += [member_line(member, text) for member, text in members.items()]
        lines += ["```", ""]
        lines += contracts(getattr(octavo.plugin, name))
    lines += ["## Data", "", "Frozen dataclasses, made with keywords. A field with a default may be left out.", ""]
    for name, fields in api["dataclasses"].items():
        lines += [f"### `{name}`", "", inspect.getdoc(getattr(octavo.plugin, name)) or "", "", "```python"]
        lines += [f"{field}: {text}" for field, text in fields.items()]
        lines += ["```", ""]
    lines += ["## Modules", "", "Beside `octavo.plugin`, imported by name.", ""]
    for module, names in api["modules"].items():
        found = importlib.import_module(f"octavo.plugin.{module}")
        lines += [f"### `octavo.plugin.{module}`", "", inspect.getdoc(found) or "", ""]
        lines += [f"- {line}" for line in map(partial(exported_line, found), names)]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def exported_line(module: ModuleType, name: str) -> str:
    """A name that a module exports, with the first sentence of what is said of it."""
    value = getattr(module, name)
    shown = f"{name}{signature(value)}" if inspect.isfunction(value) else name
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return f"`{shown}`"
    return f"`{shown}`: {(inspect.getdoc(value) or '').split(chr(10) * 2)[0].replace(chr(10), ' ')}"


def member_line(name: str, text: str) -> str:
    """A member as it would be written in a class."""
    for prefix in ("classmethod", "property"):
        if text.startswith(f"{prefix}("):
            return f"@{prefix}\ndef {name}{text.removeprefix(prefix)}: ..."
    return f"def {name}{text}: ..." if text.startswith("(") else f"{name}: {text}"


def contracts(protocol: type) -> list[str]:
    """What is said of single methods."""
    lines = []
    for name, value in vars(protocol).items():
        if inspect.isfunction(value) and name != "__init__" and (text := inspect.getdoc(value)):
            lines += [f"`{name}`: {text}", ""]
    return lines
