"""What a format of tool calls or of reasoning is made of, for extensions that bring one
(`ExtensionRegistry.tool_parser`, `reasoning_parser`): states, the marks that may come in each, where a mark leads."""

from octavo.server.parsers.grammar import CallTag, Move, ReasoningFormat, State, ToolFormat

__all__ = ["CallTag", "Move", "ReasoningFormat", "State", "ToolFormat"]
