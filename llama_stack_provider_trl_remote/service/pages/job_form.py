"""Bodies of jobs from the fields of a form and back, and the same jobs for other clients. Pure functions."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.methods import METHODS
from llama_stack_provider_trl.system.texts import parse_json

from ..http.received import TOO_DEEP, is_too_deep

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""With the MLP all linear layers of a Llama-like block, as `trl-remote train` takes them."""
LORA_RANK = 16
TUNINGS = {
    "lora": "LoRA",
    "qlora": "QLoRA: LoRA on a base in 4 bits",
    "full": "Full fine-tuning",
    "request": "As the JSON below says",
}
"""What is trained: the first is the form's own choice."""
FORM_METHODS = {
    name: method.title[0].upper() + method.title[1:] for name, method in METHODS.items() if "custom" not in name
}
"""Value of the field `method` -> its text."""
_NAMES = (("job", ("job_uuid",), str), ("model", ("model",), str))
_TRAINING = (
    ("epochs", ("training_config", "n_epochs"), int),
    ("gradient_accumulation", ("training_config", "gradient_accumulation_steps"), int),
    ("learning_rate", ("training_config", "learning_rate"), float),
)
_OPTIMIZER = ("training_config", "optimizer_config")
_WEIGHT_DECAY = ("weight_decay", (*_OPTIMIZER, "weight_decay"), float)
_WARMUP_STEPS = ("warmup", (*_OPTIMIZER, "num_warmup_steps"), int)
_WARMUP_RATIO = ("warmup", (*_OPTIMIZER, "warmup_ratio"), float)
_DATA = ("training_config", "data_config")
_ROWS = (
    ("dataset", (*_DATA, "dataset_id"), str),
    ("batch_size", (*_DATA, "batch_size"), int),
    ("validation_dataset", (*_DATA, "validation_dataset_id"), str),
)
_OPTIONS = (
    *(("max_seq_length", "max_seq_length", int), ("nproc_per_node", "nproc_per_node", int)),
    *(("truncation_side", "truncation_side", str), ("priority", "priority", str)),
    *(("eval_steps", "eval_steps", int), ("save_steps", "save_steps", int)),
    *(("lr_scheduler", "lr_scheduler", str), ("preflight", "preflight", str)),
)
MOST_OPTIONS = 1 << 20
"""Characters of further options, and of further fields of the request: as many as a request has bytes."""
_MOST_VALUES = 20_000
"""JSON values of them, as of a request."""
LONGEST_SHOWN = 64 << 10
"""Characters of a request, as JSON, that a page repeats for other clients: YAML of 256 KiB takes half a second of a
core."""
MOST_NAME = 128
_SFT_OPTIONS = (("train_on", "train_on", str), ("reasoning", "reasoning", str))
_MODULES: dict[str, Any] = {"lora_attn_modules": [*LORA_MODULES], "apply_lora_to_mlp": True}
_NUMBERED = re.compile(r"^(.+?)-(\d{1,6})$")


def job_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of the job that a form describes. Fields that are empty are left out; a number that is none stays a
    text, which the body's model then names.

    Raises:
        InvalidRequest: the field of further options, or of further request fields, has no object, or one that another
            field has; there is no such `tuning`.
    """
    method = fields.get("method")
    is_sft = method in (None, "", "sft")
    rest = _object(fields.get("request", ""), "request", '{"training_config": {"dtype": "fp32"}}')
    data = {
        "dataset_id": fields.get("dataset", ""),
        **({} if "shuffle" in _part(rest, _DATA) else {"shuffle": True}),
        **_given(fields, ("batch_size", "batch_size", int)),
        **_given(fields, ("validation_dataset", "validation_dataset_id", str)),
    }
    if is_sft:
        data |= _given(fields, ("data_format", "data_format", str))
        if fields.get("train_on_input") == "yes":
            data["train_on_input"] = True
    training: dict[str, Any] = {"n_epochs": 1, **_given_at(fields, *_TRAINING)}
    # As transformers reads its `warmup_steps`: a number below 1 is a share of the steps.
    warmup = _WARMUP_RATIO if _is_share(fields.get("warmup", "")) else _WARMUP_STEPS
    if optimizer := _given_at(fields, _WEIGHT_DECAY, warmup):
        training["optimizer_config"] = optimizer
    options: dict[str, Any] = _given(fields, *_OPTIONS, *(_SFT_OPTIONS if is_sft else ()))
    if prompt := fields.get("system_prompt"):
        options["system_prompt"] = prompt.replace("\r\n", "\n")  # browsers send each line break as both
    further = _object(fields.get("options", ""), "provider_options", '{"seed": 1}')
    lora = _lora(fields, _part(rest, ("algorithm_config",)) if is_sft else _part(further, ("lora",)))
    if lora and not is_sft:
        options["lora"] = lora
    options = _merged(options, further, "provider_options.")
    body: dict[str, Any] = _given(fields, ("job", "job_uuid", str))
    body |= {"model": fields.get("model", ""), "training_config": {**training, "data_config": data}}
    algorithm = lora if is_sft else {"type": method}
    made = (
        body
        | ({"algorithm_config": algorithm} if algorithm else {})
        | ({"provider_options": options} if options else {})
    )
    return _merged(made, rest, "")


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def fields_of(body: Mapping[str, Any], is_sft: bool) -> dict[str, str]:
    """The fields of the form that describe a body: what no field has of its own stands in the two JSON fields.

    Args:
        is_sft: whether it is one of supervised-fine-tune.
    """
    left = _without_null(copy.deepcopy(dict(body)))
    options = _without_null(left.pop("provider_options", {}))
    training = _without_null(_part(left, ("training_config",)))
    data = _without_null(_part(training, ("data_config",)))
    left["training_config"], training["data_config"] = training, data
    optimizer = _part(training, _OPTIMIZER[1:])
    has_optimizer = bool(optimizer)
    # A search names the field by its path, which the trials are made with.
    is_searched = any(_OPTIMIZER[1] in path for path in _part(left, ("hyperparam_search_config", "parameters")))
    if "lr" in optimizer and "learning_rate" not in training and not is_searched:
        training["learning_rate"] = optimizer.pop("lr")
    if not left.get("model") and left.get("finetuned_model"):
        left["model"] = left.pop("finetuned_model")
    fields = {"tuning": "request" if "adapter" in options else "full", "method": "sft"}
    for name, path, _ in (*_NAMES, *_TRAINING, *_ROWS):
        _take(fields, name, left, path)
    _take(fields, "weight_decay", left, _WEIGHT_DECAY[1])
    ratio = optimizer.get("warmup_ratio")
    if ratio is None:
        _take(fields, "warmup", left, _WARMUP_STEPS[1])
    elif isinstance(ratio, float) and "." in f"{ratio:g}":
        _take(fields, "warmup", left, _WARMUP_RATIO[1])
    if has_optimizer and not optimizer:
        del training["optimizer_config"]
    if data.get("shuffle") is True:
        del data["shuffle"]
    if is_sft and data.get("train_on_input") is True:
        fields["train_on_input"] = "yes"
        del data["train_on_input"]
    for name, option, _ in (*_OPTIONS, *(_SFT_OPTIONS if is_sft else ())):
        _take(fields, name, options, (option,))
    prompt = options.get("system_prompt")
    if isinstance(prompt, str) and prompt and "\r" not in prompt:  # a browser makes a line break of it
        fields["system_prompt"] = options.pop("system_prompt")
    if is_sft:
        if left.get("algorithm_config"):
            _take_lora(fields, left, "algorithm_config")
    else:
        _take_method(fields, left, options)
        _take_lora(fields, options, "lora")
    if not data:
        del training["data_config"]
    if not training:
        del left["training_config"]
    fields["options"] = _text(options) if options else ""
    fields["request"] = _text(left) if left else ""
    return fields


def _text(value: Mapping[str, Any]) -> str:
    """JSON as a field has it: on one line where it is too long with its indentation."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return text if len(text) <= MOST_OPTIONS else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


_FIELDS = {
    **{path[-1]: name for name, path, _ in (*_NAMES, *_TRAINING, *_ROWS, _WEIGHT_DECAY, _WARMUP_STEPS, _WARMUP_RATIO)},
    **{option: name for name, option, _ in (*_OPTIONS, *_SFT_OPTIONS)},
    **{"rank": "lora_rank", "alpha": "lora_alpha", "system_prompt": "system_prompt", "to": "to", "lr": "learning_rate"},
    **{"checks": "check", "pattern": "check_pattern", "column": "check_column"},
}
"""Field of a request -> the form's."""
_BEGINNING = re.compile(r"[\w.]+(?=[=:])")


def field_of(sentence: str) -> str:
    """The field of the form that a sentence on a request is about; empty: none. It begins with the path of the field,
    or has the name in it. A name of one word is also one of sentences."""
    path = _BEGINNING.match(sentence)
    named = (word.lstrip("_") for word in re.findall(r"[a-z_]+", sentence))
    words = [*reversed(path[0].split(".") if path else ()), *(word for word in named if "_" in word)]
    return next((_FIELDS[word] for word in words if word in _FIELDS), "")


def rates_of(method: str | None) -> str:
    """The default learning rates of a method, as a hint."""
    whole, adapter = next(
        (one.learning_rates for name, one in METHODS.items() if name == method), METHODS["sft"].learning_rates
    )
    return f"{adapter:g} with LoRA, {whole:g} without"


def next_names(name: str) -> Iterator[str]:
    """Names for a copy of a job, one after the other: `run` is followed by `run-2`, `run-2` by `run-3`."""
    found = _NUMBERED.match(name)
    base, number = (found[1], int(found[2])) if found else (name, 1)
    while True:
        number += 1
        yield f"{base[: MOST_NAME - len(str(number)) - 1]}-{number}"


def _take(fields: dict[str, str], name: str, tree: dict[str, Any], path: tuple[str, ...]) -> None:
    """Move a value of a tree into a field, where a field can have it."""
    above = _part(tree, path[:-1])
    value = above.get(path[-1])
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        fields[name] = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
        del above[path[-1]]


_METHOD = "provider_options.method."
"""How a search names the fields of this option."""


def _take_method(fields: dict[str, str], left: dict[str, Any], options: dict[str, Any]) -> None:
    """Move the type of a preference method into its field. What the option `method` has, as Llama Stack sends it, goes
    to `algorithm_config`, where the form writes the type: beside the option another type is refused."""
    given = left.pop("algorithm_config", {})
    if "method" in options:
        given = options.pop("method")
        search = left.get("hyperparam_search_config")
        if isinstance(search, dict) and isinstance(search.get("parameters"), dict):
            search["parameters"] = {
                f"algorithm_config.{path.removeprefix(_METHOD)}" if path.startswith(_METHOD) else path: values
                for path, values in search["parameters"].items()
            }
    algorithm = dict(given)
    fields["method"] = str(algorithm.pop("type", None) or "dpo")
    if algorithm:
        left["algorithm_config"] = algorithm


def _take_lora(fields: dict[str, str], tree: dict[str, Any], name: str) -> None:
    """Move rank and alpha of an adapter into the fields. The modules stay in the tree, unless they are the form's."""
    lora = tree.get(name)
    if not isinstance(lora, dict):
        return
    if str(lora.get("type", "LoRA")).lower() != "lora":
        fields["tuning"] = "request"
        return
    given = {"rank": 8, "alpha": 16, "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False, **lora}
    given.pop("type", None)
    fields["tuning"] = "qlora" if given.pop("quantize_base", None) else "lora"
    fields |= {"lora_rank": str(given.pop("rank")), "lora_alpha": str(given.pop("alpha"))}
    if given == _MODULES:
        del tree[name]
    else:
        tree[name] = given


def _part(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object at a path of a tree; an empty one where there is none."""
    found: Any = tree
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a body without those that are null, as if they had been left out. Not for objects inside of them, where
    null may be a value, such as `{"const": null}` of a JSON schema."""
    return {name: value for name, value in fields.items() if value is not None}


def _merged(body: dict[str, Any], rest: Mapping[str, Any], above: str) -> dict[str, Any]:
    """A body with the further fields of a request. Raises InvalidRequest: one has two values."""
    made = dict(body)
    for name, value in rest.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and isinstance(made.get(name), dict):
            made[name] = _merged(made[name], value, f"{path}.")
        elif name in made:
            raise InvalidRequest(path, value, "another field of the form has it, too: leave one of them empty")
        else:
            made[name] = value
    return made


def _object(text: str, field: str, example: str) -> dict[str, Any]:
    """The object of a field that is written as JSON; of an empty one an empty object."""
    if not text.strip():
        return {}
    if len(text) > MOST_OPTIONS:
        hint = f"it has {len(text)} characters, at most {MOST_OPTIONS} are read here: send the job to the API"
        raise InvalidRequest(field, text[:200], hint)
    if sum(map(text.count, ",[{")) > _MOST_VALUES:
        raise InvalidRequest(field, text[:200], f"it has more than {_MOST_VALUES} values: leave some of them out")
    try:
        found = parse_json(text)
        if is_too_deep(found):
            raise InvalidRequest(field, text[:200], TOO_DEEP.replace("the body", "it"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        hint = f"it is no JSON ({error}): write an object, such as {example}"
        raise InvalidRequest(field, text[:200], hint) from error
    if not isinstance(found, dict):
        raise InvalidRequest(field, text[:200], f"expected an object, such as {example}")
    return found


def same_job(body: Mapping[str, Any], url: str, call: str | None = None) -> dict[str, str]:
    """The job of a body as JSON and YAML, and as commands for a shell.

    Args:
        url: of the service.
        call: that takes it; None: the one of a training that its fields are meant for.
    """
    if call is None:
        kind = str((body.get("algorithm_config") or {}).get("type", "")).lower()
        # Any other type may be a method of an installed package.
        call = "supervised-fine-tune" if kind in ("", "lora", "qat") else "preference-optimize"
    shown = dict(body) if call in TRAINING_CALLS else {"kind": call, **body}
    as_json = shlex.quote(json.dumps(body, ensure_ascii=False))
    headers = """-H "Authorization: Bearer $TRL_SERVICE_TOKEN" -H 'Content-Type: application/json'"""
    name = re.sub(r"[^\w.-]+", "-", str(body.get("job_uuid") or "job")).lstrip("-.") or "job"
    return {
        "json": json.dumps(body, indent=2, ensure_ascii=False),
        "curl": f"curl {headers} -d {as_json} {shlex.quote(f'{url}/v1/post-training/{call}')}",
        "trl_remote": f"printf %s {shlex.quote(json.dumps(shown, ensure_ascii=False))} | "
        f"trl-remote run - --url {shlex.quote(url)}",
        "yaml": yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100),
        "run": f"trl-remote run {name}.yaml --url {shlex.quote(url)}",
        "file": f"{name}.yaml",
    }


TRAINING_CALLS = ("supervised-fine-tune", "preference-optimize")


class Preset(NamedTuple):
    text: str
    fields: dict[str, str]


PRESETS = {
    "lora": Preset("LoRA", {"method": "sft", "tuning": "lora", "lora_rank": str(LORA_RANK)}),
    "qlora": Preset("QLoRA", {"method": "sft", "tuning": "qlora", "lora_rank": str(LORA_RANK)}),
    "dpo": Preset("DPO with LoRA", {"method": "dpo", "tuning": "lora", "lora_rank": str(LORA_RANK)}),
    "full": Preset("Full fine-tuning", {"method": "sft", "tuning": "full", "lora_rank": ""}),
}
"""What an empty form may begin with: the first is its own choice."""


def preset_of(fields: Mapping[str, str]) -> str:
    """The preset that a form has; empty: none."""
    matching = (
        name
        for name, one in PRESETS.items()
        if all(fields.get(field, "") == value for field, value in one.fields.items())
    )
    return next(matching, "")


class FormKind(NamedTuple):
    text: str
    needs: tuple[str, ...]
    """Fields of the form that its request has: `model`, `dataset`, `output`, `to`, `checks`."""
    example: str
    """Of its further fields, as JSON."""


FORM_KINDS = {
    "train": FormKind("Train", (), ""),
    "evaluate": FormKind("Evaluate", ("model", "dataset", "checks"), '{"batch_size": 8}'),
    "generate": FormKind("Generate", ("model", "dataset", "output"), '{"max_new_tokens": 256, "temperature": 0}'),
    "merge": FormKind("Merge", (), '{"models": [{"model": "job:one"}, {"model": "job:other"}], "method": "linear"}'),
    "export": FormKind("Export", ("model", "to"), '{"gguf_type": "q8_0"}'),
}
"""Value of the field `kind` -> the kind, by the names of `trl-remote run`'s files; the first one trains."""


class FormCheck(NamedTuple):
    """A check of an evaluation's answers, of the form."""

    text: str
    check: dict[str, Any]


CHECKS = {
    "": FormCheck("none: their loss is measured", {}),
    "exact": FormCheck("the expected text, else the row's answer", {"type": "exact"}),
    "same": FormCheck("the same but for case and space", {"type": "exact", "normalize": True}),
    "regex": FormCheck("a pattern in the answer", {"type": "regex"}),
    "json": FormCheck("JSON", {"type": "json"}),
}
"""Value of the field `check` -> the check."""


def work_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of a job of another kind than `train`. Empty fields are left out.

    Raises:
        InvalidRequest: one of the JSON fields has no object, or a field that another one has.
    """
    needs = FORM_KINDS[fields["kind"]].needs
    names = (("job", "job_uuid"), ("model", "model"), ("dataset", "dataset_id"), ("to", "to"))
    body: dict[str, Any] = {
        to: fields[name].strip() for name, to in names if name in ("job", *needs) and fields.get(name, "").strip()
    }
    if "output" in needs and fields.get("output", "").strip():
        body["output"] = {"dataset_id": fields["output"].strip()}
    if "checks" in needs and fields.get("check"):
        if fields["check"] not in CHECKS:
            raise InvalidRequest("check", fields["check"], f"expected one of {', '.join(filter(None, CHECKS))}")
        check = CHECKS[fields["check"]].check
        pattern = [("check_pattern", "pattern", str)] if check["type"] == "regex" else []
        body["checks"] = [{**check, **_given(fields, ("check_column", "column", str), *pattern)}]
    options = _object(fields.get("options", ""), "provider_options", '{"priority": "low"}')
    if fields.get("priority"):
        options = _merged({"priority": fields["priority"]}, options, "provider_options.")
    made = {**body, **({"provider_options": options} if options else {})}
    return _merged(made, _object(fields.get("request", ""), "request", FORM_KINDS[fields["kind"]].example), "")


def validated[Body: BaseModel](kind: type[Body], body: Mapping[str, Any]) -> Body:
    """The body as its model. Raises RequestValidationError, as a call with this body does."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from error


def _lora(fields: Mapping[str, str], further: Mapping[str, Any]) -> dict[str, Any] | None:
    """The adapter; None: the form asks for none.

    Args:
        further: what the JSON fields say of it.

    Raises:
        InvalidRequest: `tuning` is none of `TUNINGS`.
    """
    tuning = fields.get("tuning") or ("lora" if fields.get("lora_rank") else "full")
    if tuning not in TUNINGS:
        raise InvalidRequest("tuning", tuning, f"expected one of {', '.join(TUNINGS)}")
    if tuning in ("full", "request"):
        return None
    rank = _number(fields.get("lora_rank") or str(LORA_RANK), int)
    alpha = _number(fields["lora_alpha"], int) if fields.get("lora_alpha") else _twice(rank)
    modules = {} if _MODULES.keys() & further.keys() else copy.deepcopy(_MODULES)
    quantized = {"quantize_base": True} if tuning == "qlora" else {}
    return {"type": "LoRA", **modules, "rank": rank, "alpha": alpha, **quantized}


def _twice(rank: Any) -> Any:
    return 2 * rank if isinstance(rank, int) else rank


def _given(fields: Mapping[str, str], *names: tuple[str, str, type]) -> dict[str, Any]:
    """Name in the body -> value, of the fields that are not empty."""
    return {to: _number(fields[name].strip(), kind) for name, to, kind in names if fields.get(name, "").strip()}


def _given_at(fields: Mapping[str, str], *rows: tuple[str, tuple[str, ...], type]) -> dict[str, Any]:
    """As `_given`, by the last parts of paths."""
    return _given(fields, *((name, path[-1], kind) for name, path, kind in rows))


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text
