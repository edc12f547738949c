"""The server's certificate, of HTTPS and of gRPC: read at the start, and again when it is to be reloaded."""

from __future__ import annotations

import ssl

from octavo.errors import ConfigError
from octavo.server.options import ServerOptions


def ssl_context(options: ServerOptions) -> ssl.SSLContext:
    """TLS as the options say. Raises ConfigError naming the flag."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificates(context, options)
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {options.ssl_ca_certs} cannot be used: {error}") from None
    context.verify_mode = ssl.VerifyMode[f"CERT_{options.ssl_cert_reqs.upper()}"]
    return context


def load_certificates(context: ssl.SSLContext, options: ServerOptions) -> None:
    """(Re)read the server's certificate; connections made from now on show it. Raises ConfigError."""
    assert options.ssl_certfile is not None
    password = options.ssl_keyfile_password or ""  # else OpenSSL would ask on the terminal
    try:
        # Tried on a context of its own first: a failed load may leave a certificate without its key.
        for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            target.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=password)
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {options.ssl_certfile} with --ssl-keyfile {options.ssl_keyfile}"
        raise ConfigError(f"{files} cannot be used: {error}") from None
