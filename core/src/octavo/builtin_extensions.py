"""Core's own models, formats, parsers, drafters and logits processors, registered by the hook that others have too."""

from __future__ import annotations

from octavo.models.registry import MODELS
from octavo.plugin import ExtensionRegistry, hookimpl
from octavo.server.parsers.names import REASONING, TOOLS


@hookimpl
def register_extensions(registry: ExtensionRegistry) -> None:
    for model_type, target in MODELS.items():
        registry.model(model_type, target)
    registry.quant_format("gguf", "octavo.quant.gguf_blocks:GGUFBlocks")
    registry.quant_format("online", "octavo.quant.online:Online")
    registry.logits_processor("thinking_token_budget", "octavo.sampling.thinking:ThinkingTokenBudget")
    registry.drafter("ngram", "octavo.speculate.ngram:NgramDrafter")
    for name, target in TOOLS.items():
        registry.tool_parser(name, target)
    for name, target in REASONING.items():
        registry.reasoning_parser(name, target)
