"""TLS of the service."""

from __future__ import annotations

import ssl
from pathlib import Path

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: those that keep recorded traffic secret when the key is lost later. TLS 1.3 has no others."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and 1.3, without renegotiation, for clients that bring no certificate. Raises ValueError: the files
    cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password OpenSSL would ask the terminal for one, and wait.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise ValueError(
            f"tls_cert {certificate} and tls_key {key} cannot be used ({str(reason).replace('_', ' ').lower()}): "
            "expected a certificate in PEM, and its own key without a passphrase"
        ) from error
    return context
