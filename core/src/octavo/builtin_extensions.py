"""Core's own models and logits processors, registered by the hook that a third party's would use."""

from __future__ import annotations

from octavo.models.registry import MODELS
from octavo.plugin import ExtensionRegistry, hookimpl


@hookimpl
def register_extensions(registry: ExtensionRegistry) -> None:
    for model_type, target in MODELS.items():
        registry.model(model_type, target)
    registry.logits_processor("thinking_token_budget", "octavo.sampling.thinking:ThinkingTokenBudget")
