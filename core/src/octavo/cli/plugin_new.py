"""`octavo plugin new`: a distribution that installs, is found and passes the kit, for its author to fill."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from string import Template

from octavo import __version__
from octavo.discovery import PLATFORMS
from octavo.errors import ConfigError
from octavo.plugin.version import PLUGIN_API

TEMPLATES = Path(__file__).parent / "plugin_template"

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "conformance.toml": "conformance.toml.txt",
    "$module/__init__.py": "platform.py.txt",
    "tests/test_platform.py": "test_platform.py.txt",
    ".github/workflows/check.yml": "check.yml.txt",
}
"""Path in the new folder, in which names are replaced too -> template."""

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RESERVED = ("auto",)
"""Words that mean something else after `--platform`."""


def scaffold(name: str, parent: Path) -> Path:
    """Write the distribution octavo-NAME into `parent` and return its folder.

    Raises ConfigError for a name that cannot be used, or if the folder is there already: then nothing is written; and
    if it cannot be written.
    """
    if reason := refusal(name):
        raise ConfigError(f"platform name {name!r}: {reason}")
    folder = parent / f"octavo-{name}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it first")
    module = module_of(name)
    values = {
        "name": name,
        "module": module,
        "upper": module.removeprefix("octavo_").upper(),
        "api": ".".join(map(str, PLUGIN_API)),
        "octavo": ".".join(__version__.split(".")[:2]),
    }
    for path, template in FILES.items():
        target = folder / Template(path).substitute(values)
        text = Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    return folder


def module_of(name: str) -> str:
    """The Python package of a platform's distribution."""
    return f"octavo_{name.replace('-', '_')}"


def refusal(name: str) -> str:
    """Why a new platform cannot have that name; empty if it can."""
    if not NAME.fullmatch(name):
        return "use lower-case letters, digits and single hyphens, beginning with a letter"
    if name.startswith("octavo-"):
        return f"leave the octavo- out: the distribution becomes octavo-{name.removeprefix('octavo-')}"
    if name in RESERVED:
        return "that word is reserved"
    owners = {entry.dist.name for entry in entry_points(group=PLATFORMS) if entry.name == name and entry.dist}
    if owners:
        return f"{', '.join(sorted(owners))} provides it, and two platforms of one name cannot be told apart"
    if find_spec(module_of(name)) is not None:
        return f"its package would be {module_of(name)}, which is installed already"
    return ""
