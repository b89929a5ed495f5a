"""What the page of an export shows: files, what was compared, conditions, and how it is used. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from llama_stack_provider_trl.specs.promotion import BOUNDS
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse

from ..views.exports import ExportedFile
from .rendering import number

SHOWN = (
    *("target", "type", "read_by", "parameters", "bytes", "gates", "adapter_difference", "prompts", "prompt_tokens"),
    *("stop_tokens", "logits_bound", "logits_difference", "largest_logits_difference"),
    *("greedy_tokens", "equal_greedy_tokens", "differing"),
    *("rank", "alpha", "modules", "change_difference", "command", "upload"),
)
"""Parts of an export's result that its tables have; what is new in a result is listed below them."""
_LARGEST = 4
"""Times the bound of the median: that of every single token (docs/how-to/export.md)."""
_COMMAND = re.compile(
    r"""llama-server\ -m\ "\$BASE"\ --lora\ [\w.-]+(\ --jinja\ --chat-template-file\ [\w.-]+)?
    |vllm\ serve\ (\.|"\$BASE"|[\w./-]+)
    (\ --enable-lora
    |\ --(revision|served-model-name|tokenizer|generation-config|lora-modules|max-lora-rank)
     \ ([\w./=-]+|'[\w\ ./=-]+'))*""",
    re.ASCII | re.VERBOSE,
)
"""The commands of exports (`recipes.exports.adapter.command_of`)."""


class Row(NamedTuple):
    """Something that was compared."""

    what: str
    found: str
    asked: str


class Differing(NamedTuple):
    """The first other token of an answer. Probabilities are those of the trained model and of the export."""

    prompt: int
    token: int
    trained: str
    export: str


class Export(NamedTuple):
    target: str
    facts: list[tuple[str, str]]
    files: Sequence[ExportedFile]
    compared: list[Row]
    differing: list[Differing]
    conditions: list[Row]
    commands: list[str]
    """For a shell; empty: it has no files."""


def export_of(status: PostTrainingJobStatusResponse, files: Sequence[ExportedFile], url: str) -> Export | None:
    """The export that a job makes, or has made; None: it makes none, or its report has another form.

    Args:
        url: of the service.
    """
    work = status.resources_allocated["effective_config"].get("work") or {}
    if work.get("kind") != "export":
        return None
    with suppress(LookupError, TypeError, ValueError, AttributeError):  # a process of a job may report anything
        return _export(status, work, files, url)
    return None


def _export(
    status: PostTrainingJobStatusResponse, work: Mapping[str, Any], files: Sequence[ExportedFile], url: str
) -> Export:
    found = status.resources_allocated
    result, target = found.get("result") or {}, work["export"]["target"]
    names = (
        *(("type", "Type"), ("parameters", "Parameters"), ("rank", "Rank"), ("alpha", "Alpha")),
        *(("modules", "Modules with an adapter"), ("read_by", "Read back by")),
    )
    return Export(
        target,
        [*((text, str(result[name])) for name, text in names if name in result), *_uploaded(result)],
        files,
        _compared(result),
        [_differing(one) for one in result.get("differing") or ()],
        _conditions(work.get("promote_if") or (), result.get("gates") or ()),
        commands(status.job_uuid, target, url, result.get("command")) if result else [],
    )


def commands(job_uuid: str, target: str, url: str, command: str | None = None) -> list[str]:
    """How an export is fetched and used.

    Args:
        command: of the report; it serves the export from the export's own directory. Another one than exports have is
            left out: people copy it into a shell, and a model's own code may report anything.
    """
    name = shlex.quote(job_uuid)
    used = {
        "gguf": f"llama-server -m {name}/model.gguf",
        "ollama": f"cd {name} && ollama create {name} -f Modelfile && ollama run {name}",
        "safetensors": f"vllm serve {name}",
    }
    pull = f"trl-remote jobs pull {name} {name} --url {shlex.quote(url)}"
    if command is not None and _COMMAND.fullmatch(command):
        return [pull, f"cd {name}", command]
    return [pull, used[target]] if target in used else [pull]


def export_commands(job_uuid: str, url: str) -> str:
    """How the result of a job is exported."""
    name = shlex.quote(job_uuid)
    return f"trl-remote export {name} --to gguf --pull {name}-gguf --url {shlex.quote(url)}"


def _uploaded(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where an export was sent; empty: it stays here."""
    if (upload := result.get("upload")) is None:
        return []
    commit = f", commit {upload['commit']}" if upload.get("commit") else ""
    return [("Uploaded to", f"{upload['to']}: {upload['files']} files{commit}")]


def _compared(result: Mapping[str, Any]) -> list[Row]:
    rows = []
    if "prompt_tokens" in result:
        what = f"Tokens of {result['prompts']} prompts"
        rows.append(Row(what, f"{result['prompt_tokens']} are equal", "all"))
    if ends := result.get("stop_tokens"):
        rows.append(
            Row("Tokens that end an answer", ", ".join(f"{one['text']} ({one['id']})" for one in ends), "equal")
        )
    if (bound := result.get("logits_bound")) is not None:
        median, largest = result["logits_difference"], result["largest_logits_difference"]
        rows.append(Row("Logits, median of the worst prompt", number(median), f"at most {number(bound)}"))
        rows.append(Row("Logits, the worst token", number(largest), f"at most {number(_LARGEST * bound)}"))
    if "greedy_tokens" in result:
        text = f"{result['equal_greedy_tokens']} of {result['greedy_tokens']}"
        rows.append(Row("Equal greedy tokens, up to the first other one", text, "all that rounding does not explain"))
    if (change := result.get("change_difference")) is not None:
        rows.append(Row("Changes of weights, the largest difference", number(change), "the rounding of its type"))
    if (change := result.get("adapter_difference")) is not None:
        rows.append(Row("What the adapter changes in the logits", number(change), "more than 0"))
    return rows


def _differing(one: Mapping[str, Any]) -> Differing:
    return Differing(one["prompt"], one["token"], _token(one["trained"]), _token(one["export"]))


def _token(one: Mapping[str, Any]) -> str:
    in_export = number(one["probability_in_export"]) or "not known"
    return f"{one['text']!r}: {number(one['probability'])}, {in_export}"


def _conditions(asked: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The conditions of an export, with what was found where they hold."""
    rows = []
    for at, one in enumerate(asked):
        against, gate = one.get("against"), found[at] if at < len(found) else {}
        name = next(bound for bound in BOUNDS if one.get(bound) is not None)
        what = f"{one['metric']} of {one['evaluation']}" + (f" against {against}" if against else "")
        values = [str(gate[key]) for key in ("found", "before") if gate.get(key) is not None]
        rows.append(Row(what, " against ".join(values), f"{BOUNDS[name]} {one[name]}"))
    return rows
