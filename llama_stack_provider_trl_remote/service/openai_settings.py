"""Names of models in OpenAI's fine-tuning API, what each of them stands for here, and who is told how its jobs end."""

from __future__ import annotations

import base64
import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.requests.options import Priority
from llama_stack_provider_trl.specs.exact import AbsolutePath, ExactValues

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
"""Without colons, which part the names of fine-tuned models."""
WebhookEvent = Literal["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]
WEBHOOK_EVENTS: dict[JobState, WebhookEvent] = {
    JobState.completed: "fine_tuning.job.succeeded",
    JobState.failed: "fine_tuning.job.failed",
    JobState.cancelled: "fine_tuning.job.cancelled",
}
_KEY_BYTES = range(24, 65)
"""Of the key of a webhook, as Standard Webhooks has it."""


class _OpenAIBlock(Documented, ExactValues):
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True, protected_namespaces=()
    )


class OpenAIModel(_OpenAIBlock):
    """What a name of `openai.models` stands for."""

    model: str = Field(min_length=1, max_length=4096)
    """The local model: a directory or a model id, as jobs name it."""
    n_epochs: int = Field(3, gt=0, le=50)
    """What `auto` means for `n_epochs`."""
    batch_size: int = Field(8, gt=0, le=4096)
    """What `auto` means for `batch_size`: examples of an optimizer step."""
    learning_rate: float = Field(1e-4, gt=0, le=1)
    """Learning rate of method supervised where `learning_rate_multiplier` is 1, which is also what `auto` means."""
    dpo_learning_rate: float = Field(1e-5, gt=0, le=1)
    """The same for method dpo."""
    reinforcement_learning_rate: float = Field(1e-5, gt=0, le=1)
    """The same for method reinforcement."""
    num_generations: int = Field(8, ge=2, le=1000)
    """Answers to each prompt of method reinforcement where `compute_multiplier` is 1, which `auto` means, too."""
    max_completion_length: int = Field(512, gt=0, le=10**5)
    """Tokens of such an answer at most."""
    beta: float = Field(0.1, gt=0, le=2)
    """What `auto` means for `beta` of method dpo."""
    lora_rank: int | None = Field(16, gt=0, le=1024)
    """Rank of the LoRA adapters, on every linear layer of the blocks; null: every weight is trained."""
    lora_alpha: int = Field(32, gt=0, le=4096)
    """Scale of the adapters: alpha / rank."""
    micro_batch_size: int = Field(4, gt=0, le=4096)
    """Examples that a rank takes at once, at most; the others of an optimizer step are accumulated."""
    nproc_per_node: int = Field(1, gt=0, le=1024)
    """Processes that train a job together."""
    max_seq_length: int | None = Field(None, gt=1, le=10**7)
    """Tokens of an example; null: the setting `max_seq_length`."""
    priority: Priority | None = None
    """Priority of its jobs; null: the setting `priority`."""


def webhook_key(secret: str) -> bytes:
    """The key of a secret. Raises ValueError, without the secret: it is none."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else b""
    except ValueError:
        key = b""
    if len(key) not in _KEY_BYTES:
        raise ValueError(
            f"expected whsec_ and {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} random bytes as base64, such as "
            'echo "whsec_$(openssl rand -base64 32)" prints'
        )
    return key


class OpenAIWebhook(_OpenAIBlock):
    """Who is told how jobs of OpenAI's API end."""

    url: str = Field(max_length=2048)
    """Address that a POST is sent to for each event."""
    secret: SecretStr | None = None
    """What its POSTs are signed with: `whsec_` and base64, such as `${env.TRL_WEBHOOK_SECRET}`."""
    secret_file: AbsolutePath | None = None
    """File with the secret in place of `secret`; other users may not read it."""
    events: tuple[WebhookEvent, ...] = Field(tuple(WEBHOOK_EVENTS.values()), min_length=1)
    """What it is told of."""
    networks: tuple[str, ...] = ()
    """Networks that are not public, such as 10.1.0.0/16, which its host may lead to; none: public addresses only."""
    insecure: bool = False
    """Allow a url that begins with http: what is sent crosses the network in the clear."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        expected = "expected an address such as https://hooks.example.com/jobs, without user name and fragment"
        if not re.fullmatch(r"https?://[!-~]+", value) or re.search(r"[@#\\]", value):
            raise ValueError(expected)
        try:
            parts = urlsplit(value)
            is_whole = bool(re.fullmatch(r"[a-z0-9._:-]+", parts.hostname or "")) and parts.port != 0
        except ValueError as error:
            raise ValueError(expected) from error
        if not is_whole:
            raise ValueError(expected)
        return value

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            webhook_key(value.get_secret_value())
        return value

    @field_validator("networks")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{error}: expected a network such as 10.1.0.0/16") from error
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> OpenAIWebhook:
        if (self.secret is None) == (self.secret_file is None):
            raise ValueError("set secret or secret_file, which has what its POSTs are signed with")
        if self.url.startswith("http:") and not self.insecure:
            raise ValueError("its url has no TLS: use https, or set insecure: true")
        return self


class OpenAISettings(_OpenAIBlock):
    """OpenAI's fine-tuning API."""

    models: dict[ModelName, OpenAIModel] = Field(default_factory=dict, max_length=1000)
    """Name that a client sends as `model` -> what it stands for. Other names are refused."""
    webhooks: tuple[OpenAIWebhook, ...] = Field((), max_length=16)
    """Who is told how its jobs end."""

    @field_validator("webhooks")
    @classmethod
    def _distinct_addresses(cls, value: tuple[OpenAIWebhook, ...]) -> tuple[OpenAIWebhook, ...]:
        if len({webhook.url for webhook in value}) < len(value):
            raise ValueError("two webhooks have the same url: put their events into one")
        return value
