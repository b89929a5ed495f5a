"""Resolves what a job begins with: a model, a checkpoint of another job (`job:NAME`), or a trained adapter.

The files of a checkpoint need not exist yet: the job waits for the other one, and its paths follow from that job's
specification.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidRequest
from ..specs.bases import MERGED_BASE, BaseJob
from ..specs.job import JobSpec, LoraSpec
from ..specs.model_source import AdapterSpec, AdapterUse, ModelSource
from ..system.model_directory import ModelDirectory
from .bodies import SupervisedFineTuneRequest
from .names import JOB_UUID_PATTERN
from .options import ProviderOptions
from .paths import absolute_path, may_be_read, resolve_base_model, resolve_trust
from .settings import Request, Settings

PREFIX = "job:"
RESULT = "ft:"
"""Begins the name under which chats know the result of a job: `ft:NAME` is `job:NAME/final`."""
_CHECKPOINT = r"final|merged|checkpoint-\d{1,12}"
_CONFIG = "adapter_config.json"
_TASK = "CAUSAL_LM"
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian"),
}
"""Settings of PEFT's LoRA with values that make no difference to an adapter that is trained; see `_lora_of`."""
_EMPTY = (
    *("alpha_pattern", "exclude_modules", "layer_replication", "layers_to_transform", "lora_bias", "megatron_config"),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)
"""Settings of PEFT's LoRA that a job has no field for."""


@dataclass(frozen=True)
class NamedJob:
    """The job that a request names as its base."""

    spec: JobSpec
    completed: bool
    checkpoints: tuple[str, ...]
    """Names of its listed checkpoints."""


@dataclass(frozen=True)
class Base:
    """What a job begins with."""

    source: ModelSource
    adapter: AdapterSpec | None = None
    """A trained adapter of `source`; None: none."""
    lora: LoraSpec | None = None
    """Settings of an adapter that is continued."""

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a JobSpec that begins with it; the settings of its adapter are a method's to choose."""
        return {"source": self.source, "adapter": self.adapter}

    @property
    def jobs(self) -> tuple[BaseJob, ...]:
        """Whose checkpoints it reads: the one that the request names, and that of the model below an adapter."""
        sources = [self.source] if self.adapter is None else [self.adapter, self.source]
        return tuple(source.made_by for source in sources if source.made_by is not None)


class NamedModel(NamedTuple):
    """A model as a request names it."""

    field: str
    value: str | None
    job_uuid: str
    """The job that the request submits."""


def model_of(request: Request) -> NamedModel:
    """The base model of a training."""
    if not isinstance(request, SupervisedFineTuneRequest) and request.model is None:
        return NamedModel("finetuned_model", request.finetuned_model, request.job_uuid)
    return NamedModel("model", request.model, request.job_uuid)


def base_job_of(model: NamedModel) -> str | None:
    """The job that a model names as `job:NAME`; None: it names none. Raises InvalidRequest: that is no name of a
    job."""
    name, value, own = model
    if value is None or not value.startswith(PREFIX):
        return None
    job_uuid = value.removeprefix(PREFIX).partition("/")[0]
    if not re.fullmatch(JOB_UUID_PATTERN, job_uuid) or value.endswith("/"):
        raise InvalidRequest(name, value, "send job:NAME, or job:NAME/CHECKPOINT, such as job:sft-1/checkpoint-100")
    if job_uuid == own:
        raise InvalidRequest(name, value, "a job cannot begin with its own result: name another job")
    return job_uuid


def is_adapter(model: NamedModel, settings: Settings, named: NamedJob | None) -> bool:
    """Whether a model is an adapter. Raises InvalidRequest."""
    name, value, _ = model
    if base_job_of(model) is None:
        return bool(value) and _adapter_config(name, value or "", settings) is not None
    if named is None or named.spec.lora is None or named.spec.work is not None:
        return False
    return checkpoint_of(name, value or "", named, wants_adapter=False) != "merged"


def resolve_base(
    model: NamedModel, settings: Settings, named: NamedJob | None = None, use: AdapterUse | None = None
) -> Base:
    """Decide what a job begins with. Raises InvalidRequest.

    Args:
        named: the job of `base_job_of`.
        use: the provider option `adapter`.
    """
    name, value, _ = model
    if base_job_of(model) is not None:
        assert value is not None
        if named is None:
            raise InvalidRequest(name, value, "there is no such job here: submit it first, or correct its name")
        base = _of_job(name, value, named, use, settings)
    elif value and (found := _adapter_config(name, value, settings)) is not None:
        base = _of_adapter(name, value, found, use, settings)
    else:
        base = Base(_source_of(name, value, settings))
    if use is not None and base.adapter is None:
        hint = f"{name} is a model and no adapter: leave it out, or name an adapter or a job that trained one"
        raise InvalidRequest("provider_options.adapter", use, hint)
    return base


def resolve_trained(
    model: NamedModel, options: ProviderOptions, settings: Settings, named: NamedJob | None = None
) -> Base:
    """As `resolve_base`, for a job that trains the model. Raises InvalidRequest, as `_refuse_other_machines`, too."""
    base = resolve_base(model, settings, named, options.adapter)
    if base.adapter is not None and base.adapter.use == "merge":
        _refuse_other_machines(model, options, settings)
    return base


def resolve_read(
    model: NamedModel, settings: Settings, named: NamedJob | None = None, use: AdapterUse = "continue"
) -> Base:
    """As `resolve_base`, for a job that does not train the model: nobody has to choose the use of an adapter.

    Args:
        use: continue, an adapter is read as it is; merge, it is merged into its model.
    """
    return resolve_base(model, settings, named, use if is_adapter(model, settings, named) else None)


def served_job_of(name: str, value: str) -> tuple[str, str] | None:
    """The job whose checkpoint a chat names, and that name as `job:NAME` or `job:NAME/CHECKPOINT`; None: it names no
    job. Raises InvalidRequest: that is no name of a job."""
    if value.startswith(RESULT):
        # Of ft:MODEL:trl:SUFFIX:NAME, OpenAI's form, the last part counts; ckpt-step-N behind it is a checkpoint.
        job_uuid, rest = value.removeprefix(RESULT), ""
        if ":" in job_uuid:
            *_, before, job_uuid = job_uuid.split(":")
            if found := re.fullmatch(r"ckpt-step-(0|[1-9][0-9]*)", job_uuid):
                job_uuid, rest = before, f"/checkpoint-{found[1]}"
    elif value.startswith(PREFIX):
        job_uuid, slash, rest = value.removeprefix(PREFIX).partition("/")
        rest = slash + rest
    else:
        return None
    if not re.fullmatch(JOB_UUID_PATTERN, job_uuid) or rest == "/":
        hint = "send ft:NAME (a job's result), job:NAME/CHECKPOINT, such as job:sft-1/checkpoint-100, or a model"
        raise InvalidRequest(name, value, hint)
    return job_uuid, f"{PREFIX}{job_uuid}{rest}"


def resolve_served(name: str, value: str, settings: Settings, named: NamedJob | None = None) -> Base:
    """Decide which model a chat is answered by, and with which adapter. Raises InvalidRequest.

    Args:
        named: the job of `served_job_of`; None: `value` names none.
    """
    if named is not None:
        is_adapter = named.spec.lora is not None and named.spec.work is None and not value.endswith("/merged")
        return _of_job(name, value, named, "continue" if is_adapter else None, settings)
    if (found := _adapter_config(name, value, settings)) is not None:
        return _of_adapter(name, value, found, "continue", settings)
    return Base(_source_of(name, value, settings))


def _source_of(name: str, value: str | None, settings: Settings) -> ModelSource:
    model = resolve_base_model(name, value, settings)
    return ModelSource(model=model, **resolve_trust(model, settings))


def _of_job(name: str, value: str, named: NamedJob, use: AdapterUse | None, settings: Settings) -> Base:
    job = named.spec
    if job.does.merging is not None:
        return _of_merge(name, value, job, use, settings)
    if why := job.does.why_no_model:
        raise InvalidRequest(name, value, f"job {job.job_uuid!r} {why}")
    if job.trains_reward:
        hint = f"job {job.job_uuid!r} trains a reward model, which writes no text: name one that trains another method"
        raise InvalidRequest(name, value, hint)
    checkpoint = checkpoint_of(name, value, named, wants_adapter=use is not None)
    path, base_job = job.checkpoint_dir / checkpoint, BaseJob(job_uuid=job.job_uuid, checkpoint=checkpoint)
    if job.lora is None or checkpoint == "merged":
        if use is not None:
            hint = f"{value} is a whole model and no adapter: leave it out"
            raise InvalidRequest("provider_options.adapter", use, hint)
        return Base(made_source(path, base_job, settings))
    if use is None:
        raise InvalidRequest(
            name,
            value,
            f"job {job.job_uuid!r} trains an adapter: set the provider option adapter to 'continue' (train it further) "
            "or 'merge' (into its base model)",
        )
    below = ModelSource(model=job.source.model, made_by=job.source.made_by, **resolve_trust(job.source.model, settings))
    if job.adapter is not None and job.adapter.use == "merge":
        merged = BaseJob(job_uuid=job.job_uuid, checkpoint=MERGED_BASE)
        below = ModelSource(model=str(job.checkpoint_dir / MERGED_BASE), made_by=merged)
    return Base(
        below,
        AdapterSpec(model=str(path), use=use, made_by=base_job),
        job.lora if use == "continue" else None,
    )


def made_source(directory: Path, job: BaseJob, settings: Settings) -> ModelSource:
    """The model that is a job's checkpoint. Raises InvalidRequest."""
    return ModelSource(model=str(directory), made_by=job, **resolve_trust(str(directory), settings))


def _of_merge(name: str, value: str, job: JobSpec, use: AdapterUse | None, settings: Settings) -> Base:
    """The result of a merge."""
    given, path = value.removeprefix(PREFIX).partition("/")[2].removeprefix(f"{job.output_name}-"), "final"
    if job.does.makes_adapter or given not in ("", path) or use is not None:
        what = (
            "an adapter: name its directory, once it is complete" if job.does.makes_adapter else "a model, and `final`"
        )
        raise InvalidRequest(name, value, f"job {job.job_uuid!r} merges, and its result is {what}")
    base_job = BaseJob(job_uuid=job.job_uuid, checkpoint=path)
    return Base(made_source(job.checkpoint_dir / path, base_job, settings))


def checkpoint_of(name: str, value: str, named: NamedJob, *, wants_adapter: bool) -> str:
    """The name of the checkpoint that a base names, or of the one that is meant where it names none."""
    job = named.spec
    given = value.removeprefix(PREFIX).partition("/")[2]
    exports = ["final", "merged"] if job.lora and job.train.merge_adapter else ["final"]
    if not given:
        return "final" if wants_adapter else exports[-1]
    checkpoint = given.removeprefix(f"{job.output_name}-")
    if not re.fullmatch(_CHECKPOINT, checkpoint):
        hint = (
            f"{given!r} is no checkpoint: name final, merged or checkpoint-N, or an identifier of the job's checkpoints"
        )
        raise InvalidRequest(name, value, hint)
    if checkpoint == "merged" and checkpoint not in exports:
        hint = f"job {job.job_uuid!r} writes no checkpoint 'merged': it has {', '.join(exports)}"
        raise InvalidRequest(name, value, hint)
    if named.completed and checkpoint not in named.checkpoints:
        hint = f"job {job.job_uuid!r} has no checkpoint {checkpoint!r}: it has {', '.join(named.checkpoints) or 'none'}"
        raise InvalidRequest(name, value, hint)
    return checkpoint


def _adapter_config(name: str, value: str, settings: Settings) -> dict[str, Any] | None:
    """PEFT's configuration in a directory that holds an adapter and no model; None: it is none, or may not be read."""
    path = absolute_path(name, value)
    if not path.is_dir() or not may_be_read(path, settings) or (path / "config.json").is_file():
        return None
    if not (path / _CONFIG).is_file():
        return None
    try:
        # A job may have made a link in its checkpoint: to a file that never ends, or to one of the service.
        found = json.loads(ModelDirectory.at(path).read(_CONFIG))
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(name, value, f"its {_CONFIG} cannot be read: {why}") from error
    return found


def _of_adapter(name: str, value: str, config: dict[str, Any], use: AdapterUse | None, settings: Settings) -> Base:
    if use is None:
        raise InvalidRequest(
            name,
            value,
            "this directory holds an adapter, not a model: set the provider option adapter to 'continue' (train it "
            "further) or 'merge' (into its base model)",
        )
    lora = _lora_of(name, value, config)
    under = config.get("base_model_name_or_path")
    if not isinstance(under, str) or config.get("revision"):
        hint = f"its {_CONFIG} names no base model without a revision: name the model in base_model_name_or_path"
        raise InvalidRequest(name, value, hint)
    try:
        model = resolve_base_model(name, under, settings)
    except InvalidRequest as error:
        raise InvalidRequest(name, value, f"its base model {under!r} cannot be used: {error.hint}") from error
    adapter = AdapterSpec(model=str(absolute_path(name, value)), use=use)
    source = ModelSource(model=model, **resolve_trust(model, settings))
    return Base(source, adapter, lora if use == "continue" else None)


def _lora_of(name: str, value: str, config: dict[str, Any]) -> LoraSpec:
    """The settings of an adapter on disk. What a job has no field for is refused by name."""
    kind = config.get("peft_type")
    if kind != "LORA":
        hint = f"its peft_type is {str(kind)[:40]!r}, expected 'LORA'; adapters of other kinds are taken as job:NAME"
        raise InvalidRequest(name, value, hint)
    if (task := config.get("task_type")) not in (None, _TASK):
        hint = (
            f"its {_CONFIG} has task_type {str(task)[:40]!r}, expected {_TASK!r}: it adapts no causal language model, "
            "but for example a reward model; name another one"
        )
        raise InvalidRequest(name, value, hint)
    for key, allowed in _WITHOUT_EFFECT.items():
        if config.get(key, allowed[0]) not in allowed:
            found = str(config[key])[:40]
            hint = f"its {_CONFIG} has {key} {found!r}, expected {allowed[0]!r}: no job trains such an adapter"
            raise InvalidRequest(name, value, hint)
    for key in _EMPTY:
        if config.get(key):
            raise InvalidRequest(name, value, f"its {_CONFIG} sets {key}, which no job's adapter has: name another one")
    modules = config.get("target_modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(one, str) and one for one in modules):
        raise InvalidRequest(name, value, f"target_modules in its {_CONFIG} is no list of names of modules")
    try:
        return LoraSpec.model_validate(
            {
                "target_modules": tuple(sorted(modules)),
                "rank": config.get("r"),
                "alpha": config.get("lora_alpha"),
                "dropout": config.get("lora_dropout") or 0.0,
                "use_rslora": bool(config.get("use_rslora")),
                "use_dora": bool(config.get("use_dora")),
            }
        )
    except ValueError as error:
        hint = f"r, lora_alpha or lora_dropout in its {_CONFIG} is out of range: {str(error).splitlines()[-1].strip()}"
        raise InvalidRequest(name, value, hint) from error


def _refuse_other_machines(model: NamedModel, options: ProviderOptions, settings: Settings) -> None:
    """The model that an adapter is merged into is written where the job runs, and later jobs read it on the service's
    machine. Raises InvalidRequest: the job may run elsewhere."""
    requested = {} if options.resources is None else options.resources.model_dump(exclude_unset=True)
    if options.resources is not None and requested != {"nodes": 1}:
        field_, found = "provider_options.resources", requested
    elif options.resources is None and settings.nodes > 1:
        field_, found = "provider_options.resources.nodes", {"nodes": settings.nodes}
    else:
        return
    hint = (
        f"adapter 'merge' merges {model.field} {model.value!r} on the service's machine, where the job trains then: "
        "leave it out"
    )
    raise InvalidRequest(field_, found, hint)
