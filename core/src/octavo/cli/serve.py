"""`octavo serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click

from octavo import logs
from octavo.cli.config_file import ConfigurableCommand
from octavo.cli.options import Size, config_from, engine_options
from octavo.server.options import ServerOptions

if TYPE_CHECKING:
    from octavo.server.service import Service


FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("host", str, "Address to listen on; 0.0.0.0 is every network interface."),
    ("port", click.IntRange(0, 65535), "Port to listen on; 0 takes a free one."),
    ("uds", str, "Listen on this Unix socket instead of a port."),
    ("api_server_count", click.IntRange(1), "Processes that answer HTTP on the one port, over one engine."),
    ("root_path", str, "Path prefix that a proxy in front strips."),
    ("ui", bool, "Serve a page at / to try the model in a browser."),
    ("grpc_port", click.IntRange(0, 65535), "Serve gRPC on this port as well; 0 takes a free one."),
    ("ssl_keyfile", str, "Private key of the certificate, if its file does not hold it."),
    ("ssl_certfile", str, "Certificate (PEM, with its chain): serve HTTPS. SIGHUP reads it again."),
    ("ssl_keyfile_password", str, "Password of the private key."),
    ("ssl_ca_certs", str, "Certificates of the authorities that clients' certificates must be of."),
    ("ssl_cert_reqs", click.Choice(("none", "optional", "required")), "Whether clients must show a certificate."),
    ("api_keys", str, "Key that requests must send as a bearer token. Repeat for several."),
    ("api_keys_file", str, "File of keys with limits of their own; SIGHUP reads it again."),
    ("max_logprobs", click.IntRange(-1), "Most logprobs per token that a request may ask for; -1 is no limit."),
    ("max_prompt_tokens", click.IntRange(1), "Longest prompt; by default as long as the context."),
    ("max_n", click.IntRange(1), "Most answers (n) that a request may ask for."),
    ("max_stop_strings", click.IntRange(0), "Most stop strings of a request."),
    ("max_body_bytes", Size(), "Largest request body (4M = 4 MiB)."),
    ("queue_full_status", click.Choice((503, 429)), "Status of requests that --max-queue turns away."),
    ("shutdown_timeout", click.FloatRange(0), "Seconds that running requests get to finish after SIGTERM."),
    (
        "sse_keep_alive_interval",
        click.FloatRange(0),
        "Seconds without news after which a stream gets a comment; 0: never.",
    ),
    ("restart_engine", bool, "Start a new engine when it dies, instead of exiting."),
    ("tool_call_parser", str, "How the model writes tool calls: auto (its chat template shows it), none, or a name."),
    ("reasoning_parser", str, "How the model writes its reasoning: auto, none, or a name."),
    (
        "tool_strict_level",
        click.Choice(("auto", "function", "parameter")),
        "What holds a call whose tool does not say strict: nothing, the tools' names, or the arguments' schema too.",
    ),
    ("trust_request_chat_template", bool, "Let requests bring their own chat template."),
    ("response_store", str, "SQLite file that keeps responses (/v1/responses); by default they are kept in memory."),
    ("response_store_max_bytes", Size(), "Size beyond which the least recently used responses are dropped."),
    ("response_store_max_age", click.FloatRange(0, min_open=True), "Seconds that an unused response is kept."),
    ("cors_origins", str, "Origin that browsers may call from; * is any. Repeat for several."),
    ("cors_methods", str, "Method that browsers may use. Repeat for several."),
    ("cors_headers", str, "Request header that browsers may send. Repeat for several."),
    ("cors_credentials", bool, "Let browsers send cookies and keys across origins."),
    ("metrics_alias", click.Choice(("vllm",)), "Show every metric also under the names that vLLM's dashboards query."),
    ("log_level", click.Choice(("debug", "info", "warning", "error")), "How much is logged."),
    ("enable_admin", bool, "Have the routes that steer the engine: /sleep, /pause, /abort_requests and others."),
    (
        "otlp_traces_endpoint",
        str,
        "Send OpenTelemetry spans of requests to this URL, such as http://host:4318/v1/traces.",
    ),
    ("log_format", click.Choice(logs.FORMATS), "Lines for people, or a JSON object a line."),
    ("access_log", bool, "Log a line per HTTP request, with its tokens and times."),
    ("log_requests", bool, "Log the prompts and parameters of requests."),
    ("max_log_len", click.IntRange(0), "Most characters, or token ids, of a prompt that are logged."),
)
"""Field of ServerOptions, type, help. Fields that hold several values are spelled in the singular."""


def flag(field: str) -> str:
    """The flag of a field of ServerOptions."""
    singular = field.removesuffix("s") if isinstance(DEFAULTS[field], tuple) else field
    return "--" + singular.replace("_", "-")


def server_options(command: Any, *, fields: Collection[str] | None = None) -> Any:
    """Add the flags of ServerOptions (or of some fields), each with its environment variable."""
    for field, kind, text in reversed(FLAGS):
        if fields is not None and field not in fields:
            continue
        default = DEFAULTS[field]
        settings: dict[str, Any] = {"is_flag": True} if kind is bool else {"type": kind}
        command = click.option(
            f"{flag(field)}/--no-{flag(field)[2:]}" if default is True else flag(field),
            field,
            default=default,
            multiple=isinstance(default, tuple),
            envvar="OCTAVO_" + flag(field).removeprefix("--").replace("-", "_").upper(),
            show_default=default not in (None, "", (), False),
            help=text,
            **settings,
        )(command)
    return command


DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(ServerOptions) if field.name != "max_queue"
}  # --max-queue is an engine flag


@click.command(cls=ConfigurableCommand)
@server_options
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, **flags: Any) -> None:
    """Serve MODEL over HTTP, OpenAI-compatible.

    Every flag can also be given as an environment variable (--max-model-len is OCTAVO_MAX_MODEL_LEN) or in the
    file of --config.
    """
    chosen = {name: flags.pop(name) for name in DEFAULTS}
    config = config_from(flags)
    options = ServerOptions(**chosen, max_queue=config.scheduler.max_queue)
    set_up_logging(options)
    # Imported late: `octavo serve --help` must not load a web server.
    import uvloop

    from octavo.server.lifecycle import serve as serve_until_signal

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ctx.exit(runner.run(serve_until_signal(config, options, on_ready=announce)))


def announce(service: Service, url: str) -> None:
    """Say on stdout that the server is ready, and how to try it."""
    info = service.info
    name = info.served_names[0]
    key = " -H 'Authorization: Bearer KEY'" if service.options.api_keys else ""
    target = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if url.startswith("unix:") else url
    if service.grpc_address is not None:
        click.echo(f"gRPC (octavo.v1.Octavo) at {service.grpc_address}")
    click.echo(
        f"Octavo serves {name} at {url}/v1 (platform {info.platform}, {info.dtype}, context {info.max_model_len})\n"
        f"  curl {target}/v1/completions{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}\''
    )
    if service.options.ui and not url.startswith("unix:"):
        click.echo(f"  or open {url}/ in a browser")
    sys.stdout.flush()


def set_up_logging(options: ServerOptions) -> None:
    """One handler on stderr for our loggers and uvicorn's, which is quiet unless it has something to say."""
    level = options.log_level.upper()
    logs.set_up(logging.WARNING, form=options.log_format)
    logging.getLogger("octavo").setLevel(level)
    logging.getLogger("uvicorn.error").setLevel("DEBUG" if level == "DEBUG" else "WARNING")
    for name, wanted in (("octavo.access", options.access_log), ("octavo.requests", options.log_requests)):
        logging.getLogger(name).setLevel("INFO" if wanted else "WARNING")
