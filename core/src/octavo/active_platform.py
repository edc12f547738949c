"""The one place from which core calls a plugin's hooks: typed, checked, and with the defaults filled in.

A hook that raises or returns the wrong type is reported with the plugin's distribution and the hook's name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from octavo.config import EngineConfig, apply_patches
from octavo.errors import (
    ConfigError,
    OctavoError,
    PlatformBrokenError,
    PlatformError,
    PlatformIncompatibleError,
)
from octavo.fields import wrong_field
from octavo.plugin import hookspecs
from octavo.plugin.contracts import (
    Communicator,
    Device,
    ExtensionRegistry,
    GraphRunner,
    ModelExecutor,
    WorkerView,
)
from octavo.plugin.data import (
    ConfigPatch,
    GroupSpec,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerEvent,
    WorkerLaunch,
)
from octavo.plugin.specs import KVLayout, KVSpec
from octavo.plugin.version import PLUGIN_API, refusal

if TYPE_CHECKING:
    from octavo.ops.bind import KernelTable

KERNELS = "octavo.kernels"
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlatformLock:
    """The decision for one platform: sent to child processes, which load exactly this. Plain data, picklable.

    entry_point: "module[:attr]". dist, version: the distribution. info_version: the plugin's own word, checked again.
    """

    name: str
    entry_point: str
    dist: str
    version: str
    api: str
    info_version: str


class Plugin:
    """One imported module of hookimpls: what it is, and checked calls of its hooks."""

    def __init__(self, module: object, entry: EntryPoint, *, dist: str, version: str) -> None:
        self.entry, self.dist, self.version = entry, dist, version
        self.name = entry.name
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        try:
            self._manager.register(module, self.name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            message = str(error).replace("\n", " ")
            known = ", ".join(sorted(vars(self._manager.hook)))
            raise self.broken(f"{message}; the hooks of this plugin API are: {known}") from error

    @classmethod
    def load(cls, entry: EntryPoint, *, dist: str, version: str) -> Plugin:
        """Import and check a platform's plugin. Raises PlatformBrokenError or PlatformIncompatibleError."""
        module = import_entry(entry, dist, version)
        # The version is judged before the hooks: a plugin for another API may well have others.
        if reason := refusal(stated_api(module)):
            raise PlatformIncompatibleError(
                f"platform {entry.name!r} ({dist} {version}) cannot be used: {reason}", platform=entry.name
            )
        plugin = cls(module, entry, dist=dist, version=version)
        missing = [hook for hook in hookspecs.MANDATORY if hook not in plugin.hooks]
        if missing:
            raise plugin.broken(f"it lacks the mandatory hook {', '.join(missing)}")
        if plugin.info.name != plugin.name:
            raise plugin.broken(f"its entry point is named {plugin.name!r} but platform_info says {plugin.info.name!r}")
        if own := sorted(set(plugin.info.backend) & plugin.packages):
            raise plugin.broken(
                f"platform_info: backend names {', '.join(own)}, but only a package of somebody else that gives torch "
                "the device may change torch"
            )
        return plugin

    def __str__(self) -> str:
        kind = "kernel pack" if self.entry.group == KERNELS else self.entry.group.rpartition(".")[2].removesuffix("s")
        return f"{kind} {self.name!r} ({self.dist} {self.version})"

    @cached_property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks it implements."""
        plugin = self._manager.get_plugin(self.name)
        callers = self._manager.get_hookcallers(plugin) or []
        return frozenset(caller.name for caller in callers)

    @property
    def packages(self) -> set[str]:
        """Packages that cannot be its backend: its own, octavo and torch."""
        files = (self.entry.dist.files if self.entry.dist else None) or ()
        return {"octavo", "torch", self.entry.module.partition(".")[0], *(Path(file.parts[0]).stem for file in files)}

    @cached_property
    def info(self) -> PlatformInfo:
        return self.filled_in("platform_info", PlatformInfo, self.call("platform_info"))

    def probe(self) -> Probe:
        return self.filled_in("platform_probe", Probe, self.call("platform_probe"))

    def broken(self, reason: str) -> PlatformBrokenError:
        """The error for a fault of this plugin."""
        return PlatformBrokenError(f"{self} is broken: {reason}; update or uninstall {self.dist}", platform=self.name)

    def named(self, error: OctavoError) -> str:
        """The words of an error, with whose they are."""
        return str(error) if str(self) in str(error) else f"{self}: {error}"

    def call(self, hook: str, **arguments: object) -> Any:
        """Call a hook. Errors made for users pass; anything else is the plugin's fault."""
        try:
            return getattr(self._manager.hook, hook)(**arguments)
        except OctavoError:
            raise
        except (Exception, SystemExit) as error:
            raise self.broken(f"{hook} raised {type(error).__name__}: {error}") from error

    def checked(self, hook: str, kind: type[T], value: object) -> T:
        """`value` if it is a `kind`. Raises PlatformBrokenError naming the hook otherwise."""
        if not isinstance(value, kind):
            raise self.broken(f"{hook} must return {kind.__name__}, not {type(value).__name__}")
        return value

    def filled_in(self, hook: str, kind: type[T], value: object) -> T:
        """`value` if it is a `kind`, a dataclass, and every field is what it should be. Raises as `checked`."""
        answer = self.checked(hook, kind, value)
        if wrong := wrong_field(answer):
            raise self.broken(f"{hook}: {wrong}")
        return answer

    def shaped(self, hook: str, protocol: Any, value: Any) -> Any:
        """`value` if it has every member of a Protocol. Raises PlatformBrokenError naming the hook otherwise."""
        lacking = [name for name in protocol_members(protocol) if not hasattr(value, name)]
        if lacking:
            got = type(value).__name__
            raise self.broken(f"{hook} must return a {protocol.__name__}; {got} lacks {', '.join(lacking)}")
        return value


class ActivePlatform:
    """The chosen platform. Made by `octavo.discovery.select` or `load`."""

    def __init__(self, plugin: Plugin, *, options: Mapping[str, str]) -> None:
        self._plugin = plugin
        self.info: PlatformInfo = plugin.info
        self.options: Mapping[str, object] = parse_options(plugin.info.options, options, platform=plugin.name)

    def __str__(self) -> str:
        return str(self._plugin)

    @property
    def name(self) -> str:
        return self._plugin.name

    @property
    def lock(self) -> PlatformLock:
        """What a child process needs to load the same platform."""
        plugin = self._plugin
        return PlatformLock(
            name=plugin.name,
            entry_point=plugin.entry.value,
            dist=plugin.dist,
            version=plugin.version,
            api=self.info.api,
            info_version=self.info.version,
        )

    @cached_property
    def caps(self) -> PlatformCaps:
        """What the platform can do, asked once."""
        answer = self._plugin.call("platform_caps", options=self.options)
        caps = PlatformCaps() if answer is None else self._plugin.checked("platform_caps", PlatformCaps, answer)
        if caps.default_dtype not in caps.dtypes:
            raise self._plugin.broken(f"platform_caps: default_dtype {caps.default_dtype!r} is not among dtypes")
        if caps.shapes == "bucketed" and caps.buckets is None:
            raise self._plugin.broken("platform_caps: shapes='bucketed' needs buckets")
        return caps

    def configure(self, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """The config with the platform's patches, and a log line for each of them."""
        answers = self._plugin.call("platform_configure", config=config, caps=self.caps)
        patches = [self._plugin.checked("platform_configure", ConfigPatch, p) for answer in answers for p in answer]
        try:
            return apply_patches(config, patches)
        except ConfigError as error:
            raise self._plugin.broken(f"platform_configure: {error}") from error

    def launch(self, config: EngineConfig) -> WorkerLaunch:
        """How worker processes start."""
        answer = self._plugin.call("platform_launch", config=config, caps=self.caps)
        return WorkerLaunch() if answer is None else self._plugin.checked("platform_launch", WorkerLaunch, answer)

    def make_device(self, local_rank: int, config: EngineConfig) -> Device:
        """The device of one worker."""
        answer = self._plugin.call("make_device", local_rank=local_rank, config=config, caps=self.caps)
        device: Device = self._plugin.shaped("make_device", Device, answer)
        return device

    def register_kernels(self, table: KernelTable, device: Device) -> None:
        """Let the platform, then the kernel packs made for it, register kernels.

        A pack only adds what the platform can do without: one that fails is named, leaves nothing behind, and ends a
        start only if the user asks for its kernels, see `KernelTable.broken_packs`.
        """
        self._plugin.call("register_kernels", registry=table, device=device, caps=self.caps)
        packs, broken = kernel_packs(self.name)
        for pack in packs:
            own = type(table)()
            try:
                pack.call("register_kernels", registry=own, device=device, caps=self.caps)
            except OctavoError as error:
                broken.append(pack.named(error))
            else:
                table.add_all_of(own)
                table.packs[pack.name] = own
        for reason in broken:
            log.warning("left out: %s", reason)
        table.broken_packs = broken

    def kv_layout(self, spec: KVSpec, device: Device) -> KVLayout:
        """How KV lies in memory where the attention backend does not say."""
        answer = self._plugin.call("kv_layout", spec=spec, device=device)
        if answer is None:
            return KVLayout(block_size=spec.block_size, dtype=spec.dtype)
        layout = self._plugin.checked("kv_layout", KVLayout, answer)
        if sorted(layout.order) != sorted("BHNC"):
            raise self._plugin.broken(f"kv_layout: order {layout.order!r} is no permutation of 'BHNC'")
        return layout

    def make_communicator(self, group: GroupSpec, device: Device) -> Communicator | None:
        """The platform's collectives for a group, or None: core's own."""
        made: Communicator | None = self._optional("make_communicator", Communicator, group=group, device=device)
        return made

    def make_graph_runner(self, config: EngineConfig, device: Device) -> GraphRunner | None:
        """The platform's capture of steps, or None: run eagerly."""
        made: GraphRunner | None = self._optional("make_graph_runner", GraphRunner, config=config, device=device)
        return made

    def make_executor(self, config: EngineConfig, device: Device) -> ModelExecutor | None:
        """The platform's whole executor, or None: core's runner."""
        made: ModelExecutor | None = self._optional("make_executor", ModelExecutor, config=config, device=device)
        return made

    def register_extensions(self, registry: ExtensionRegistry) -> None:
        """Models and quantization formats that come with the platform."""
        self._plugin.call("register_extensions", registry=registry)

    def worker_event(self, event: WorkerEvent, worker: WorkerView) -> None:
        """Tell the platform that a worker got ready or shuts down."""
        self._plugin.call("worker_event", event=event, worker=worker)

    def _optional(self, hook: str, protocol: Any, **arguments: object) -> Any:
        answer = self._plugin.call(hook, **arguments)
        return None if answer is None else self._plugin.shaped(hook, protocol, answer)


def kernel_packs(platform: str) -> tuple[list[Plugin], list[str]]:
    """(the installed kernel packs for a platform, what is wrong with others that may be for it).

    A pack is a module with `API = "1.0"`, `PLATFORMS = {"name", ...}` and a `register_kernels` hookimpl. One that fails
    to import cannot say whom it is for, so it is named whatever the platform is.
    """
    packs, broken = [], []
    for entry in entries_of(KERNELS):
        try:
            module, platforms = import_pack(entry)
            if platform in platforms:
                packs.append(open_pack(entry, module))
        except PlatformError as error:
            broken.append(str(error))
    return packs, broken


def import_pack(entry: EntryPoint) -> tuple[object, frozenset[str]]:
    """A pack's module, and the platforms that it is for. Raises PlatformBrokenError naming the distribution."""
    dist, version = distribution(entry)
    module = import_entry(entry, dist, version)
    named = getattr(module, "PLATFORMS", None)
    if not isinstance(named, set | frozenset | tuple | list) or not all(isinstance(name, str) for name in named):
        raise PlatformBrokenError(
            f"kernel pack {entry.name!r} ({dist} {version}) is broken: PLATFORMS must be a set of names of "
            f"platforms, not {named!r}; update or uninstall {dist}"
        )
    return module, frozenset(named)


def open_pack(entry: EntryPoint, module: object) -> Plugin:
    """An imported pack, ready to be asked. Raises PlatformIncompatibleError or PlatformBrokenError."""
    dist, version = distribution(entry)
    if reason := refusal(str(getattr(module, "API", ""))):
        raise PlatformIncompatibleError(f"kernel pack {entry.name!r} ({dist} {version}) cannot be used: {reason}")
    pack = Plugin(module, entry, dist=dist, version=version)
    if pack.hooks != {"register_kernels"}:
        raise pack.broken(f"a kernel pack implements register_kernels only, not {sorted(pack.hooks)}")
    return pack


def entries_of(group: str) -> list[EntryPoint]:
    """The installed entry points of a group, in an order that does not depend on the environment."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def distribution(entry: EntryPoint) -> tuple[str, str]:
    """(name, version) of the distribution that an entry point belongs to."""
    dist: Any = entry.dist
    return (dist.name, dist.version) if dist is not None else (entry.value.partition(":")[0], "not installed")


def parse_options(specs: Mapping[str, OptionSpec], texts: Mapping[str, str], *, platform: str) -> dict[str, object]:
    """All options of a platform: parsed from `texts`, else the default. Raises ConfigError naming the option."""
    for key in texts:
        if key not in specs:
            known = "; ".join(f"{name} ({spec.help})" for name, spec in specs.items()) or "it has none"
            raise ConfigError(f"--platform-opt {key}: platform {platform!r} has no such option; known: {known}")
    values: dict[str, object] = {}
    for key, spec in specs.items():
        values[key] = spec.default
        if key in texts:
            parse = truth if spec.type is bool else spec.type
            try:
                values[key] = parse(texts[key])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"--platform-opt {key}={texts[key]}: {error} ({spec.help})") from error
    return values


def truth(text: str) -> bool:
    """Parse "true"/"false" and friends; `bool("false")` would be True."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"must be true or false, not {text!r}")
    return known[text.lower()]


def stated_api(module: object) -> str:
    """The API that a module's platform_info names; ours if it gives no readable answer, which is checked later."""
    try:
        info = module.platform_info()  # type: ignore[attr-defined]
    except (Exception, SystemExit):
        info = None
    readable = isinstance(info, PlatformInfo) and isinstance(info.api, str)
    return info.api if readable else ".".join(map(str, PLUGIN_API))


def protocol_members(protocol: type[Any]) -> Sequence[str]:
    """Public attributes and methods that a Protocol asks for (constructors aside)."""
    names = {*vars(protocol), *vars(protocol).get("__annotations__", {})}
    return sorted(name for name in names if not name.startswith("_"))


def import_entry(entry: EntryPoint, dist: str, version: str) -> object:
    """Import what an entry point names. Whatever its import raises is a broken plugin, not a broken core."""
    load: Callable[[], object] = entry.load
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise PlatformBrokenError(
            f"{entry.name!r} ({dist} {version}) is broken: importing {entry.value} raised {type(error).__name__}: "
            f"{error}; reinstall or uninstall {dist}",
            platform=entry.name,
        ) from error
