"""Certificates of servers that tests start."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(
    directory: Path, host: str = "127.0.0.1", days: tuple[int, int] = (-1, 1), passphrase: bytes | None = None
) -> tuple[Path, Path]:
    """A self-signed certificate for a host, valid from and until so many days from now, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "head")])
    now = datetime.datetime.now(datetime.UTC)
    alternative: x509.GeneralName
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = directory / f"{host}{days[1]}.pem", directory / f"{host}{days[1]}.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return files
