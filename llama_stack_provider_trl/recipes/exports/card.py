"""The model card of an export, and its lineage: what it was made of, how it was trained, how it was verified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ...specs.job import DatasetRef, JobSpec, MixedDataset
from ...specs.promotion import CheckedCondition
from ...system.bounded_yaml import check_levels
from ..checkpoint.adapter_card import code, shown_name
from .reference import Trained

CARD, LINEAGE = "README.md", "lineage.json"
_TRAINING_JOB = "training_job.json"
_MOST_TEXT = 1 << 20
"""Bytes of a card that is read."""
_LIBRARIES = {"gguf": "gguf", "ollama": "gguf", "lora-gguf": "gguf"}


def lineage(trained: Trained, record: Mapping[str, Any]) -> dict[str, Any]:
    """Where an export comes from. What is not known is left out.

    Args:
        record: the report of the comparison.
    """
    spec = trained.spec
    directory = Path((spec.adapter or spec.source).location)
    found: dict[str, Any] = {
        "model": shown_name(spec.source.model),
        "made_by": _job(spec.source.made_by),
        "adapter": None if spec.adapter is None else shown_name(spec.adapter.model),
        "adapter_made_by": None if spec.adapter is None else _job(spec.adapter.made_by),
        "export_job": spec.job_uuid,
        "export": dict(record),
    }
    if (job := _training_job(directory)) is not None:
        found["base"] = shown_name(job.source.model)
        found["training"] = {
            "job_uuid": job.job_uuid,
            "method": job.method.algorithm,
            "datasets": [_rows(one) for one in job.data.mixed],
            "train": job.train.model_dump(mode="json", exclude={"method"}, exclude_defaults=True),
            "lora": None if job.lora is None else job.lora.model_dump(mode="json"),
        }
        found["license"] = license_of(job.source.location) or license_of(spec.source.location)
    else:
        found["license"] = license_of(spec.source.location)
    return {name: value for name, value in found.items() if value is not None}


def card(found: Mapping[str, Any]) -> str:
    record, training = found["export"], found.get("training") or {}
    base = found.get("base") or found["model"]
    head: dict[str, Any] = {
        "base_model": base,
        "library_name": _LIBRARIES.get(record["target"], "transformers"),
        "pipeline_tag": "text-generation",
    }
    if (licence := found.get("license")) is not None:
        head["license"] = licence
    if training:
        head["datasets"] = list(dict.fromkeys(one["id"] for one in training["datasets"]))
    lines = ["---", yaml.safe_dump(head, sort_keys=True, allow_unicode=True).rstrip(), "---", ""]
    lines += [f"# {training.get('job_uuid') or found['export_job']}", "", f"Base model: {code(base)}.", ""]
    if training:
        lines += ["## Training", "", "| what | value |", "|---|---|", f"| method | {training['method']} |"]
        for data in training["datasets"]:
            share = f", share {code(json.dumps(data['share']))}" if "share" in data else ""
            lines += [f"| rows | {_described(data)}{share} |"]
            if "validation" in data:
                lines += [f"| validation rows | {_described(data['validation'])} |"]
        for part in ("train", "lora"):
            lines += [f"| {name} | {code(json.dumps(value))} |" for name, value in (training[part] or {}).items()]
        lines += [""]
    if "command" in record:
        lines += _served(record, base)
    lines += ["## How it was verified", ""]
    lines += [f"The files were read back by {record['read_by']} and compared with the trained model:"]
    lines += [
        f"{record['prompts']} prompts have the same {record['prompt_tokens']} tokens; the logits differ by "
        f"{record['logits_difference']:.2g} of their scale in the median of the worst prompt "
        f"({record['logits_bound']:g} is the bound of {record['type']}), and by "
        f"{record['largest_logits_difference']:.2g} at the worst token; "
        f"{record['equal_greedy_tokens']} of {record['greedy_tokens']} greedy tokens are equal, up "
        "to the first other one of each answer.",
        "",
    ]
    if record["differing"]:
        lines += [f"First tokens that differ are in `export.json`: {len(record['differing'])}.", ""]
    if gates := record.get("gates"):
        lines += ["## What evaluations found", ""]
        lines += [f"- {CheckedCondition.model_validate(gate).sentence}." for gate in gates]
        lines += [""]
    if not licence:
        lines += ["The licence of the base model is not known here: look it up before you publish these files.", ""]
    return "\n".join(lines)


def _served(record: Mapping[str, Any], base: str) -> list[str]:
    lines = ["## How to serve it", "", "In this directory:", "", "```sh", record["command"], "```", ""]
    if "$BASE" in record["command"]:
        what = f"a GGUF file of {code(base)}" if record["target"] == "lora-gguf" else f"the directory of {code(base)}"
        lines += [f"`BASE` is {what}.", ""]
    if record["target"] == "vllm":
        lines += ["vLLM itself was not run.", ""]
    return lines


def license_of(location: str) -> str | None:
    """The licence that the card of a model in a directory names; None: it is not known."""
    try:
        file = Path(location) / CARD
        if file.stat().st_size > _MOST_TEXT:
            return None
        begin, head, _ = file.read_text(encoding="utf-8").split("---\n", 2)
        check_levels(head.encode())
        found = yaml.safe_load(head) if not begin.strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = found.get("license") if isinstance(found, dict) else None
    return licence if isinstance(licence, str) else None


def _training_job(directory: Path) -> JobSpec | None:
    try:
        return JobSpec.model_validate_json((directory / _TRAINING_JOB).read_text())
    except (OSError, ValueError):
        return None


def _rows(mixed: MixedDataset) -> dict[str, Any]:
    """A dataset of a job, with its share of a mixture and its validation rows where it has them."""
    found = _identity(mixed.dataset)
    if share := mixed.share.model_dump(mode="json", exclude_none=True):
        found["share"] = share
    if mixed.validation is not None:
        found["validation"] = _identity(mixed.validation)
    return found


def _identity(rows: DatasetRef) -> dict[str, Any]:
    return {"id": rows.dataset_id, "sha256": rows.sha256, "rows": rows.num_rows}


def _described(rows: Mapping[str, Any]) -> str:
    return f"{rows['rows']} of {code(rows['id'])}, sha256 `{rows['sha256']}`"


def _job(made_by: Any) -> str | None:
    return None if made_by is None else f"{made_by.job_uuid}/{made_by.checkpoint}"
