"""Every error a user of Octavo can meet. Bugs are asserts; these are for people.

OctavoError
├── ConfigError                 a flag, option or config field is wrong
├── PlatformError               a platform plugin cannot be used (names its distribution)
│   ├── PlatformNotFoundError   nothing of that name is installed, or its hardware is absent
│   ├── PlatformBrokenError     it is installed but fails to import, probe or load
│   ├── PlatformIncompatibleError   built for another plugin API
│   └── PlatformAmbiguousError  two equally good ones
├── ModelError                  the model cannot be served
│   ├── ModelNotFoundError
│   ├── UnsupportedModelError
│   └── CheckpointError         a file is missing, cut, corrupt or does not fit the config
├── RequestError                one request is wrong: the client's fault, names the field
│   └── RequestTooLargeError    it can never fit (context or KV memory)
└── EngineError                 one request or the engine failed: our fault
    ├── EngineAsleepError       it gave its memory back, and takes no requests until it is woken up
    └── EngineDeadError         the engine process is gone
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors raised on purpose. The message says what to do next."""


class ConfigError(OctavoError):
    """A flag, option or config field is wrong; the message names it."""


class PlatformError(OctavoError):
    """A platform plugin cannot be used. `platform` is its entry-point name."""

    def __init__(self, message: str, *, platform: str = "") -> None:
        super().__init__(message)
        self.platform = platform


class PlatformNotFoundError(PlatformError):
    """No installed plugin has that name, or its hardware is not there."""


class PlatformBrokenError(PlatformError):
    """The plugin is installed but raised while it was imported, probed or loaded."""


class PlatformIncompatibleError(PlatformError):
    """The plugin was built for a plugin API that this core does not speak."""


class PlatformAmbiguousError(PlatformError):
    """Two platforms claim this machine with equal score; `--platform` must choose."""


class ModelError(OctavoError):
    """The model cannot be served."""


class ModelNotFoundError(ModelError):
    """No such folder, file or repository."""


class UnsupportedModelError(ModelError):
    """The architecture, or a part of its config, is not implemented."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated, corrupt or does not fit the config. `path` names it."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class RequestError(OctavoError, ValueError):
    """One request is wrong. `field` is the name the client used; servers answer 400."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestTooLargeError(RequestError):
    """The request can never be served: longer than the context or than all KV memory."""


class EngineError(OctavoError):
    """A request failed in the engine through no fault of its own."""


class EngineAsleepError(EngineError):
    """The engine sleeps: its memory was given back. Requests are served after it was woken up."""


class EngineDeadError(EngineError):
    """The engine process is gone; nothing can be served until it restarts."""
