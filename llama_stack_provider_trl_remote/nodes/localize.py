"""Translates between the service's paths and this node's: specs on arrival, events on their way back. Pure
functions."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.requests.names import JOB_UUID_PATTERN
from llama_stack_provider_trl.specs.answer_files import Whole, whole_batches
from llama_stack_provider_trl.specs.bases import parts_of, with_parts
from llama_stack_provider_trl.specs.events import CHECKPOINT_PATHS
from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, JobSpec, ReferenceSpec, ResumeFrom
from llama_stack_provider_trl.specs.model_files import MOST_FILES, check_model_names, files_digest
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl.system.files import RunDir, resolve_under

from ..wire import TaskOrder

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

    @cached_property
    def attempt(self) -> AttemptSpec:
        """With the service's paths. Raises InvalidRequest; a job that was cancelled before its first order has none."""
        found = attempt_of(self.order)
        assert found is not None
        return found

    @property
    def theirs(self) -> Path:
        """The service's path of the job's checkpoint directory."""
        return self.attempt.job.checkpoint_dir

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
        return self.attempt.job.does.answer_files if self.order.spec else ()

    def whole_answers(self, file: BinaryIO, begin: Whole) -> Whole:
        """The whole batches of the job's file of answers."""
        data, answering = self.attempt.job.data, self.attempt.job.does.answering
        assert answering is not None
        return whole_batches(file, data.batch_size, data.dataset.num_rows * answering.samples_per_prompt, begin)

    def resumed_from(self) -> list[str]:
        """The service's paths of the checkpoints that the attempt may resume from, the best first."""
        return list(map(str, self.attempt.resume_candidates))

    def datasets(self) -> list[DatasetRef]:
        """The rows of the job."""
        if not self.order.spec:
            return []
        return [rows for _, rows in parts_of(self.attempt.job, DatasetRef)]

    def spec(self, resume: list[str] | None = None, models: Mapping[str, Path] | None = None) -> AttemptSpec:
        """The AttemptSpec with this node's paths.

        Args:
            resume: those of `resumed_from` that are here; None: all.
            models: name -> directory of the models that are not read by their names.
        """
        here, node = models or {}, NodeDir(self.data_dir)
        job = self.attempt.job.changed(checkpoint_dir=self.checkpoint_dir)
        if job.data.token_cache:
            job = job.changed(token_cache=node.tokens)
        job = with_parts(job, DatasetRef, lambda rows: _with(rows, path=self.rows(rows.sha256)))
        job = with_parts(job, ModelSource, lambda source: _with(source, path=here.get(source.model)))
        job = with_parts(job, ResumeFrom, lambda other: _with(other, path=other.path and self.here(str(other.path))))
        job = with_parts(job, ReferenceSpec, lambda model: _with(model, cache=model.cache and node.reference))
        candidates = [self.here(path) for path in (self.resumed_from() if resume is None else resume)]
        return _with(
            self.attempt,
            job=job,
            run_dir=self.run_dir,
            turn=Path(self.order.shared_mark) if self.shared and self.order.shared_mark else None,
            resume_from=next(iter(candidates), None),
            fall_back_to=tuple(candidates[1:]),
        )

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


def _with[P: BaseModel](part: P, **changes: Any) -> P:
    return part.model_copy(update=changes)


def _named_answers(event: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a job's result that has the path of its answers; None: there is none."""
    result = event.get("result") if event.get("type") == "finished" else None
    answers = result.get("answers") if isinstance(result, dict) else None
    return answers if isinstance(answers, dict) and isinstance(answers.get("path"), str) else None


def check_order(order: TaskOrder) -> None:
    """Refuse an order that names a path outside this node's data directory, before anything is written.

    The service never sends such an order; an attacker in its place may. Raises InvalidRequest: names the field.
    """
    _expect("job_uuid", order.job_uuid, bool(re.fullmatch(JOB_UUID_PATTERN, order.job_uuid)), "a job's name")
    _expect("attempt", order.attempt, order.attempt > 0, "a number from 1 on")
    wanted = f"{order.job_uuid}-{order.attempt}"
    _expect("task_id", order.task_id, order.task_id == wanted, wanted)
    for device in order.devices:
        _expect("devices", device, bool(_DEVICE.fullmatch(device)), "cpu, cpu:N, mps or cuda:N")
    if (attempt := attempt_of(order)) is not None:
        _check_spec(order, attempt)
        _check_models(order, attempt.job)


def attempt_of(order: TaskOrder) -> AttemptSpec | None:
    """The specification of an order, with the service's paths; None: it has none. Raises InvalidRequest: names the
    field."""
    if not order.spec:
        return None
    try:
        return AttemptSpec.model_validate(order.spec)
    except ValidationError as error:
        first = error.errors()[0]
        _expect(".".join(["spec", *map(str, first["loc"])]), first["input"], False, problem_of(first))
        raise


def _check_spec(order: TaskOrder, attempt: AttemptSpec) -> None:
    job, directory = attempt.job, attempt.job.checkpoint_dir
    is_plain = directory.is_absolute() and ".." not in directory.parts
    _expect("spec.job.checkpoint_dir", str(directory), is_plain, "an absolute path without '..'")
    for field, rows in parts_of(job, DatasetRef):
        is_digest = bool(_SHA256.fullmatch(rows.sha256))
        _expect(f"spec.job.{field}.sha256", rows.sha256, is_digest, "64 hexadecimal digits")
    stays = "nothing, or an adapter that is continued: one that is merged is merged on the service's machine"
    _expect("spec.job.adapter", job.adapter, job.adapter is None or job.adapter.use == "continue", stays)
    vllm = job.method.answered_by_vllm
    _expect("spec.job.train.method.vllm", vllm, vllm is None, "nothing: vLLM answers on the service's machine")
    answering = job.does.answering
    python = answering and answering.vllm_python
    _expect("spec.job.work", python, python is None, "no interpreter: vLLM answers on the service's machine")
    tasks = job.does.tasks
    _expect("spec.job.work.harness", tasks, not tasks, "nothing: tasks of a harness are on the service's machine")
    if answering is not None:
        _expect("spec.job.data.dataset.num_rows", job.data.dataset.num_rows, job.data.dataset.num_rows > 0, "some")
    borrowed = [other.path for _, other in parts_of(job, ResumeFrom) if other.path is not None]
    for given in (*([attempt.resume_from] if attempt.resume_from else []), *attempt.fall_back_to, *borrowed):
        is_step = bool(_STEP.fullmatch(given.name)) and given.is_absolute() and ".." not in given.parts
        is_step = is_step and (given.parent == directory or not given.is_relative_to(directory))
        _expect("spec.resume_from", str(given), is_step, "the path of a step checkpoint")
    mark = order.shared_mark
    _expect("shared_mark", mark, mark in ("", str(directory / MARK)), f"{MARK} in spec.job.checkpoint_dir, or nothing")


def _check_models(order: TaskOrder, job: JobSpec) -> None:
    named = {source.model for source in job.models}
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
