"""Bodies of OpenAI's fine-tuning API. What is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.requests.options import RESERVED
from llama_stack_provider_trl.specs.names import CheckedElsewhere, CheckedNames, FreeText, problem_of_name

from ..service.datasets.part_uploads import MOST_PARTS

MARK = RESERVED
"""Key of a job's metadata, and of a dataset's, that has what OpenAI's API shows and nothing else has."""
_PAIRS, _KEY, _VALUE = 16, 64, 512
type Auto = Literal["auto"]


class _OpenAIBody(Documented, CheckedNames):
    model_config = ConfigDict(extra="forbid")


class Hyperparameters(_OpenAIBody):
    """Those of every method. `auto`, and what is left out: as `openai.models` has it for the model."""

    n_epochs: Annotated[int, Field(gt=0, le=50, strict=True)] | Auto | None = None
    """Passes over the training file."""
    batch_size: Annotated[int, Field(gt=0, le=4096, strict=True)] | Auto | None = None
    """Examples of an optimizer step."""
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000, strict=True)] | Auto | None = None
    """Multiplies the learning rate that `openai.models` has for the model and method."""


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[float, Field(gt=0, le=2, strict=True)] | Auto | None = None
    """How strongly the reference holds the model back."""


class SupervisedMethod(_OpenAIBody):
    hyperparameters: Hyperparameters | None = None
    """n_epochs, batch_size, learning_rate_multiplier."""


class DpoMethod(_OpenAIBody):
    hyperparameters: DpoHyperparameters | None = None
    """The same, and beta."""


class ReinforcementHyperparameters(Hyperparameters):
    compute_multiplier: Annotated[float, Field(gt=0, le=100, strict=True)] | Auto | None = None
    """Multiplies the answers to each prompt that `openai.models` has for the model."""
    eval_interval: Auto | None = None
    """auto: nothing is evaluated while it trains."""
    eval_samples: Auto | None = None
    """auto, as `eval_interval`."""
    reasoning_effort: Literal["default"] | None = None
    """default: the model thinks as its chat template has it."""


class ReinforcementMethod(_OpenAIBody):
    grader: Annotated[dict[str, Any], CheckedElsewhere()]
    """What rewards an answer: string_check, text_similarity, score_model, label_model, multi or, where the operator
    allows it, python."""
    hyperparameters: ReinforcementHyperparameters | None = None
    """The same, and compute_multiplier."""


class FineTuningMethod(_OpenAIBody):
    type: Literal["supervised", "dpo", "reinforcement"]
    """supervised, dpo or reinforcement."""
    supervised: SupervisedMethod | None = None
    """With type supervised."""
    dpo: DpoMethod | None = None
    """With type dpo."""
    reinforcement: ReinforcementMethod | None = None
    """With type reinforcement, which needs it."""

    @model_validator(mode="after")
    def _only_its_own(self) -> FineTuningMethod:
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"{name} is there, and type is {self.type!r}: send the block of that type only")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("reinforcement is missing: send {grader, hyperparameters} in it")
        return self


class CreateUpload(_OpenAIBody):
    bytes: int = Field(gt=0, strict=True)
    """Bytes of the whole file: as many have to be sent."""
    filename: str = Field(min_length=1, max_length=255)
    """Name of the file."""
    mime_type: str = Field(min_length=1, max_length=255)
    """Any: what the rows are, is read from them."""
    purpose: Literal["fine-tune"]
    """fine-tune, the only one here."""


class CompleteUpload(_OpenAIBody):
    part_ids: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1, max_length=MOST_PARTS)
    """Ids of the parts, in the order in which the file has them."""
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9A-Fa-f]{32}$")] | None = None
    """Of the whole file, in hexadecimal: compared with the parts."""


class CreatePermissions(_OpenAIBody):
    project_ids: list[Annotated[str, Field(max_length=512)]] = Field(min_length=1, max_length=100)
    """Refused: a service has no projects."""


class CreateFineTuningJob(_OpenAIBody):
    model: str = Field(min_length=1, max_length=512)
    """A name of `openai.models`, or a fine-tuned model, ft:..., whose adapter is trained further."""
    training_file: str = Field(min_length=1, max_length=512)
    """Id of an uploaded file."""
    validation_file: str | None = Field(None, min_length=1, max_length=512)
    """Id of an uploaded file to evaluate on: before each checkpoint, and at the end."""
    method: FineTuningMethod | None = None
    """How to train. Left out: supervised."""
    hyperparameters: Hyperparameters | None = None
    """Those of method supervised, where `method` is left out."""
    suffix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    """Part of the fine-tuned model's name: letters, digits, `.`, `_`, `-`."""
    seed: int | None = Field(None, ge=0, lt=2**31, strict=True)
    """Decides shuffling and the initial values of adapters. Left out: a random one."""
    metadata: Annotated[dict[str, str] | None, FreeText()] = Field(None, max_length=_PAIRS)
    """At most 16 texts of 512 characters, under names of 64."""
    integrations: Annotated[list[dict[str, Any]] | None, CheckedElsewhere()] = None
    """Refused, unless it is empty: the setting `trackers.default` names the trackers of jobs."""
    _job_id: str | None = None

    @property
    def job_id(self) -> str | None:
        """The job that it has become, for the audit log; None: none yet."""
        return self._job_id

    @job_id.setter
    def job_id(self, name: str) -> None:
        self._job_id = name

    @field_validator("metadata")
    @classmethod
    def _short_pairs(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (value or {}).items():
            if len(name) > _KEY or len(text) > _VALUE:
                raise ValueError(f"{name[:_KEY]!r}: a name has at most {_KEY} characters, and its text {_VALUE}")
            if problem := problem_of_name(name):
                raise ValueError(f"{name!r}: {problem}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"{name!r}: its text has half of a surrogate pair: send whole characters")
            if name == MARK:
                raise ValueError(f"the name {MARK!r} is reserved: choose another one")
        return value

    @field_validator("integrations")
    @classmethod
    def _no_integration(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if value:
            raise ValueError(
                "integrations of a request are not supported: leave it out; the operator names trackers of all jobs in "
                "the setting trackers.default"
            )
        return value

    @model_validator(mode="after")
    def _one_place_for_hyperparameters(self) -> CreateFineTuningJob:
        if self.method is not None and self.hyperparameters is not None:
            raise ValueError("hyperparameters and method are both there: send those of the method in `method`")
        return self
