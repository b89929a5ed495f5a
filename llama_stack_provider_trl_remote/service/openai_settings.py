"""Names of models in OpenAI's fine-tuning API, and what each of them stands for here."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.requests.options import Priority
from llama_stack_provider_trl.specs.exact import ExactValues

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
"""Without colons, which part the names of fine-tuned models."""


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


class OpenAISettings(_OpenAIBlock):
    """OpenAI's fine-tuning API."""

    models: dict[ModelName, OpenAIModel] = Field(default_factory=dict, max_length=1000)
    """Name that a client sends as `model` -> what it stands for. Other names are refused."""
