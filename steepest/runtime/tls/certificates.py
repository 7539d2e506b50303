"""The certificate that a job makes for itself: one key pair, held by all of its processes."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field

from steepest.errors import ConfigurationError

_SECONDS = 20.0
_COMMAND = (
    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
    "-nodes", "-days", "3650", "-config", "/dev/stdin", "-keyout", "/dev/stdout",
    "-out", "/dev/stdout",
)  # fmt: skip
_ABOUT = b"""
[req]
distinguished_name = name
x509_extensions = uses
prompt = no
[name]
CN = steepest job
[uses]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
"""
_INSTEAD = (
    "install the openssl command on the driver's host, or give "
    "tls=TLSConfig(certificate=, key=, ca=) with a certificate of your own"
)


@dataclass(frozen=True)
class JobCertificate:
    """A self-signed certificate and its key, which both ends of a connection show and demand."""

    certificate: bytes  # PEM
    key: bytes = field(repr=False)  # PEM, not encrypted; never shown, logged or written to a disk


def make_certificate() -> JobCertificate:
    """Return a new certificate for ECDSA on P-256, made by the openssl command.

    The key comes through a pipe, and touches no file.

    Raises:
        ConfigurationError: there is no such command here, or it failed.
    """
    try:
        made = subprocess.run(
            _COMMAND, input=_ABOUT, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:  # neither shows what was printed
        raise ConfigurationError(
            f"tls=True: the job's certificate cannot be made: {type(error).__name__} of the "
            f"openssl command; {_INSTEAD}"
        ) from None
    blocks = {
        kind: block
        for block, kind in re.findall(
            rb"(-----BEGIN ([A-Z ]+)-----\n.*?-----END \2-----\n)", made.stdout, re.DOTALL
        )
    }
    if made.returncode != 0 or blocks.keys() != {b"CERTIFICATE", b"PRIVATE KEY"}:
        said = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigurationError(
            f"tls=True: the job's certificate cannot be made: the openssl command ended with "
            f"status {made.returncode}: {' '.join(said)[:200]}; {_INSTEAD}"
        )
    return JobCertificate(blocks[b"CERTIFICATE"], blocks[b"PRIVATE KEY"])
