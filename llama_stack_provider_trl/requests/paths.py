"""Resolves the names and directories of a job: base model, result, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidRequest
from ..specs.job import (
    ResumeFrom,
)
from ..system.data_dir import CHECKPOINTS, DataDir, is_aside
from ..system.model_damage import ADAPTER_PICKLE, ADAPTER_WEIGHTS
from .bodies import (
    SupervisedFineTuneRequest,
)
from .names import JOB_UUID_PATTERN
from .options import ProviderOptions
from .settings import Request, Settings

# What a job writes into its directory: a job of such a name could land on another one's checkpoint.
RESERVED_NAMES = r"(final|merged|merged-base)(\.tmp)?|checkpoint-\d+"


class NamesResults(Protocol):
    """The fields of a request that say where its results go."""

    job_uuid: str
    checkpoint_dir: str | None


def resolve_paths(request: Request, options: ProviderOptions, settings: Settings) -> dict[str, Any]:
    return {
        "job_uuid": resolve_job_uuid(request.job_uuid),
        "output_name": resolve_output_name(request),
        "checkpoint_dir": resolve_checkpoint_dir(request, settings),
        "resume_from": resolve_resume_from(options),
    }


def resolve_job_uuid(job_uuid: str) -> str:
    if not re.fullmatch(JOB_UUID_PATTERN, job_uuid) or re.fullmatch(RESERVED_NAMES, job_uuid) or is_aside(job_uuid):
        raise InvalidRequest(
            "job_uuid",
            job_uuid,
            "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit, and not a name that "
            "checkpoints have (final, merged, merged-base, checkpoint-7), or what was set aside (old.stale-1); it "
            "names a directory",
        )
    return job_uuid


def resolve_output_name(request: Request) -> str:
    """The name of the result. DPO without a `model` names the base model in `finetuned_model`."""
    if isinstance(request, SupervisedFineTuneRequest) or request.model is None:
        return request.job_uuid
    return request.finetuned_model or request.job_uuid


def resolve_trust(model: str, settings: Settings) -> dict[str, Any]:
    """Whether the operator lets this model's own code run, and of which revision."""
    for entry in settings.trust_remote_code:
        name, _, revision = entry.partition("@")
        if name == model or (not revision and Path(name).expanduser().resolve() == Path(model)):
            return {"trust_remote_code": True, "revision": revision or None}
    return {}


def resolve_base_model(name: str, model: str | None, settings: Settings) -> str:
    if not model:
        raise InvalidRequest(name, model, "name the base model: a local directory or a model id such as org/name")
    if model.startswith("job:"):
        raise InvalidRequest(name, model, "a job is taken as the base model only: name the directory of its checkpoint")
    path = absolute_path(name, model)
    is_path = model.startswith(("/", "./", "~")) or ".." in Path(model).parts
    # Checked before the existence of anything is disclosed.
    if (is_path or path.is_dir()) and not may_be_read(path, settings):
        roots = ", ".join(map(str, settings.model_roots or ())) or "none is configured"
        raise InvalidRequest(
            name,
            model,
            f"a model that is a directory must lie below one of the configured model_roots ({roots}), or be a "
            "checkpoint of a job of this service; or name a model id such as org/name",
        )
    if not path.is_dir():
        if is_path and path.is_file():
            raise InvalidRequest(name, model, "this is a file: name the directory that has the model's config.json")
        if is_path:
            hint = "there is no such directory on the machine that trains: correct the path, or name a model id"
            raise InvalidRequest(name, model, hint)
        return model
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise InvalidRequest(
                name,
                model,
                "this directory holds an adapter, not a model; name its base model, or the `merged` checkpoint that "
                "the provider option merge_adapter writes",
            )
        if any((path / weights).is_file() for weights in (ADAPTER_WEIGHTS, ADAPTER_PICKLE)):
            hint = "this directory holds an adapter without its adapter_config.json: name one that PEFT has saved"
            raise InvalidRequest(name, model, hint)
        raise InvalidRequest(name, model, "the directory has no config.json; expected what save_pretrained writes")
    return str(path)


def may_be_read(path: Path, settings: Settings) -> bool:
    """Whether a request may name a model's directory: of the data directory, what lies below `checkpoints`; elsewhere
    everything without `model_roots`; else what lies below one of them, where jobs write checkpoints, and what the
    operator trusts by its path."""
    data_dir = DataDir(settings.data_dir)
    if data_dir.is_ours(path):
        return False
    if settings.model_roots is None or data_dir.is_result(path):
        return True
    trusted = (entry for entry in settings.trust_remote_code if entry.startswith(("/", "~")))
    roots = (*settings.model_roots, *settings.checkpoint_roots, *map(Path, trusted))
    return any(path.is_relative_to(root.expanduser().resolve()) for root in roots)


def absolute_path(name: str, text: str, root: Path = Path()) -> Path:
    """The absolute path that a text means; one that the system cannot resolve is refused under its field's name."""
    try:
        path = (root / Path(text).expanduser()).resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission; no such ~user; a NUL character
        raise InvalidRequest(name, text, f"it cannot be looked up on this machine: {error}") from error
    return path


def resolve_checkpoint_dir(request: NamesResults, settings: Settings) -> Path:
    """`<checkpoint_dir>/<job_uuid>`: jobs that name the same directory never overwrite each other.

    A relative path is one below `checkpoints` in the data directory, with or without that name before it.
    """
    data_dir, given = DataDir(settings.data_dir), request.checkpoint_dir
    parts = Path(given or CHECKPOINTS).parts
    relative = Path(*parts[1:]) if parts[:1] == (CHECKPOINTS,) else Path(*parts)
    base = absolute_path("checkpoint_dir", str(relative), data_dir.checkpoints)
    target = absolute_path("checkpoint_dir", str(base / request.job_uuid))
    roots = [data_dir.checkpoints, *settings.checkpoint_roots]
    inside = [root.resolve() for root in roots if base.is_relative_to(root.resolve())]
    if not inside or data_dir.is_ours(base) or not data_dir.is_free(target):
        raise InvalidRequest(
            "checkpoint_dir",
            given,
            f"give a relative path, which means one below {data_dir.checkpoints}, or one inside "
            f"{', '.join(map(str, roots))} (`checkpoint_roots` in the provider's configuration adds more); nothing "
            "else of the data directory is for results",
        )
    below = max(inside, key=lambda root: len(root.parts))
    if any(part.startswith(".") for part in base.relative_to(below).parts):
        hint = "names that begin with a dot are those of our own records there: choose another"
        raise InvalidRequest("checkpoint_dir", given, hint)
    if any(is_aside(part) for part in base.relative_to(below).parts):
        hint = "names that end in .stale- and a number are those of what was set aside: choose another"
        raise InvalidRequest("checkpoint_dir", given, hint)
    if target != base / request.job_uuid:
        hint = f"{base / request.job_uuid} is a symbolic link: remove it, or choose another directory or job_uuid"
        raise InvalidRequest("checkpoint_dir", given, hint)
    for path in (target, base, *base.parents):
        if path.exists() and not path.is_dir():
            raise InvalidRequest("checkpoint_dir", request.checkpoint_dir, f"{path} is a file; name a directory")
    return target


def resolve_resume_from(options: ProviderOptions) -> ResumeFrom | None:
    """Which checkpoint; whether it is there is found out when the job is submitted."""
    if options.resume_from is None:
        return None
    job_uuid, _, checkpoint = options.resume_from.partition("/")
    is_named = re.fullmatch(JOB_UUID_PATTERN, job_uuid) and re.fullmatch(r"(checkpoint-\d+)?", checkpoint)
    if not is_named or options.resume_from.endswith("/"):
        hint = "send JOB_UUID, or JOB_UUID/checkpoint-N, of a job of this provider; a path is not taken"
        raise InvalidRequest("provider_options.resume_from", options.resume_from, hint)
    return ResumeFrom(job_uuid=job_uuid, checkpoint=checkpoint or None)
