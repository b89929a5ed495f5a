"""The adapter's part of the `remote::trl_remote` block in run_fsdp.yaml; the service reads the rest of the block."""

from __future__ import annotations

import math
from typing import Any

from pydantic import AliasChoices, ConfigDict, Field, SecretStr, field_validator, model_validator

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.requests.choices import nearest

from .address import DEFAULT_URL, checked_url


class TrlRemoteConfig(Documented):
    """Settings of the adapter. Other keys belong to the service, which refuses unknown ones.

    Misspelled keys of the adapter are refused here: on another machine than the service's nothing else reads them.
    """

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

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelled(cls, values: Any) -> Any:
        own = list(cls.model_fields)
        for name in values if isinstance(values, dict) else ():
            # Nearer than elsewhere: `tokens` and `convert_timeout` are settings of the service.
            if name not in (*own, "token") and (close := nearest(name, own, alike=0.9)):
                raise ValueError(f"{name} is not a setting{close} (docs/reference/remote.md lists the adapter's)")
        return values

    @field_validator("url", mode="before")
    @classmethod
    def _url(cls, value: Any) -> Any:
        # `${env.TRL_SERVICE_URL:=}` becomes null.
        return checked_url(value) if isinstance(value, str) and value else value or DEFAULT_URL

    @field_validator("api_token", mode="before")
    @classmethod
    def _no_token_when_empty(cls, value: Any) -> Any:
        return value or None
