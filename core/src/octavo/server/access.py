"""Who may use the server, and how much of it: API keys and their limits.

    keys:                                    # YAML (JSON is YAML too), or .jsonl with one key a line
      - name: alice
        key: sesame                          # or sha256: of the key, in hex
        requests_per_minute: 60
        tokens_per_minute: 100000            # prompt and generated
        max_concurrent: 4
        max_priority: 0                      # the most urgent priority allowed; smaller numbers are more urgent
        models: [llama]
        admin: true                          # opens the routes of --enable-admin

Limits per minute are buckets that refill steadily and hold a minute's worth. A request is let in while its key has
something left; its tokens are taken as they come, so a long answer may bring the key into debt, which it waits off.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.server.errors import ApiError, model_not_allowed, over_limit, priority_not_allowed

log = logging.getLogger("octavo.server")

MINUTE = 60.0


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a keys file. None is no limit; `key` or `sha256` must be given."""

    name: str
    key: str | None = None
    sha256: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"key {self.name!r} needs one of `key` and `sha256`")
        if self.key is not None and (not self.key or self.key != self.key.strip()):
            raise ValueError(f"the key of {self.name!r} must be text without space around it")
        if self.sha256 is not None and not (
            len(self.sha256) == 64 and set(self.sha256.lower()) <= set("0123456789abcdef")
        ):
            raise ValueError(f"sha256 of key {self.name!r} must be 64 hexadecimal digits")
        for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} of key {self.name!r} must be at least 1, not {value}")

    @property
    def digest(self) -> str:
        """SHA-256 of the key, in lower-case hex."""
        return digest_of(self.key) if self.key is not None else (self.sha256 or "").lower()


class Bucket:
    """A limit per minute. It starts full, refills steadily, and may be overdrawn."""

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is left now; below 0 in debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self.per_minute / MINUTE, float(self.per_minute))
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there."""
        return max(amount - self.level, 0.0) * MINUTE / self.per_minute


class Key:
    """A key in use: its rules, and what its requests have used up."""

    def __init__(self, rules: Rules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = rules
        self.num_live = 0
        self._clock = clock
        self._requests = self._bucket(rules.requests_per_minute)
        self._tokens = self._bucket(rules.tokens_per_minute)

    @property
    def name(self) -> str:
        return self.rules.name

    def change(self, rules: Rules) -> None:
        """Take new rules; what was used counts on where the limit is the same."""
        if rules.requests_per_minute != self.rules.requests_per_minute:
            self._requests = self._bucket(rules.requests_per_minute)
        if rules.tokens_per_minute != self.rules.tokens_per_minute:
            self._tokens = self._bucket(rules.tokens_per_minute)
        self.rules = rules

    def enter(self) -> None:
        """Let a request in. Raises ApiError (429) over a limit; `leave` when it has ended."""
        rules = self.rules
        if rules.max_concurrent is not None and self.num_live >= rules.max_concurrent:
            raise self._over(f"{rules.max_concurrent} requests at a time", wait=1.0)
        if self._requests is not None and (wait := self._requests.wait(1)) > 0:
            raise self._over(f"{rules.requests_per_minute} requests a minute", wait=wait)
        if self._tokens is not None and (wait := self._tokens.wait(1)) > 0:
            raise self._over(f"{rules.tokens_per_minute} tokens a minute", wait=wait)
        if self._requests is not None:
            self._requests.take(1)
        self.num_live += 1

    def leave(self) -> None:
        self.num_live -= 1

    def use_tokens(self, count: int) -> None:
        """Tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.take(count)

    def check_model(self, model: str) -> None:
        """Raise ApiError (403) for a model that this key may not use."""
        if self.rules.models is not None and model not in self.rules.models:
            raise model_not_allowed(model)

    def check_priority(self, priority: int) -> None:
        """Raise ApiError (403) for a priority that is more urgent than this key may ask for."""
        most = self.rules.max_priority
        if most is not None and priority < most:
            raise priority_not_allowed(priority, most)

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's headers."""
        named = (("requests", self._requests), ("tokens", self._tokens))
        found: dict[str, str] = {}
        for name, bucket in named:
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level), 0))
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait(bucket.per_minute):.3f}s"
        return found

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, clock=self._clock)

    def _over(self, limit: str, *, wait: float) -> ApiError:
        return over_limit(f"this key may send {limit}; try again later", seconds=math.ceil(wait))


class KeyRing:
    """All keys: the operator's own (--api-key, without limits) and those of a file, which can be read again."""

    def __init__(self, keys: Sequence[str] = (), *, file: Path | None = None) -> None:
        self._own = [Rules(name=f"api-key-{number}", key=key, admin=True) for number, key in enumerate(keys, start=1)]
        self._file = file
        self._keys: dict[str, Key] = {}
        self.reload()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and leaves everything as it was, if it is wrong."""
        rules = [*self._own, *(read_rules(self._file) if self._file else ())]
        check_distinct(rules, self._file)
        by_name = {key.name: key for key in self._keys.values()}
        keys: dict[str, Key] = {}
        for rule in rules:
            key = by_name.get(rule.name)
            if key is None:
                key = Key(rule)
            else:
                key.change(rule)
            keys[rule.digest] = key
        self._keys = keys

    def find(self, secret: bytes) -> Key | None:
        """The key of that text. It is looked up by its hash, so that the time it takes tells nothing about keys."""
        return self._keys.get(digest_of(secret)) if secret else None

    def find_sent(self, authorization: bytes, api_key: bytes) -> Key | None:
        """The key that a request brings in its headers, or None if it has no valid one. Either header will do."""
        scheme, _, token = authorization.partition(b" ")
        return self.find(token.strip() if scheme.lower() == b"bearer" else b"") or self.find(api_key)


def digest_of(secret: str | bytes) -> str:
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


def read_rules(file: Path) -> list[Rules]:
    """The keys of a file. Raises ConfigError naming the file and the entry; never shows a key."""
    import yaml

    content: Any
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            content = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
        else:
            content = yaml.safe_load(text)
        if isinstance(content, Mapping) and set(content) == {"keys"}:
            content = content["keys"]
        rules = msgspec.convert(content, list[Rules])
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"--api-keys-file {file}: {error}") from None
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        raise ConfigError(f"--api-keys-file {file} is no YAML{f' (line {place.line + 1})' if place else ''}") from None
    if not rules:
        raise ConfigError(f"--api-keys-file {file} has no keys: nobody could use the server")
    return rules


def check_distinct(rules: Iterable[Rules], file: Path | None) -> None:
    """Raise ConfigError if two entries share a name or a key."""
    seen: set[str] = set()
    for rule in rules:
        for mark, what in ((f"name {rule.name}", "name"), (f"key {rule.digest}", "key")):
            if mark in seen:
                where = "--api-key" if file is None else f"--api-keys-file {file}"
                raise ConfigError(f"{where}: the {what} of {rule.name!r} is there twice")
            seen.add(mark)
