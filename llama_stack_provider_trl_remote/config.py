"""The adapter's part of the `remote::trl_remote` block in run_fsdp.yaml; the service reads the rest of the block."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from pydantic import AliasChoices, ConfigDict, Field, SecretStr, field_validator

from llama_stack_provider_trl.documented import Documented

DEFAULT_URL = "http://127.0.0.1:8322"


def checked_url(url: str) -> str:
    """Validate a service's address. Returns it without a trailing slash or `/v1`.

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
    """A token without surrounding white space (a file's last line ends with a newline); None: there is none.

    Raises:
        ValueError: no HTTP header can carry it.
    """
    found = (token or "").strip()
    if not found.isprintable():
        raise ValueError("the token has a character that cannot be printed, such as a newline: set it as one line")
    return found or None


class TrlRemoteConfig(Documented):
    """Settings of the adapter. Other keys belong to the service, which refuses unknown ones."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    url: str = DEFAULT_URL
    """Address of the service."""
    api_token: SecretStr | None = Field(None, validation_alias=AliasChoices("api_token", "token"))
    """Token of every request. Llama Stack hides a key of this name in its log and answers, but shows `token`."""
    connect_timeout: float = Field(5.0, gt=0, lt=math.inf)
    """Seconds to wait for a connection."""
    read_timeout: float = Field(60.0, gt=0, lt=math.inf)
    """Seconds without data after which the wait for an answer ends."""
    total_timeout: float = Field(120.0, gt=0, lt=math.inf)
    """Seconds that one request may take; an upload has a further second for every MiB."""
    submit_timeout: float = Field(900.0, gt=0, lt=math.inf)
    """Seconds that the service may take to check the datasets of a job; the POST is repeated meanwhile."""

    @field_validator("url", mode="before")
    @classmethod
    def _url(cls, value: Any) -> Any:
        # `${env.TRL_SERVICE_URL:=}` becomes null.
        return checked_url(value) if isinstance(value, str) and value else value or DEFAULT_URL

    @field_validator("api_token", mode="before")
    @classmethod
    def _no_token_when_empty(cls, value: Any) -> Any:
        return value or None
