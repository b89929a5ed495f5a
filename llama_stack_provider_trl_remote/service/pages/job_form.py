"""Bodies of jobs from the fields of a form, and the same jobs for other clients. Pure functions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.system.texts import parse_json

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""With the MLP all linear layers of a Llama-like block, as `trl-remote train` takes them."""
_TRAINING = (("epochs", "n_epochs", int), ("gradient_accumulation", "gradient_accumulation_steps", int))
_OPTIONS = (
    *(("max_seq_length", "max_seq_length", int), ("nproc_per_node", "nproc_per_node", int)),
    *(("truncation_side", "truncation_side", str), ("priority", "priority", str)),
    ("system_prompt", "system_prompt", str),
)
MOST_OPTIONS = 1 << 16
"""Characters of further options."""
_SFT_OPTIONS = (("train_on", "train_on", str), ("reasoning", "reasoning", str))


def job_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of the job that a form describes. Fields that are empty are left out; a number that is none stays a
    text, which the body's model then names.

    Raises:
        InvalidRequest: the field of further options has no object, or one that another field has.
    """
    method = fields.get("method")
    is_sft = method not in ("dpo", "kto")
    data = {
        "dataset_id": fields.get("dataset", ""),
        "shuffle": True,
        **_given(fields, ("batch_size", "batch_size", int)),
        **_given(fields, ("validation_dataset", "validation_dataset_id", str)),
    }
    if is_sft:
        data |= _given(fields, ("data_format", "data_format", str))
        if fields.get("train_on_input") == "yes":
            data["train_on_input"] = True
    training = {
        "n_epochs": 1,
        **_given(fields, *_TRAINING),
        **_given(fields, ("learning_rate", "learning_rate", float)),
    }
    options: dict[str, Any] = _given(fields, *_OPTIONS, *(_SFT_OPTIONS if is_sft else ()))
    lora = _lora(fields)
    if lora and not is_sft:
        options["lora"] = lora
    options |= _further(fields.get("options", ""), options)
    body: dict[str, Any] = _given(fields, ("job", "job_uuid", str))
    body |= {"model": fields.get("model", ""), "training_config": {**training, "data_config": data}}
    algorithm = lora if is_sft else {"type": method}
    return (
        body
        | ({"algorithm_config": algorithm} if algorithm else {})
        | ({"provider_options": options} if options else {})
    )


def _further(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The provider options that are written as JSON."""
    if not text.strip():
        return {}
    if len(text) > MOST_OPTIONS:
        hint = f"it has {len(text)} characters, at most {MOST_OPTIONS} are read here: send the job to the API"
        raise InvalidRequest("provider_options", text[:200], hint)
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        hint = f'it is no JSON ({error}): write an object, such as {{"seed": 1}}'
        raise InvalidRequest("provider_options", text[:200], hint) from error
    if not isinstance(found, dict):
        raise InvalidRequest("provider_options", text[:200], 'expected an object, such as {"seed": 1}')
    if twice := sorted(found.keys() & options.keys()):
        hint = "another field of the form has it, too: leave one of them empty"
        raise InvalidRequest(f"provider_options.{twice[0]}", found[twice[0]], hint)
    return found


def same_job(body: Mapping[str, Any], url: str) -> dict[str, str]:
    """The job of a body as JSON, and as commands for a shell.

    Args:
        url: of the service.
    """
    as_json, call = shlex.quote(json.dumps(body, ensure_ascii=False)), "supervised-fine-tune"
    if (body.get("algorithm_config") or {}).get("type") == "dpo":
        call = "preference-optimize"
    headers = """-H "Authorization: Bearer $TRL_SERVICE_TOKEN" -H 'Content-Type: application/json'"""
    return {
        "json": json.dumps(body, indent=2, ensure_ascii=False),
        "curl": f"curl {headers} -d {as_json} {shlex.quote(f'{url}/v1/post-training/{call}')}",
        "trl_remote": f"printf %s {as_json} | trl-remote run - --url {shlex.quote(url)}",
    }


def validated[Body: BaseModel](kind: type[Body], body: Mapping[str, Any]) -> Body:
    """The body as its model. Raises RequestValidationError, as a call with this body does."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from error


def _lora(fields: Mapping[str, str]) -> dict[str, Any] | None:
    if not fields.get("lora_rank"):
        return None
    rank = _number(fields["lora_rank"], int)
    alpha = _number(fields["lora_alpha"], int) if fields.get("lora_alpha") else _twice(rank)
    modules = {"lora_attn_modules": [*LORA_MODULES], "apply_lora_to_mlp": True}
    return {"type": "LoRA", **modules, "rank": rank, "alpha": alpha}


def _twice(rank: Any) -> Any:
    return 2 * rank if isinstance(rank, int) else rank


def _given(fields: Mapping[str, str], *names: tuple[str, str, type]) -> dict[str, Any]:
    """Name in the body -> value, of the fields that are not empty."""
    return {to: _number(fields[name].strip(), kind) for name, to, kind in names if fields.get(name, "").strip()}


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text
