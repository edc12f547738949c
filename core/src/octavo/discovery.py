"""From entry points to one `ActivePlatform`.

    entry points of group "octavo.platforms"
        -> survey(): every plugin in its own try-block: ready | absent | incompatible | broken | skipped
        -> select(): the named one, or the best of the ready ones; errors say which distribution and why
        -> PlatformLock: the decision, sent to child processes
        -> load(lock): a child loads exactly that and probes nothing

Imports no torch. `OCTAVO_EXTRA_PLATFORMS="name=module,..."` adds platforms that are not installed as distributions
(development and tests).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from octavo.active_platform import (
    KERNELS,
    ActivePlatform,
    PlatformLock,
    Plugin,
    distribution,
    entries_of,
    import_pack,
    open_pack,
)
from octavo.errors import (
    ConfigError,
    OctavoError,
    PlatformAmbiguousError,
    PlatformBrokenError,
    PlatformError,
    PlatformIncompatibleError,
    PlatformNotFoundError,
)
from octavo.plugin.data import DeviceDesc, PlatformInfo, Probe

PLATFORMS = "octavo.platforms"
EXTRA = "OCTAVO_EXTRA_PLATFORMS"

State = Literal["ready", "absent", "incompatible", "broken", "skipped"]
Kind = Literal["platform", "kernels", "extension"]

__all__ = [
    "ActivePlatform",
    "PlatformLock",
    "PlatformReport",
    "installed",
    "load",
    "select",
    "survey",
    "survey_additions",
]


@dataclass(frozen=True, kw_only=True)
class PlatformReport:
    """What was found out about one installed platform, kernel pack or extension. `reason` is empty when it is ready.

    score, devices, device_type: of a platform. platforms: those that a kernel pack is for.
    """

    name: str
    dist: str
    version: str
    state: State
    reason: str = ""
    score: int = 0
    devices: tuple[DeviceDesc, ...] = ()
    kind: Kind = "platform"
    device_type: str = ""
    platforms: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.dist} {self.version}): {self.state}{': ' + self.reason if self.reason else ''}"


@dataclass(frozen=True)
class _Candidate:
    """A report, and the plugin behind it when it could be loaded."""

    report: PlatformReport
    plugin: Plugin | None = field(default=None)


def survey(*, exclude: Collection[str] = (), extra: Mapping[str, str] | None = None) -> list[PlatformReport]:
    """Look at every installed platform; a bad one becomes a state, not an error. Names in `exclude` are listed as
    skipped, unimported. Raises ConfigError only for a malformed OCTAVO_EXTRA_PLATFORMS."""
    return [_examine(entry, skip=entry.name in exclude).report for entry in _entries(extra)]


def survey_additions() -> list[PlatformReport]:
    """Look at every installed kernel pack and extension; a bad one becomes a state, not an error. A pack's kernels are
    registered only where its platform runs, so whether that works is not known here."""
    from octavo.extensions import BUILT_IN, GROUP, Extensions, register

    reports, registry = [], Extensions()
    for entry in BUILT_IN:
        register(entry, registry)

    def look(entry: EntryPoint, kind: Kind) -> PlatformReport:
        dist, version = distribution(entry)
        state: State = "ready"
        reason, platforms = "", frozenset[str]()
        try:
            if kind == "kernels":
                module, platforms = import_pack(entry)
                open_pack(entry, module)
            else:
                register(entry, registry)
        except OctavoError as error:
            state = "incompatible" if isinstance(error, PlatformIncompatibleError) else "broken"
            reason = str(error)
        return PlatformReport(
            kind=kind,
            name=entry.name,
            dist=dist,
            version=version,
            state=state,
            reason=reason,
            platforms=tuple(sorted(platforms)),
        )

    reports += [look(entry, "kernels") for entry in entries_of(KERNELS)]
    reports += [look(entry, "extension") for entry in entries_of(GROUP)]
    return reports


def select(
    name: str = "auto", *, options: Mapping[str, str] | None = None, extra: Mapping[str, str] | None = None
) -> ActivePlatform:
    """The platform to run on. `options`: `--platform-opt` texts by key; `extra`: platforms by name -> "module[:attr]".

    "auto" takes the highest score of those whose hardware is here, and never falls silently to a platform of score 0
    while another one is broken. Raises a PlatformError that names the distribution, or ConfigError for an option.
    """
    found = _entries(extra)
    if name != "auto":
        chosen = _named(name, found)
        probe = chosen.probe()
        if not probe.available:
            raise PlatformNotFoundError(
                f"{chosen} finds no hardware: {probe.reason or 'no reason given'}; "
                "choose another with --platform (`octavo plugin list` shows all)",
                platform=name,
            )
    else:
        chosen = _best([_examine(entry) for entry in found])
    return ActivePlatform(chosen, options=options or {})


def installed(name: str) -> ActivePlatform:
    """The platform of that name whether its hardware is here or not: for checks that need none. Raises as `select`."""
    return ActivePlatform(_named(name, _entries(None)), options={})


def load(lock: PlatformLock, *, options: Mapping[str, str] | None = None) -> ActivePlatform:
    """Load exactly the platform of a lock, in a child process: nothing is probed and no other plugin is imported."""
    entry = EntryPoint(name=lock.name, value=lock.entry_point, group=PLATFORMS)
    plugin = Plugin.load(entry, dist=lock.dist, version=lock.version)
    if plugin.info.version != lock.info_version:
        raise PlatformBrokenError(
            f"{plugin} is version {plugin.info.version} in this process but {lock.info_version} in the one that "
            "chose it: give all processes the same environment",
            platform=lock.name,
        )
    return ActivePlatform(plugin, options=options or {})


def _entries(extra: Mapping[str, str] | None) -> list[EntryPoint]:
    """All platform entry points, sorted by name. The same name and module found twice counts once."""
    named = dict(extra or {})
    for item in filter(None, os.environ.get(EXTRA, "").split(",")):
        name, equals, value = item.strip().partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{EXTRA} must look like 'name=module,name=module', not {item!r}")
        named.setdefault(name, value)
    found = [EntryPoint(name=name, value=value, group=PLATFORMS) for name, value in named.items()]
    seen = {(entry.name, entry.value) for entry in found}
    for entry in entry_points(group=PLATFORMS):
        if (entry.name, entry.value) not in seen:
            seen.add((entry.name, entry.value))
            found.append(entry)
    return sorted(found, key=lambda entry: (entry.name, entry.value))


def _examine(entry: EntryPoint, *, skip: bool = False) -> _Candidate:
    """Import, version check and probe of one entry point; whatever goes wrong becomes its state."""
    dist, version = distribution(entry)

    def report(
        state: State, reason: str = "", probe: Probe | None = None, info: PlatformInfo | None = None
    ) -> PlatformReport:
        score, devices = (probe.score, probe.devices) if probe else (0, ())
        return PlatformReport(
            name=entry.name,
            dist=dist,
            version=version,
            state=state,
            reason=reason,
            score=score,
            devices=devices,
            device_type=info.device_type if info else "",
        )

    if skip:
        return _Candidate(report("skipped", "excluded"))
    try:
        plugin = Plugin.load(entry, dist=dist, version=version)
        probe = plugin.probe()
    except PlatformIncompatibleError as error:
        return _Candidate(report("incompatible", str(error)))
    except OctavoError as error:  # whatever it is for, raised here it keeps the platform from being used
        return _Candidate(report("broken", str(error)))
    if not probe.available:
        return _Candidate(report("absent", probe.reason or "its hardware was not found", probe, plugin.info))
    return _Candidate(report("ready", "", probe, plugin.info), plugin)


def _named(name: str, found: list[EntryPoint]) -> Plugin:
    """The one platform of that name, imported alone."""
    matches = [entry for entry in found if entry.name == name]
    if not matches:
        installed = ", ".join(sorted({entry.name for entry in found})) or "none"
        raise PlatformNotFoundError(
            f"no installed platform is named {name!r} (installed: {installed}); "
            f"install the plugin that provides it, for example: pip install octavo-{name}",
            platform=name,
        )
    if len(matches) > 1:
        owners = " and ".join(f"{dist} {version}" for dist, version in map(distribution, matches))
        raise PlatformAmbiguousError(f"platform {name!r} is provided by {owners}: uninstall all but one", platform=name)
    dist, version = distribution(matches[0])
    return Plugin.load(matches[0], dist=dist, version=version)


def _best(candidates: list[_Candidate]) -> Plugin:
    """The ready platform of the highest score."""
    reports = [c.report for c in candidates]
    ready = sorted(((c.report, c.plugin) for c in candidates if c.plugin is not None), key=lambda pair: -pair[0].score)
    failed = [r for r in reports if r.state in ("broken", "incompatible")]
    if not ready:
        seen = "; ".join(map(str, reports)) or "none is installed"
        raise PlatformNotFoundError(
            f"no platform can be used: {seen}. Install one that fits this machine, for example: "
            'pip install "octavo[cpu]"'
        )
    top, plugin = ready[0]
    rivals = [r for r, _ in ready if r.score == top.score]
    if len(rivals) > 1:
        raise PlatformAmbiguousError(
            f"{' and '.join(f'{r.name} ({r.dist} {r.version})' for r in rivals)} fit this machine equally well "
            f"(score {top.score}): choose with --platform"
        )
    if top.score <= 0 and failed:
        kind: type[PlatformError] = (
            PlatformBrokenError if any(r.state == "broken" for r in failed) else PlatformIncompatibleError
        )
        raise kind(
            f"refusing silent CPU fallback: {'; '.join(map(str, failed))}. "
            f"Fix or uninstall it, or choose --platform {top.name}",
            platform=failed[0].name,
        )
    return plugin
