"""The format "acme_groups" and the drafter "acme_period", registered apart from the platform: every platform then has
them."""

from __future__ import annotations

from octavo.plugin import ExtensionRegistry, hookimpl

API = "1.0"


@hookimpl
def register_extensions(registry: ExtensionRegistry) -> None:
    registry.quant_format("acme_groups", "octavo_acme_full.quant:AcmeGroups")
    registry.drafter("acme_period", "octavo_acme_full.drafter:Period")
