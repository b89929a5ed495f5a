"""The adapter's part of the `remote::trl_remote` block in run_fsdp.yaml; the service reads the rest of the block."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from pydantic import AliasChoices, ConfigDict, Field, SecretStr, field_validator

from llama_stack_provider_trl.documented import Documented

DEFAULT_URL = "http://127.0.0.1:8322"


def checked_url(url: str) -> str:
    """A service's address without a trailing slash or `/v1`.

    Raises:
        ValueError: it is not an http(s) URL, or carries a user name, a query or a fragment.
    """
    found = "one with a password in it; the token belongs into TRL_SERVICE_TOKEN" if "@" in url else repr(url)
    expected = f"expected the address of the training service, such as {DEFAULT_URL}, found {found}"
    try:
        parts = urlsplit(url.strip())
        whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from error
    if parts.scheme not in ("http", "https") or not whole or "@" in url or parts.query or parts.fragment:
        raise ValueError(expected)
    return url.strip().rstrip("/").removesuffix("/v1")


def checked_token(token: str | None) -> str | None:
    """A token without white space around it (a file's last line has an end); None: there is none.

    Raises:
        ValueError: no HTTP header can carry it.
    """
    found = (token or "").strip()
    if not found.isprintable():
        raise ValueError(
            "the token has a character in it that cannot be printed, such as a line's end: give it as one line"
        )
    return found or None


class TrlRemoteConfig(Documented):
    """What `remote::trl_remote` needs. Other keys belong to the service, which refuses those that it does not know."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    url: str = DEFAULT_URL
    """Address of the service."""
    api_token: SecretStr | None = Field(None, validation_alias=AliasChoices("api_token", "token"))
    """Sent with every request. Llama Stack hides a key of this name in its log and answers, `token` it shows."""
    connect_timeout: float = Field(5.0, gt=0, lt=math.inf)
    """Seconds to wait for a connection."""
    read_timeout: float = Field(60.0, gt=0, lt=math.inf)
    """Seconds that the service may be silent while its answer is awaited."""
    total_timeout: float = Field(120.0, gt=0, lt=math.inf)
    """Seconds that one request may take; uploads get a second more for every MiB."""
    submit_timeout: float = Field(900.0, gt=0, lt=math.inf)
    """Seconds that the service may take to check the datasets of a job; it is asked again meanwhile."""

    @field_validator("url", mode="before")
    @classmethod
    def _url(cls, value: Any) -> Any:
        # `${env.TRL_SERVICE_URL:=}` becomes null.
        return checked_url(value) if isinstance(value, str) and value else value or DEFAULT_URL

    @field_validator("api_token", mode="before")
    @classmethod
    def _no_token_when_empty(cls, value: Any) -> Any:
        return value or None
