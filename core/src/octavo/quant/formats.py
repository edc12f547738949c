"""Which quantization format a checkpoint is in, by its config.

Every format is a `octavo.plugin.QuantFormat` registered by name and import path, ours as well as a plugin's, and is
imported when a quantized checkpoint comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.extensions import resolve
from octavo.plugin.quant import MatrixSpec, QuantLayer
from octavo.quant import online

Layers = Callable[[MatrixSpec], QuantLayer | None]
"""How the checkpoint keeps a matrix; None: plainly."""


def plainly(spec: MatrixSpec) -> QuantLayer | None:
    """The layers of an unquantized checkpoint."""
    return None


def layers_of(targets: Mapping[str, str], config: Mapping[str, Any] | None, asked: str | None = None) -> Layers:
    """How the checkpoint with this quantization config (None: unquantized) keeps its matrices.

    targets: the registered formats, name -> "module:Class". asked: `--quantization`, None and "none" being no wish.
    Raises UnsupportedModelError naming the method if nothing registered detects it, or the format and its reason if it
    cannot serve the config; ConfigError for a wish that cannot be met.
    """
    if asked not in (None, "none"):
        if config:
            raise ConfigError(f"--quantization {asked}: the checkpoint is quantized already; leave the option out")
        config = {"quant_method": online.FAMILY, "method": asked}
    if not config:
        return plainly
    for name, target in targets.items():
        cls: Any = resolve(target)
        if not hasattr(cls, "layer"):
            raise UnsupportedModelError(
                f"quantization format {name!r} ({target}) has no method `layer`: it was written for an older plugin "
                "API; install a newer release of its package"
            )
        if cls.detect(config):
            return _named(name, cls, config)
    if asked is not None and asked != "none":
        known = ", ".join(["none (dequantize while loading)", *online.SCHEMES])
        raise ConfigError(f"--quantization {asked}: not known; known: {known}")
    raise UnsupportedModelError(
        f"quantization method {method_of(config)!r} is not supported (known: {', '.join(sorted(targets))}). "
        f"Use an unquantized or GGUF version of the model, or install a plugin that registers the format"
    )


def _named(name: str, cls: Any, config: Mapping[str, Any]) -> Layers:
    """The format's `layer`, whose errors name it."""

    def call(function: Callable[..., Any], *arguments: Any, what: str) -> Any:
        try:
            return function(*arguments)
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedModelError(f"quantization format {name!r}: {what}: {error!r}") from error

    opened = call(cls, config, what="this checkpoint's config")

    def layer(spec: MatrixSpec) -> QuantLayer | None:
        found: QuantLayer | None = call(opened.layer, spec, what=spec.name)
        return found

    return layer


def method_of(config: Mapping[str, Any]) -> str:
    """The method's name as its config gives it; "unknown" if it has none."""
    if method := config.get("quant_method"):
        return str(method)
    inner = config.get("quantization")
    algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    return f"modelopt {algorithm}" if algorithm else "unknown"
