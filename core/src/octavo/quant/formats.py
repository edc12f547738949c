"""Which quantization format a safetensors checkpoint is in, by its `quantization_config`.

Every format is a `octavo.plugin.QuantFormat` registered by name and import path, ours as well as a plugin's, and is
imported when a checkpoint of its name comes. GGUF is not among them: its tensors carry their own scheme.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.plugin.contracts import QuantFormat

BUILT_IN: dict[str, str] = {}
"""Format name -> "package.module:Class" of the formats that core brings."""


@dataclass
class QuantFormats:
    """The known formats. `add` is what `ExtensionRegistry.quant_format` ends in."""

    targets: dict[str, str] = field(default_factory=lambda: dict(BUILT_IN))

    def add(self, name: str, target: str) -> None:
        """Register format `name`, implemented at "package.module:Class". Raises ConfigError for a taken name."""
        module, colon, cls = target.partition(":")
        if not (module and colon and cls):
            raise ConfigError(f"quantization format {name!r}: {target!r} must look like 'package.module:Class'")
        if self.targets.get(name, target) != target:
            raise ConfigError(f"quantization format {name!r} is already registered as {self.targets[name]}")
        self.targets[name] = target

    def open(self, config: Mapping[str, Any] | None) -> QuantFormat | None:
        """The format of a checkpoint with this quantization config; None for an unquantized one.

        Raises UnsupportedModelError naming the method if nothing registered detects it.
        """
        if not config:
            return None
        for target in self.targets.values():
            module, _, name = target.partition(":")
            cls: type[QuantFormat] = getattr(importlib.import_module(module), name)
            if cls.detect(config):
                return cls(config)
        known = ", ".join(sorted(self.targets)) or "none for safetensors; GGUF files carry their own"
        raise UnsupportedModelError(
            f"quantization method {method_of(config)!r} is not supported (known: {known}). "
            f"Use an unquantized or GGUF version of the model, or install a plugin that registers the format"
        )


def method_of(config: Mapping[str, Any]) -> str:
    """The method's name as its config gives it; "unknown" if it has none."""
    if method := config.get("quant_method"):
        return str(method)
    inner = config.get("quantization")
    algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    return f"modelopt {algorithm}" if algorithm else "unknown"
