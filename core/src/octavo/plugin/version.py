"""The version of the plugin API and the rule by which a plugin's version is accepted."""

from __future__ import annotations

PLUGIN_API: tuple[int, int] = (1, 0)
"""(major, minor) that this core speaks. A new optional thing raises minor; removing or renaming one, major."""

PLUGIN_API_FLOOR: tuple[int, int] = (1, 0)
"""The oldest API that this core still serves."""


def parse_api(text: str) -> tuple[int, int]:
    """Turn `"1.3"` into `(1, 3)`. Raises ValueError on any other form."""
    major, dot, minor = text.partition(".")
    if not dot or not major.isdecimal() or not minor.isdecimal():
        raise ValueError(f"plugin API version must look like '1.3', not {text!r}")
    return int(major), int(minor)


def refusal(text: str) -> str:
    """Why a plugin built for API `text` cannot be loaded; empty if it can."""
    try:
        api = parse_api(text)
    except ValueError as error:
        return str(error)
    ours = ".".join(map(str, PLUGIN_API))
    if api[0] != PLUGIN_API[0]:
        return f"it was built for plugin API {text}, this core speaks {ours}: install a matching release"
    if api > PLUGIN_API:
        return f"it needs plugin API {text}, this core speaks {ours}: upgrade octavo"
    if api < PLUGIN_API_FLOOR:
        floor = ".".join(map(str, PLUGIN_API_FLOOR))
        return f"it was built for plugin API {text}, this core serves {floor} and later: upgrade the plugin"
    return ""
