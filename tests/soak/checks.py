"""What must hold of a job that has come to rest. Each check reports what is wrong, or nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import CheckpointRecord, JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.files import is_whole
from tests.contract.payloads import Json
from tests.soak.jobs import RECIPES, History

Result = tuple[str, list[tuple[int, float]]]
"""Digest of the exported weights, and the loss of every step."""


def complaint(store: Store, job: History, reference: Result | None) -> str:
    record = store.get(job.job_uuid)
    checkpoints = store.checkpoints(job.job_uuid)
    broken = [str(checkpoint.path) for checkpoint in checkpoints if not is_whole(checkpoint.path)]
    if broken:
        return f"lists checkpoints that are not whole: {broken}"
    points = [(point.kind, point.step) for point in store.points(job.job_uuid)]
    steps = [step for kind, step in points if kind == "train"]
    if len(set(points)) != len(points) or steps != list(range(1, len(steps) + 1)):
        return f"has metric points {points}"
    if found := job.complaint(record):
        return found
    if record.state is not JobState.completed:
        return ""
    total = RECIPES[job.recipe].steps
    finals = [checkpoint.step for checkpoint in checkpoints if checkpoint.kind == "final"]
    kept = [checkpoint.step for checkpoint in checkpoints if checkpoint.kind == "step"]
    if (record.progress.step, record.progress.total_steps, len(steps), finals) != (total, total, total, [total]):
        return f"has progress {record.progress} and final checkpoints {finals}, expected {total} steps"
    if len(kept) > job.options.get("keep_last", len(kept)):
        return f"keeps checkpoints {kept}"
    if reference not in (None, result(store, job.job_uuid)):
        return "has other weights or losses than its reference"
    return ""


def complaint_of_answer(record: JobRecord, checkpoints: list[CheckpointRecord], status: Json) -> str:
    """The server reports what the store holds."""
    message = status["resources_allocated"]
    paths = {checkpoint["path"] for checkpoint in status["checkpoints"]}
    same = message["state"] == record.state and paths == {str(checkpoint.path) for checkpoint in checkpoints}
    explained = (message["error"] is not None) == (record.state is JobState.failed)
    return "" if same and explained else f"is {record.state} with {checkpoints}, but the server reports {status}"


def result(store: Store, job_uuid: str) -> Result:
    home = store.get(job_uuid).spec.checkpoint_dir
    digest = hashlib.sha256()
    for file in sorted([*home.glob("final/*.safetensors"), *home.glob("merged/*.safetensors")]):
        digest.update(file.name.encode() + file.read_bytes())
    points = [point for point in store.points(job_uuid) if point.kind == "train"]
    return digest.hexdigest(), [(point.step, point.metrics["loss"]) for point in points]


def unlisted(store: Store) -> list[Path]:
    """Checkpoints on disk that no list names: written just before a kill, or about to be removed at one."""
    jobs = store.list()
    listed = {checkpoint.path for job in jobs for checkpoint in store.checkpoints(job.job_uuid)}
    found = {path for job in jobs for path in job.spec.checkpoint_dir.glob("checkpoint-*")}
    return sorted(found - listed)


def load_finals(store: Store) -> int:
    """As a user would, with plain transformers, or peft for an adapter; returns how many there are."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    listed = [checkpoint for name in store.names() for checkpoint in store.checkpoints(name)]
    finals = [checkpoint.path for checkpoint in listed if checkpoint.kind != "step"]
    for path in finals:
        adapter = (path / "adapter_config.json").exists()
        (AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM).from_pretrained(path)
        AutoTokenizer.from_pretrained(path)
    return len(finals)
