"""Names of OpenAI's API for what the engine has: ids of jobs, models and files."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_stack_provider_trl.jobs.store.records import CheckpointRecord, JobRecord

from .bodies import MARK, DpoHyperparameters, Hyperparameters, ReinforcementHyperparameters

JOB, FILE, RESULT = "ftjob-", "file-", "file-results-"
OWNER = "trl"
"""The organization in names of models."""
_HYPERPARAMETERS = {
    "supervised": Hyperparameters,
    "dpo": DpoHyperparameters,
    "reinforcement": ReinforcementHyperparameters,
}


class Called(NamedTuple):
    """What a job was called with, beside what its specification has: a text of its metadata."""

    model: str
    """The name that the request has."""
    alias: str
    """The name of `openai.models`."""
    suffix: str
    method: dict[str, Any]
    """Its type, and its hyperparameters as they are honoured."""
    grading: Sequence[str] = ()
    """The models of its grader, as the request names them, in the order of its graders."""

    def text(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def of(cls, metadata: dict[str, str]) -> Called | None:
        """None: the job was not made by this API."""
        try:
            found = cls(**json.loads(metadata[MARK]))
            kind = found.method["type"]
            ((_, block),) = [(name, value) for name, value in found.method.items() if name != "type"]
            (numbers,) = block.values()
            _HYPERPARAMETERS[kind].model_validate(numbers)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            return None
        is_whole = found.method == {"type": kind, kind: {"hyperparameters": numbers}}
        is_whole = is_whole and isinstance(found.grading, list | tuple)
        return found if is_whole and all(isinstance(text, str) for text in (*found[:3], *found.grading)) else None

    def result_of(self, job_uuid: str) -> str:
        """The name of its fine-tuned model."""
        return f"ft:{self.alias}:{OWNER}:{self.suffix}:{job_uuid}"


def request_prefix(caller: str, body: dict[str, Any]) -> str:
    """What the names of the jobs of equal requests of a caller begin with."""
    text = json.dumps([caller, body], sort_keys=True)
    return f"{JOB}{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def new_job(prefix: str) -> str:
    return prefix + secrets.token_hex(6)


def new_file() -> str:
    return FILE + secrets.token_hex(12)


def file_of_upload(upload_id: str) -> str:
    """The file that an upload in parts becomes."""
    return FILE + upload_id.removeprefix("upload_")


def result_file(job_uuid: str) -> str:
    """The file with the metrics of a job."""
    return RESULT + job_uuid.removeprefix(JOB)


def job_of_result(file_id: str) -> str | None:
    """The job whose metrics a file has; None: it is an uploaded file."""
    found = re.fullmatch(rf"{RESULT}([A-Za-z0-9._-]{{1,122}})", file_id)
    return JOB + found[1] if found else None


def checkpoint_name(job: JobRecord, called: Called, checkpoint: CheckpointRecord) -> str:
    """The model that a checkpoint is."""
    name = called.result_of(job.job_uuid)
    return f"{name}:ckpt-step-{checkpoint.step}" if checkpoint.kind == "step" else name
