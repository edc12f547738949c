"""The format "acme_groups", registered apart from the platform: every platform then serves it."""

from __future__ import annotations

from octavo.plugin import ExtensionRegistry, hookimpl

API = "0.1"


@hookimpl
def register_extensions(registry: ExtensionRegistry) -> None:
    registry.quant_format("acme_groups", "octavo_acme_full.quant:AcmeGroups")
