"""Translates between the service's paths and this node's: specs on arrival, events on their way back. Pure
functions."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.names import JOB_UUID_PATTERN
from llama_stack_provider_trl.specs.answer_files import Whole, whole_batches
from llama_stack_provider_trl.specs.events import CHECKPOINT_PATHS
from llama_stack_provider_trl.specs.job import ROWS
from llama_stack_provider_trl.specs.model_files import MOST_FILES, check_model_names, files_digest
from llama_stack_provider_trl.specs.model_source import reference_of
from llama_stack_provider_trl.specs.work import ANSWERS
from llama_stack_provider_trl.specs.work import ROWS as ROWS_MADE
from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl.system.files import RunDir, resolve_under

from ..wire import TaskOrder
from .models import models_of

MARK = ".shared"
"""Name of the mark in a job's checkpoint directory. A node detects a shared file system by it, and an attempt whether
it may still write there."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STEP = re.compile(r"checkpoint-\d{1,12}")
_DEVICE = re.compile(r"cpu(:\d{1,4})?|mps|cuda(:\d{1,4})?")
BORROWED = "borrowed"
"""Name, in a job's directory, of the directory for checkpoints of other jobs that it resumes from."""


@dataclass(frozen=True)
class PathMap:
    """Paths of the files of one task, on the service and here.

    Args:
        data_dir: the node's own.
        shared: the service's checkpoint directory is shared with this node, and is used directly.
    """

    order: TaskOrder
    data_dir: Path
    shared: bool = False

    @property
    def home(self) -> Path:
        """The directory of the job."""
        return resolve_under(NodeDir(self.data_dir).jobs, self.order.job_uuid, "job_uuid")

    @property
    def run_dir(self) -> Path:
        return self.home / "attempts" / str(self.order.attempt)

    @property
    def files(self) -> RunDir:
        return RunDir(self.run_dir)

    @property
    def checkpoint_dir(self) -> Path:
        return self.theirs if self.shared else self.home / "checkpoints"

    @property
    def theirs(self) -> Path:
        """The service's path of the job's checkpoint directory."""
        return Path(self.order.spec["job"]["checkpoint_dir"])

    def rows(self, sha256: str) -> Path:
        """This node's path of a dataset."""
        return NodeDir(self.data_dir).datasets / f"{sha256}.jsonl"

    def here(self, path: str) -> Path:
        """This node's path for a checkpoint at the service's `path`."""
        given = Path(path)
        if given.is_relative_to(self.theirs):
            return self.checkpoint_dir / given.relative_to(self.theirs)
        return self.home / BORROWED / given.name

    def there(self, path: str) -> str:
        """The service's path for a checkpoint at this node's `path`; unchanged where it has none."""
        given = Path(path)
        if given.is_relative_to(self.checkpoint_dir):
            return str(self.theirs / given.relative_to(self.checkpoint_dir))
        if given.is_relative_to(self.home / BORROWED):
            named = [other for other in self.resumed_from() if Path(other).name == given.name]
            return named[0] if named else path
        return path

    @property
    def answer_files(self) -> tuple[str, ...]:
        """As `specs.answer_files` has them. A directory that is shared with the service is not used for them: they grow
        in place, and an attempt on a lost node may still write there."""
        work = self._job.get("work") or {}
        if work.get("kind") == "generate":
            return ANSWERS, ROWS_MADE
        return (ANSWERS,) if work.get("answers") else ()

    def whole_answers(self, file: BinaryIO, begin: Whole) -> Whole:
        """The whole batches of the job's file of answers."""
        work = self._job["work"]
        per_prompt = (work.get("answers") or work)["samples_per_prompt"]
        total = self._job["data"]["dataset"]["num_rows"] * per_prompt
        return whole_batches(file, self._job["data"]["batch_size"], total, begin)

    def resumed_from(self) -> list[str]:
        """The service's paths of the checkpoints that the attempt may resume from, the best first."""
        spec = self.order.spec
        return [path for path in (spec.get("resume_from"), *spec.get("fall_back_to", ())) if path]

    def datasets(self) -> list[dict[str, Any]]:
        """The rows of the job, as `path` and `sha256`."""
        data = self._job.get("data") or {}
        return [data[name] for name in ROWS if data.get(name)]

    @property
    def _job(self) -> dict[str, Any]:
        """The JobSpec. Empty for a job that was cancelled before its first order: that order has no spec."""
        job: dict[str, Any] = self.order.spec.get("job", {})
        return job

    def spec(self, resume: list[str] | None = None, models: Mapping[str, Path] | None = None) -> dict[str, Any]:
        """The AttemptSpec with this node's paths.

        Args:
            resume: those of `resumed_from` that are here; None: all.
            models: name -> directory of the models that are not read by their names.
        """
        spec: dict[str, Any] = json.loads(json.dumps(self.order.spec))
        job = spec["job"]
        spec["run_dir"] = str(self.run_dir)
        spec["turn"] = self.order.shared_mark if self.shared else None
        job["checkpoint_dir"] = str(self.checkpoint_dir)
        for rows in (job["data"][name] for name in ROWS if job["data"].get(name)):
            rows["path"] = str(self.rows(rows["sha256"]))
        candidates = [str(self.here(path)) for path in (self.resumed_from() if resume is None else resume)]
        spec["resume_from"], spec["fall_back_to"] = next(iter(candidates), None), candidates[1:]
        if (job.get("resume_from") or {}).get("path"):
            job["resume_from"]["path"] = str(self.here(job["resume_from"]["path"]))
        if job["data"].get("token_cache"):
            job["data"]["token_cache"] = str(NodeDir(self.data_dir).tokens)
        reference = reference_of(job)
        for named, field in ((job["source"], "path"), (reference, "model_path")):
            named.pop(field, None)
            if (directory := (models or {}).get(named.get("model") or "")) is not None:
                named[field] = str(directory)
        if reference.get("cache"):
            reference["cache"] = str(NodeDir(self.data_dir).reference)
        return spec

    def event(self, line: bytes) -> bytes:
        """A line of the event file with the service's paths; one without paths stays as it is, byte for byte."""
        event = json.loads(line)
        field = CHECKPOINT_PATHS.get(event.get("type"))
        if field is not None and event.get(field):
            event[field] = self.there(event[field])
        elif (answers := _named_answers(event)) is not None:
            answers["path"] = self.there(answers["path"])
        else:
            return line
        return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def _named_answers(event: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a job's result that has the path of its answers; None: there is none."""
    result = event.get("result") if event.get("type") == "finished" else None
    answers = result.get("answers") if isinstance(result, dict) else None
    return answers if isinstance(answers, dict) and isinstance(answers.get("path"), str) else None


def check_order(order: TaskOrder) -> None:
    """Refuse an order that names a path outside this node's data directory, before anything is written.

    The service never sends such an order; an attacker in its place may.

    Raises:
        InvalidRequest: names the field.
    """
    _expect("job_uuid", order.job_uuid, bool(re.fullmatch(JOB_UUID_PATTERN, order.job_uuid)), "a job's name")
    _expect("attempt", order.attempt, order.attempt > 0, "a number from 1 on")
    wanted = f"{order.job_uuid}-{order.attempt}"
    _expect("task_id", order.task_id, order.task_id == wanted, wanted)
    for device in order.devices:
        _expect("devices", device, bool(_DEVICE.fullmatch(device)), "cpu, cpu:N, mps or cuda:N")
    if not order.spec:
        return
    try:
        _check_spec(order)
        _check_models(order)
    except InvalidRequest:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a part of another form than read here
        _expect("spec", error, False, "the fields of a job")


def _check_spec(order: TaskOrder) -> None:
    job = order.spec.get("job")
    _expect("spec.job", job, isinstance(job, dict) and isinstance(job.get("checkpoint_dir"), str), "a job's fields")
    assert isinstance(job, dict)
    directory = Path(job["checkpoint_dir"])
    is_plain = directory.is_absolute() and ".." not in directory.parts
    _expect("spec.job.checkpoint_dir", str(directory), is_plain, "an absolute path without '..'")
    data = job.get("data")
    _expect("spec.job.data", data, isinstance(data, dict), "a job's rows")
    assert isinstance(data, dict)
    for name in ROWS:
        rows = data.get(name)
        digest = rows.get("sha256") if isinstance(rows, dict) else None
        has_digest = isinstance(digest, str) and bool(_SHA256.fullmatch(digest))
        _expect(f"spec.job.data.{name}.sha256", digest, not rows or has_digest, "64 hexadecimal digits")
    stays = "nothing: a job that begins with an adapter trains on the service's machine"
    _expect("spec.job.adapter", job.get("adapter"), not job.get("adapter"), stays)
    method = (job.get("train") or {}).get("method") or {}
    rewards = method.get("rewards") or ()
    models = [one.get("model") for one in rewards if one.get("model")]
    stays = "no reward model: a job that has one trains on the service's machine"
    _expect("spec.job.train.method.rewards", models, not models, stays)
    vllm = method.get("vllm")
    _expect("spec.job.train.method.vllm", vllm, not vllm, "nothing: vLLM answers on the service's machine")
    stays = "nothing, answers of one model or its evaluation: other jobs that do not train run on the service's machine"
    _expect("spec.job.work", job.get("work"), _has_one_model(job.get("work")), stays)
    borrowed = (job.get("resume_from") or {}).get("path")
    _check_answering(job)
    for path in (order.spec.get("resume_from"), *(order.spec.get("fall_back_to") or ()), borrowed):
        given = Path(path or directory / "checkpoint-0")
        is_step = bool(_STEP.fullmatch(given.name)) and given.is_absolute() and ".." not in given.parts
        is_step = is_step and (given.parent == directory or not given.is_relative_to(directory))
        _expect("spec.resume_from", str(path), is_step, "the path of a step checkpoint")
    mark = order.shared_mark
    _expect("shared_mark", mark, mark in ("", str(directory / MARK)), f"{MARK} in spec.job.checkpoint_dir, or nothing")


def _has_one_model(work: Any) -> bool:
    """Whether a job trains, or answers or evaluates with its own model alone: no path is in `work` then."""
    if not work:
        return True
    if not isinstance(work, dict) or work.get("kind") not in ("generate", "evaluate"):
        return False
    answers = work.get("answers") or {}
    if not isinstance(answers, dict):
        return False
    further = [work.get(name) for name in ("members", "from_jobs", "harness", "vllm_python")]
    return not any([*further, answers.get("judges"), answers.get("vllm_python")])


def _check_answering(job: dict[str, Any]) -> None:
    """Check the numbers that whole batches of a job's answers follow from, where it answers prompts."""
    work = job.get("work") or {}
    name = "spec.job.work" if work.get("kind") == "generate" else "spec.job.work.answers"
    answering = work if work.get("kind") == "generate" else work.get("answers")
    if not answering:
        return
    data = job.get("data") or {}
    numbers = {
        f"{name}.samples_per_prompt": answering.get("samples_per_prompt"),
        "spec.job.data.batch_size": data.get("batch_size"),
        "spec.job.data.dataset.num_rows": (data.get("dataset") or {}).get("num_rows"),
    }
    for field, number in numbers.items():
        _expect(field, number, type(number) is int and number > 0, "a number from 1 on")


def _check_models(order: TaskOrder) -> None:
    named = {name for name, _ in models_of(order.spec["job"])}
    for model in order.models:
        _expect("models.model", model.model, model.model in named, "a model of the job")
        paths = [file.path for file in model.files]
        _expect("models.files", len(paths), 0 < len(paths) <= MOST_FILES or not model.sha256, f"1 to {MOST_FILES}")
        check_model_names(paths, "models.files")
        _expect("models.files", paths, len(paths) == len(set(paths)), "each path once")
        digest = files_digest((file.path, file.size, file.sha256) for file in model.files)
        _expect("models.sha256", model.sha256, model.sha256 in ("", digest), "the digest of its files")


def _expect(field: str, found: object, is_right: bool, expected: str) -> None:
    if not is_right:
        hint = f"expected {expected}; the service that this node has joined sent an invalid order"
        raise InvalidRequest(field, str(found)[:200], hint)


def sees_the_services_disk(order: TaskOrder) -> bool:
    """Whether the service's checkpoint directory is shared with this node: it has a regular file with the task's id
    that the service has just written. No directory is created on the way."""
    if not order.shared_mark:
        return False
    try:
        file = os.open(order.shared_mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        is_file = stat.S_ISREG(os.fstat(file).st_mode)
        return is_file and os.read(file, 1024).strip() == order.task_id.encode()
    except OSError:
        return False
    finally:
        os.close(file)
