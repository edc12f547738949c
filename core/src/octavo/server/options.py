"""What the operator chose for the server itself (the engine has `octavo.config`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.errors import ConfigError

DEFAULT_BODY_BYTES = 32 * 2**20
DEFAULT_STORE_BYTES = 256 * 2**20
DEFAULT_STORE_AGE = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of `octavo serve`.

    grpc_port: serve gRPC on this port of `host` as well; 0 takes a free one.
    api_server_count: processes that answer HTTP on one port, over one engine.
    ssl_*: serve HTTPS with these files; ssl_cert_reqs: whether clients show a certificate (none, optional, required).
    api_keys: any of them opens every route, without limits; none, and no api_keys_file: no key is asked for.
    api_keys_file: keys with limits of their own, see `octavo.server.access`.
    max_logprobs: most top logprobs per token that a request may ask for; -1 is no limit.
    max_prompt_tokens, max_n, max_stop_strings: of one request; None is no limit but the context's.
    max_queue: requests that may wait for a place in the batch; None is no limit. queue_full_status: 503 or 429.
    shutdown_timeout: seconds that running requests get to finish after SIGTERM.
    sse_keep_alive_interval: seconds after which a stream without news gets a comment; 0 is never.
    restart_engine: start a new engine when it dies, instead of exiting.
    ui: serve the page at `/`.
    metrics_alias: show all metrics also under the names of another server ("vllm").
    otlp_traces_endpoint: URL to which spans of requests are sent, see `octavo.server.tracing`.
    enable_admin: have the routes of `octavo.server.admin`.
    log_requests: log prompts and parameters, of each prompt at most max_log_len characters or ids.
    response_store: file that keeps responses of the Responses API; None: this process's memory. The least recently used
        are dropped beyond response_store_max_bytes, and what was not used for response_store_max_age seconds.
    tool_call_parser, reasoning_parser: how the model writes calls and reasoning; "auto" reads it off the chat template,
        "none" parses nothing. tool_strict_level: see `octavo.server.tool_choice`.
    trust_request_chat_template: requests may bring their own template (it runs sandboxed, but can be slow).
    """

    api_server_count: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: str = "none"
    ui: bool = True
    grpc_port: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: str | None = None
    max_logprobs: int = 20
    max_prompt_tokens: int | None = None
    max_n: int | None = None
    max_stop_strings: int | None = None
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_queue: int | None = None
    queue_full_status: int = 503
    shutdown_timeout: float = 30.0
    sse_keep_alive_interval: float = 15.0
    restart_engine: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    tool_strict_level: str = "auto"
    trust_request_chat_template: bool = False
    response_store: str | None = None
    response_store_max_bytes: int = DEFAULT_STORE_BYTES
    response_store_max_age: float = DEFAULT_STORE_AGE
    cors_origins: tuple[str, ...] = ()
    cors_methods: tuple[str, ...] = ("*",)
    cors_headers: tuple[str, ...] = ("*",)
    cors_credentials: bool = False
    metrics_alias: str | None = None
    log_level: str = "info"
    enable_admin: bool = False
    otlp_traces_endpoint: str | None = None
    log_format: str = "text"
    access_log: bool = False
    log_requests: bool = False
    max_log_len: int | None = None

    def shown(self) -> dict[str, Any]:
        """All options but the keys, to be shown."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def __post_init__(self) -> None:
        for name in ("shutdown_timeout", "sse_keep_alive_interval", "response_store_max_age"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} must be a finite number of seconds")
        if not all(self.api_keys):
            raise ConfigError("--api-key must not be empty: an empty key would let everybody in")
        if self.api_server_count > 1 and (self.uds or self.restart_engine):
            raise ConfigError("--api-server-count above 1 goes with neither --uds nor --restart-engine")
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs != "none") and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
        if self.ssl_cert_reqs != "none" and not self.ssl_ca_certs:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs to check clients against")
