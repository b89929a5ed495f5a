"""How another machine becomes a node."""

from __future__ import annotations

from urllib.parse import urlsplit


def how_to_add_a_node(url: str) -> str:
    """The command that makes another machine a node of the service at `url`."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return (
            "other machines cannot reach the service at this address; to serve them, start it with "
            "TRL_SERVICE_HOST=ADDRESS TRL_SERVICE_TOKEN=TOKEN ./scripts/run-remote-fsdp-server.sh --insecure "
            "(or with tls_cert and tls_key)"
        )
    joins = "another machine joins with: TRL_SERVICE_NODE_TOKEN=TOKEN NODE_RANK=1"
    script = "./scripts/run-remote-fsdp-server.sh"
    if urlsplit(url).scheme == "https":
        return (
            f"{joins} TRL_SERVICE_URL={url} SSL_CERT_FILE=CERTIFICATE {script} "
            "(CERTIFICATE: a copy of the service's tls_cert; not needed if an authority that is known there signed it)"
        )
    elsewhere = f"TRL_SERVICE_PORT={port} " if port not in (None, 8322) else ""
    return f"{joins} MASTER_ADDR={host} {elsewhere}{script}"
