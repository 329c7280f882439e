"""The certificate of the service, for connections over TCP."""

import ssl
from pathlib import Path

from draftstore.errors import LookupServiceError


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the context for encrypted connections (TLS 1.2 and 1.3)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asks for a passphrase
    except OSError as error:
        files = f"--tls-cert {certificate}" + (f" with --tls-key {key}" if key else "")
        raise LookupServiceError(
            f"{files} cannot be used ({error.strerror or error}): expected a certificate and its private key, in PEM "
            "and without a passphrase"
        ) from None
    return context
