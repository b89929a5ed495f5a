"""Requests for jobs that do not train: a class for each kind of them, in the table `KINDS`.

A class is all that others know of a kind: the calls and their bodies, pipelines, submissions and the client read it.
`untrained` resolves them, with the base models, options, devices and limits that trainings have. What training alone
has is refused by name.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from ..documented import Documented
from ..errors import InvalidRequest
from ..specs.answer_checks import AnswerCheck, refuse_unusable
from ..specs.exports import ExportSpec, ExportTarget, GgufType, destination_of
from ..specs.harness import HarnessSpec
from ..specs.merge import ADAPTER_METHODS, MODEL_METHODS, PRUNING_METHODS, MergeInput, MergeMethod, MergeSpec
from ..specs.methods import Call
from ..specs.names import CheckedNames
from ..specs.promotion import PromotionCondition
from ..specs.work import (
    MERGING,
    OF_JOB,
    CheckedAnswering,
    Engine,
    EnsembleMember,
    EvaluateSpec,
    ExportWork,
    FurtherModel,
    GenerateSpec,
    MergeWork,
    Work,
)
from .bases import Base, NamedModel
from .bodies import COUNT
from .harness import Harness

NO_ROWS = "none"
"""The dataset of a job that reads no rows."""
MOST_WEIGHT = 1e6
"""Of a model of an ensemble; the least is 0."""
_MOST_SAMPLES = 1000
_OF_ANSWERS = ("max_new_tokens", "temperature", "top_p", "seed", "engine", "checkpoint_dir")
"""Fields of an evaluation that only checks of answers read."""
_OF_ROWS = ("dataset_id", "reference_model", "max_seq_length", "checks", *_OF_ANSWERS[:-1])
"""Fields of an evaluation that tasks of a harness leave nothing to, beside an `algorithm` other than sft."""


class Reads(NamedTuple):
    """What a job reads that does not train, and how it computes with it."""

    model: NamedModel
    """Its own model, or the first of several."""
    dataset_id: str = NO_ROWS
    batch_size: int = 1
    dtype: str | None = None
    """None: by the device."""
    max_seq_length: int | None = None
    """Tokens of a row; None: the service's."""
    reference_model: str | None = None
    """Not None: pairs are measured as DPO's, against this model."""


class _Kind(Documented, CheckedNames):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


COMMON_OPTIONS = ("after", "cancel_with", "device", "max_duration", "priority", "retries")
"""Provider options of all jobs that do not train."""
RESOURCES, RANKS = "resources", "nproc_per_node"
"""Of those that may run on other machines; that compute with a model, in several processes."""


class WorkRequest(_Kind):
    """A job that does not train."""

    kind: ClassVar[str]
    """The name of its kind: of its call, below /v1/post-training, and in pipelines."""
    options: ClassVar[tuple[str, ...]] = tuple(sorted((*COMMON_OPTIONS, RESOURCES, RANKS)))
    """Its provider options."""

    job_uuid: str
    """Name of the job: letters, digits, `.`, `_`, `-`, at most 128."""
    if TYPE_CHECKING:  # each kind has the field, behind its own and with a text of its own
        checkpoint_dir: str | None

    @abstractmethod
    def reads(self) -> Reads:
        """What the job reads. Raises InvalidRequest: it is not said, or contradicts itself."""

    def named(self) -> list[tuple[str, str]]:
        """The fields that name models beside the job's own, or several in its place, with their values. Raises
        InvalidRequest: no model is named, or several that exclude one another."""
        return []

    def one_tokenizer(self, found: Sequence[Base]) -> str | None:
        """What to do where the models of `named` have different tokenizers; None: they may."""
        return None

    @abstractmethod
    def work(self, found: Sequence[Base] = ()) -> Work:
        """What the job does. Raises InvalidRequest: a field is missing or would be ignored, or a value is not
        supported.

        Args:
            found: what each of the models of `named` is.
        """

    def conditions(self) -> Sequence[PromotionCondition]:
        """What evaluations must have found before the job writes anything."""
        return ()


class GenerateOutput(_Kind):
    """What becomes of the answers."""

    dataset_id: str = Field(min_length=1, max_length=512)
    """Name under which they are registered as a dataset; no registered one has it."""


class GenerateRequest(WorkRequest):
    """A job that answers the prompts of a dataset."""

    kind = "generate"

    model: str
    """Who answers: a model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    dataset_id: str = Field(max_length=512)
    """The registered dataset with the prompts."""
    output: GenerateOutput
    """What becomes of the answers: {dataset_id}."""
    max_new_tokens: int = Field(256, gt=0, le=10**5)
    """Tokens of an answer at most."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Divides the logits before a token is chosen; 0: the most likely token each time."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Each token is chosen among the most likely ones whose probabilities together reach this."""
    seed: int = Field(42, ge=0, lt=2**31)
    """With the numbers of row and sample it decides every choice."""
    samples_per_prompt: int = Field(1, gt=0, le=_MOST_SAMPLES)
    """Answers to each prompt."""
    batch_size: int = Field(8, **COUNT)
    """Answers that are computed together."""
    dtype: str | None = None
    """bf16, fp32 or, on cuda, fp16. Default: bf16 on cuda, else fp32."""
    engine: Engine = "transformers"
    """transformers, or vllm: faster with many prompts, where the operator has set `vllm_python`."""
    checkpoint_dir: str | None = None
    """Where the answers are written: relative to the data directory, or absolute inside an allowed root."""

    def work(self, found: Sequence[Base] = ()) -> GenerateSpec:
        if self.output.dataset_id.startswith(OF_JOB):
            hint = f"{OF_JOB}NAME means the rows that the job NAME makes: choose another name"
            raise InvalidRequest("output.dataset_id", self.output.dataset_id, hint)
        _refuse_ignored_sampling(self.temperature, top_p=self.top_p, samples_per_prompt=self.samples_per_prompt)
        return GenerateSpec(
            output_dataset_id=self.output.dataset_id,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            samples_per_prompt=self.samples_per_prompt,
            engine=self.engine,
        )

    def reads(self) -> Reads:
        model = NamedModel("model", self.model, self.job_uuid)
        return Reads(model, self.dataset_id, self.batch_size, self.dtype)


class EnsembleModel(_Kind):
    """One of the models of an ensemble."""

    model: str
    """A model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    weight: float = Field(1.0, ge=0, le=MOST_WEIGHT, allow_inf_nan=False)
    """Its share in the mean of the probabilities, which is divided by the sum of all weights."""


class EvaluateRequest(WorkRequest):
    """A job that evaluates a model, or an ensemble, on a dataset's rows."""

    kind = "evaluate"

    model: str | None = None
    """What is evaluated: a model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    models: list[EnsembleModel] | None = Field(None, min_length=1, max_length=64)
    """In place of `model`, with algorithm sft and no checks: an ensemble, [{model, weight}]. Its probability of each
    token is the weighted mean of those of its models, which have the same tokenizer."""
    dataset_id: str | None = Field(None, max_length=512)
    """The registered dataset with the rows, or with algorithm sft and no checks `job:NAME`, those that a job will have
    made. Required without `harness`."""
    algorithm: Call = "sft"
    """sft: loss, perplexity and accuracy of tokens; dpo: preferences, against `reference_model`."""
    reference_model: str | None = Field(None, min_length=1)
    """dpo: the model before training, a model id or a directory."""
    max_seq_length: int | None = Field(None, gt=1, le=10**7)
    """Tokens of a row; longer ones are cut. Default: the service's."""
    batch_size: int = Field(4, **COUNT)
    """Rows, or pairs, that are computed together."""
    dtype: str | None = None
    """bf16, fp32 or, on cuda, fp16. Default: bf16 on cuda, else fp32."""
    checks: list[AnswerCheck] | None = Field(None, min_length=1, max_length=32)
    """Not the loss is measured: the prompts are answered, and each answer is checked."""
    max_new_tokens: int = Field(256, gt=0, le=10**5)
    """Checks: tokens of an answer at most."""
    temperature: float = Field(0.0, ge=0, le=100)
    """Checks: divides the logits before a token is chosen; 0: the most likely token each time."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Checks: each token is chosen among the most likely ones whose probabilities together reach this."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Checks: with the number of the row it decides every choice."""
    engine: Engine = "transformers"
    """Checks: what computes the answers, transformers or vllm (as in a generate job)."""
    checkpoint_dir: str | None = None
    """Checks, harness: where the answers, or the measures of tasks, are written; relative to the data directory, or
    absolute inside an allowed root."""
    harness: Harness | None = None
    """In place of a dataset: tasks of lm-evaluation-harness, {tasks, num_fewshot, limit ...}."""

    def work(self, found: Sequence[Base] = ()) -> EvaluateSpec:
        named = self.named()
        if self.harness is not None:
            return EvaluateSpec(harness=self._tasks(self.harness))
        if self.dataset_id is None:
            hint = "name the registered dataset with the rows, or in `harness` tasks, which have rows of their own"
            raise InvalidRequest("dataset_id", None, hint)
        if self.checks is not None:
            return EvaluateSpec(answers=self._answering(self.checks, found))
        for name in _OF_ANSWERS:
            if name in self.model_fields_set:
                hint = "it concerns answers, and without checks none are made: leave it out, or send checks"
                raise InvalidRequest(name, getattr(self, name), hint)
        if self.algorithm == "dpo" and self.reference_model in (None, self.model):
            hint = "preferences are measured against another model: name the one before training"
            raise InvalidRequest("reference_model", self.reference_model, hint)
        if self.algorithm == "sft" and self.reference_model is not None:
            hint = "only pairs with chosen and rejected are compared with one: leave it out, or set algorithm to dpo"
            raise InvalidRequest("reference_model", self.reference_model, hint)
        return self._ensemble(found) if named else EvaluateSpec()

    def named(self) -> list[tuple[str, str]]:
        """The models of an ensemble, or the judges of one model's answers. Raises InvalidRequest: neither a model nor
        an ensemble is named, or both, or one that cannot be measured so."""
        if self.models is None:
            if self.model is None:
                hint = "name what is evaluated, or in `models` several, whose probabilities are averaged"
                raise InvalidRequest("model", None, hint)
            judges = [(number, one) for number, one in enumerate(self.checks or ()) if one.type == "judge"]
            return [(f"checks.{number}.model", one.model) for number, one in judges if one.model is not None]
        names = [one.model for one in self.models]
        if self.model is not None:
            hint = "`model` names what is evaluated already: leave one of them out"
        elif self.checks is not None:
            hint = "answers are those of one model: leave the checks out, or name a model in `model`"
        elif self.harness is not None:
            hint = "tasks of a harness measure one model: name it in `model`"
        elif self.algorithm != "sft":
            hint = f"an ensemble is measured by algorithm sft, not by {self.algorithm}: name one model in `model`"
        elif not math.fsum(one.weight for one in self.models):
            hint = "the weight of one model at least is more than 0"
        else:
            return [(f"models.{number}.model", name) for number, name in enumerate(names)]
        raise InvalidRequest("models", names, hint)

    def one_tokenizer(self, found: Sequence[Base]) -> str | None:
        return None if self.models is None else "name models with the same tokenizer"

    def _ensemble(self, found: Sequence[Base]) -> EvaluateSpec:
        """The evaluation of an ensemble whose models are `found`."""
        models = self.models or []
        total = math.fsum(one.weight for one in models)
        members = [
            EnsembleMember(**_further(base), weight=one.weight / total) for one, base in zip(models, found, strict=True)
        ]
        return EvaluateSpec(members=tuple(members))

    def _tasks(self, harness: Harness) -> HarnessSpec:
        for name in ("algorithm", *_OF_ROWS):
            if name in self.model_fields_set and (value := getattr(self, name)) not in ("sft", None):
                hint = "tasks of a harness have rows, prompts and measures of their own: leave it out"
                raise InvalidRequest(name, value, hint)
        return harness.spec()

    def _answering(self, checks: list[AnswerCheck], judges: Sequence[Base]) -> CheckedAnswering:
        for name in ("algorithm", "reference_model", "max_seq_length"):
            if (value := getattr(self, name)) not in ("sft", None):
                hint = "with checks answers to whole prompts are measured, and nothing else: leave it out"
                raise InvalidRequest(name, value, hint)
        _refuse_ignored_sampling(self.temperature, top_p=self.top_p)
        refuse_unusable(checks, "checks")
        sampling = {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_p", "seed", "engine")}
        models = [FurtherModel(**_further(base)) for base in judges]
        return CheckedAnswering(**sampling, samples_per_prompt=1, checks=tuple(checks), judges=tuple(models))

    def reads(self) -> Reads:
        field, model = self.named()[0] if self.model is None else ("model", self.model)
        return Reads(
            NamedModel(field, model, self.job_uuid),
            self.dataset_id or NO_ROWS,
            self.batch_size,
            self.dtype,
            self.max_seq_length,
            self.reference_model,
        )


class MergedModel(_Kind):
    """One of the models, or adapters, that are merged."""

    model: str
    """A model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Its weight."""


class MergeRequest(WorkRequest):
    """A job that merges models, or adapters, into one."""

    kind = "merge"
    options = tuple(sorted((*COMMON_OPTIONS, RESOURCES)))  # it is one process

    models: list[MergedModel] = Field(min_length=1, max_length=64)
    """What is merged: [{model, weight}]."""
    method: MergeMethod = "linear"
    """linear, slerp (two models or adapters), ties, dare_linear, dare_ties, cat (adapters)."""
    base: str | None = None
    """ties and dare of whole models: the model from which they were trained, named as those are."""
    density: float | None = Field(None, gt=0, le=1)
    """ties and dare: share of each weight's differences that is kept."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Decides which differences dare keeps."""
    merged_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the result. Default: that of the first model."""
    checkpoint_dir: str | None = None
    """Where the result is written: relative to the data directory, or absolute inside an allowed root."""

    def reads(self) -> Reads:
        return Reads(NamedModel(*self.named()[0], self.job_uuid))

    def one_tokenizer(self, found: Sequence[Base]) -> str | None:
        return None if any(one.adapter for one in found) else "merge models with the same tokenizer"

    def work(self, found: Sequence[Base] = ()) -> MergeWork:
        adapters = [one.adapter for one in found]
        if len({one is None for one in adapters}) > 1:
            name = self.named()[next(number for number, one in enumerate(adapters) if one is not None)][1]
            raise InvalidRequest("models", name, "it is an adapter, and others are whole models: merge one kind")
        of_adapters = adapters[0] is not None
        methods = ADAPTER_METHODS if of_adapters else MODEL_METHODS
        if self.method not in methods:
            what = "adapters" if of_adapters else "whole models"
            raise InvalidRequest("method", self.method, f"{what} are merged by one of {', '.join(methods)}")
        prunes = self.method in PRUNING_METHODS
        for name, is_needed in (("base", prunes and not of_adapters), ("density", prunes)):
            if (getattr(self, name) is not None) != is_needed:
                hint = f"method {self.method} {'needs' if is_needed else 'has'} {'it' if is_needed else 'none'}"
                raise InvalidRequest(name, getattr(self, name), hint)
        if self.method == "slerp" and len(self.models) != 2:
            raise InvalidRequest("method", "slerp", f"it merges two models, {len(self.models)} are named")
        is_divided = self.method == "slerp" or (self.method == "linear" and not of_adapters)
        if is_divided and (total := math.fsum(one.weight for one in self.models)) <= 0:
            hint = f"the weights of the models add up to {total:g}, and each is divided by it: expected more than 0"
            raise InvalidRequest("models.0.weight", self.models[0].weight, hint)
        sources = [(base.adapter or base.source).alone() for base in found]
        inputs = zip(sources, self.models, strict=False)
        return MergeWork(
            merge=MergeSpec(
                inputs=tuple(MergeInput(**dict(source), weight=one.weight) for source, one in inputs),
                output=Path(MERGING),
                method=self.method,
                base=sources[-1] if self.base is not None else None,
                density=self.density,
                seed=self.seed,
                dtype=self.merged_dtype,
            ),
            of_adapters=of_adapters,
        )

    def named(self) -> list[tuple[str, str]]:
        found = [(f"models.{number}.model", one.model) for number, one in enumerate(self.models)]
        return [*found, *([("base", self.base)] if self.base is not None else [])]


class ExportRequest(WorkRequest):
    """A job that exports a model, and proves that the export answers as it does."""

    kind = "export"
    options = COMMON_OPTIONS  # it is one process, here

    model: str
    """What is exported: `job:NAME`, `job:NAME/CHECKPOINT`, a directory of a model or an adapter, or a model id."""
    to: ExportTarget
    """safetensors, gguf, ollama, lora-gguf (the adapter alone), vllm."""
    gguf_type: GgufType | None = None
    """Of the weights in a GGUF file: f32, f16, bf16, q8_0 (of an adapter not). Default: that of the model's own files,
    of an adapter f32."""
    promote_if: list[PromotionCondition] | None = Field(None, min_length=1, max_length=64)
    """What evaluations must have found, or nothing is written: [{evaluation, metric, at_least ...}]. The job waits for
    them."""
    upload_to: str | None = None
    """Where the export is sent once it is proven, within the configured export_destinations: hf://OWNER/NAME, a
    repository of the hub, private where it is new; s3://BUCKET/PATH."""
    checkpoint_dir: str | None = None
    """Where the export is written: relative to the data directory, or absolute inside an allowed root."""

    def reads(self) -> Reads:
        return Reads(NamedModel("model", self.model, self.job_uuid))

    def conditions(self) -> Sequence[PromotionCondition]:
        return self.promote_if or ()

    def work(self, found: Sequence[Base] = ()) -> ExportWork:
        if self.gguf_type == "q8_0" and self.to == "lora-gguf":
            hint = "the pairs of an adapter are too narrow for its blocks of 32 weights: use f32, f16 or bf16"
            raise InvalidRequest("gguf_type", self.gguf_type, hint)
        if self.gguf_type is not None and self.to in ("safetensors", "vllm"):
            hint = f"{self.to} keeps the type of the model's own files: leave it out, or export to gguf"
            raise InvalidRequest("gguf_type", self.gguf_type, hint)
        if self.upload_to is not None:
            try:
                destination_of(self.upload_to)
            except ValueError as error:
                raise InvalidRequest("upload_to", self.upload_to, str(error)) from error
        spec = ExportSpec(target=self.to, gguf_type=self.gguf_type, upload_to=self.upload_to)
        return ExportWork(export=spec, promote_if=tuple(self.conditions()))


KINDS: dict[str, type[WorkRequest]] = {
    one.kind: one for one in (GenerateRequest, EvaluateRequest, MergeRequest, ExportRequest)
}
"""Kind -> its requests."""
NO_SUCH_KIND = f"a job that trains has no kind; others are: {', '.join(KINDS)}"


def _further(base: Base) -> dict[str, Any]:
    """The fields of a FurtherModel."""
    return {**dict(base.source), "adapter": base.adapter, "lora": base.lora}


def _refuse_ignored_sampling(temperature: float, **given: float) -> None:
    """Refuse what a greedy choice ignores. Raises InvalidRequest."""
    for name, value in given.items():
        if not temperature and value != 1:
            hint = "at temperature 0 every answer is made of the most likely tokens: leave it out, or set one"
            raise InvalidRequest(name, value, hint)
