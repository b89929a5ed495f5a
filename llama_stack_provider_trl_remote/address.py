"""Validation of a service's address and token, without the models of settings."""

from __future__ import annotations

from urllib.parse import urlsplit

from llama_stack_provider_trl.system.token_file import checked_token as checked_token

DEFAULT_URL = "http://127.0.0.1:8322"


def checked_url(
    url: str, of: str = "the training service", such_as: str = DEFAULT_URL, token: str = "TRL_SERVICE_TOKEN"
) -> str:
    """Validate a service's address. Returns it without a trailing slash or `/v1`. Raises ValueError: it is not an
    http(s) URL, or carries a user name, a query or a fragment.

    Args:
        of, such_as, token: whose address it is, an example, and the variable of its token, for the error.
    """
    found = f"one with a password in it; the token belongs into {token}" if "@" in url else repr(url)
    expected = f"expected the address of {of}, such as {such_as}, found {found}"
    try:
        parts = urlsplit(url.strip())
        whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from error
    if parts.scheme not in ("http", "https") or not whole or "@" in url or parts.query or parts.fragment:
        raise ValueError(expected)
    return url.strip().rstrip("/").removesuffix("/v1")
