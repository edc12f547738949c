"""An extension: the model type "seed_oss", and a parser of tool calls for `--tool-call-parser bracket`."""

from __future__ import annotations

from octavo.plugin import ExtensionRegistry, hookimpl

API = "1.0"


@hookimpl
def register_extensions(registry: ExtensionRegistry) -> None:
    registry.model("seed_oss", "octavo_seed_model:SeedOss")
    registry.tool_parser("bracket", "octavo_seed_tools:BRACKET")
