"""Real certificates, created by openssl for the duration of a test."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")


class Certificate(NamedTuple):
    """A certificate that signs itself, and its key."""

    file: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return the context of a server with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self.key)
        return context


def make_certificate(
    folder: Path, name: str = "server", host: str = "DNS:localhost,IP:127.0.0.1"
) -> Certificate:
    """Make a certificate for some names."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", f"subjectAltName={host}", "-out", str(made.file), "-keyout", str(made.key),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return made
