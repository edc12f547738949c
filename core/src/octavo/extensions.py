"""Hardware-neutral additions: models, quantization formats, parsers, by name -> "package.module:Class".

Core's own enter by the same hook, `register_extensions`, as those of the entry-point group `octavo.extensions` and of
the chosen platform.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

from octavo.active_platform import ActivePlatform, Plugin, distribution, entries_of, import_entry
from octavo.errors import ConfigError, PlatformBrokenError, PlatformIncompatibleError
from octavo.plugin.version import refusal

GROUP = "octavo.extensions"
BUILT_IN = (EntryPoint(name="builtin", value="octavo.builtin_extensions", group=GROUP),)


@dataclass
class Extensions:
    """Implements `octavo.plugin.ExtensionRegistry`: name -> "module:Class"; models by model type."""

    models: dict[str, str] = field(default_factory=dict)
    quant_formats: dict[str, str] = field(default_factory=dict)
    logits_processors: dict[str, str] = field(default_factory=dict)
    drafters: dict[str, str] = field(default_factory=dict)
    tool_parsers: dict[str, str] = field(default_factory=dict)
    reasoning_parsers: dict[str, str] = field(default_factory=dict)

    def model(self, model_type: str, target: str) -> None:
        _add(self.models, "model type", model_type, target)

    def quant_format(self, name: str, target: str) -> None:
        _add(self.quant_formats, "quantization format", name, target)

    def logits_processor(self, name: str, target: str) -> None:
        _add(self.logits_processors, "logits processor", name, target)

    def drafter(self, name: str, target: str) -> None:
        _add(self.drafters, "drafter", name, target)

    def tool_parser(self, name: str, target: str) -> None:
        _add(self.tool_parsers, "tool parser", name, target)

    def reasoning_parser(self, name: str, target: str) -> None:
        _add(self.reasoning_parsers, "reasoning parser", name, target)


def load_extensions(platform: ActivePlatform | None = None) -> Extensions:
    """Everything registered: the built-ins, the installed extensions, then the platform's own.

    Raises PlatformBrokenError for an extension that fails, ConfigError when two want the same name.
    """
    registry = Extensions()
    for entry in [*BUILT_IN, *entries_of(GROUP)]:
        register(entry, registry)
    if platform is not None:
        platform.register_extensions(registry)
    return registry


def register(entry: EntryPoint, registry: Extensions) -> None:
    """Let one extension register what it brings. Raises as `load_extensions`."""
    dist, version = distribution(entry) if entry.dist else ("octavo", "built in")
    module = import_entry(entry, dist, version)
    # An extension may say for which plugin API it was written; what core adds later does not change what it uses.
    if (api := getattr(module, "API", None)) is not None and (reason := refusal(str(api))):
        raise PlatformIncompatibleError(f"extension {entry.name!r} ({dist} {version}) cannot be used: {reason}")
    plugin = Plugin(module, entry, dist=dist, version=version)
    if plugin.hooks != {"register_extensions"}:
        raise plugin.broken(f"an extension implements register_extensions only, not {sorted(plugin.hooks)}")
    plugin.call("register_extensions", registry=registry)


def resolve(target: str) -> type:
    """The class that "package.module:Class" names. Raises PlatformBrokenError if it cannot be imported."""
    module, _, name = target.partition(":")
    try:
        found: type = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlatformBrokenError(f"extension {target!r} cannot be imported: {error}") from error
    return found


def _add(table: dict[str, str], what: str, name: str, target: str) -> None:
    module, colon, cls = target.partition(":")
    if not (module and colon and cls):
        raise ConfigError(f"{what} {name!r}: target must look like 'package.module:Class', not {target!r}")
    if table.get(name, target) != target:
        raise ConfigError(f"{what} {name!r} is registered twice: {table[name]} and {target}; uninstall one of them")
    table[name] = target
