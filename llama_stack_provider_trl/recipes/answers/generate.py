"""Answers the prompts of a dataset: the recipe of `generate` jobs, and the answers of `evaluate` jobs that are checked
(`recipes.answers.checked`). `recipes.train` is the entry point.

Answers are appended to a file in the job's checkpoint directory, a batch per write. A batch is always the same answers,
by their number, and the random numbers of an answer follow from the seed, its row and its sample. So an attempt that
continues after any end of the one before it writes the same bytes. Of several ranks each answers a batch, and the first
writes them in their order: the bytes of one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from peft import PeftConfig, get_peft_model
from transformers import PreTrainedModel

from ... import faults
from ...errors import JobFailure
from ...specs.answer_files import whole_batches
from ...specs.events import EventWriter, Finished, Paused, Prepared, Progress, Reason, Started, Warned
from ...specs.job import AttemptSpec, JobSpec
from ...specs.rows import Message
from ...specs.work import ANSWERS, ROWS, Answering, GenerateSpec
from ...system.files import RunDir
from ..checkpoint.merged_base import discard_merged_base, with_merged_base
from ..checkpoint.step import need_space
from ..data.prepare import read_examples
from ..distributed.heartbeat import heartbeat
from ..distributed.replicas import ALONE, Replicas, replicas
from ..model.loading import DTYPES, choose_device, load_config, outline, parameter_counts
from .answerer import Answered, Answerer
from .by_transformers import TransformersAnswerer
from .by_vllm import VllmAnswerer


class Questions(NamedTuple):
    prompts: list[list[Message]]
    """One per row of the dataset."""
    describe: Callable[[int, str], dict[str, Any]] = lambda row, text: {}
    """What the line of an answer has besides, by its row and its text. The same at each call."""


class AnswerFile:
    """The answers of a job in a file, one per line, in their order. The first of several ranks alone has the file; the
    others know the number of answers.

    Args:
        batch: answers that are written together: of a batch that is not whole, nothing is kept.
        team: the ranks of the job, all of which open it.
        fault: name of the point at which a test can end the process in the middle of a batch.
    """

    def __init__(self, path: Path, batch: int, total: int, team: Replicas = ALONE, fault: str = "answering") -> None:
        self.path, self._batch, self._total, self._team, self._fault = path, batch, total, team, fault
        self._file = open(path, "a+b") if team.is_first else None  # noqa: SIM115 (`close`)
        self.count = team.of_first(0 if self._file is None else self._keep_whole_batches(self._file))

    def _keep_whole_batches(self, file: BinaryIO) -> int:
        kept = whole_batches(file, self._batch, self._total)
        file.truncate(kept.size)
        file.seek(0, os.SEEK_END)
        return kept.answers

    def batches(self) -> list[range]:
        """The numbers of the answers that the ranks are to give next, by rank. A rank with nothing left has none."""
        first, size, total = self.count, self._batch, self._total
        begins = range(first, first + self._team.count * size, size)
        return [range(min(begin, total), min(begin + size, total)) for begin in begins]

    def add(self, lines: list[dict[str, Any]], found: list[Answered]) -> list[Answered]:
        """Write the batch of each rank, and return when all are on the disk. A collective. Returns what the models of
        all ranks have answered."""
        batches = self._team.gather((lines, found))
        for batch, _ in batches:
            if batch:
                self.append(batch)
        return [answer for _, answers in batches for answer in answers]

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Write a batch, and return when it is on the disk."""
        if self._file is not None:
            self._write(self._file, lines)
        self.count += len(lines)

    def _write(self, file: BinaryIO, lines: list[dict[str, Any]]) -> None:
        data = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
        middle = len(data) // 2
        file.write(data[:middle])
        file.flush()
        faults.reach(f"{self._fault}-{self.count}")
        file.write(data[middle:])
        file.flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """All answers; of a rank without the file, none."""
        if self._file is None:
            return iter(())
        self._file.seek(0)
        return map(json.loads, self._file)


def generate_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Answer the prompts that earlier attempts have not, and make a dataset of all answers. Raises JobFailure: a
    failure that the user can correct; any other exception is a bug or a limit of the machine."""
    with replicas(attempt, writer) as (team, events):
        _generate(attempt, events, team)


def _generate(attempt: AttemptSpec, writer: EventWriter, team: Replicas) -> None:
    spec, work = attempt.job, attempt.job.work
    assert isinstance(work, GenerateSpec)
    device = begin(attempt, writer)
    with heartbeat(writer):
        examples = read_examples(spec.data.dataset.path, "prompts", names=spec.data.dataset.names)
        questions = Questions([example.messages for example in examples])
    with closing(open_answers(spec, work, questions, team)) as answers:
        if not answer_all(attempt, writer, work, questions, answers, device, team=team) or not team.is_first:
            return
        discard_merged_base(spec)
        result = _make_dataset(spec, answers, writer)
    faults.reach("finishing")
    writer.write(Finished(step=answers.count, result=result), durable=True)


def begin(attempt: AttemptSpec, writer: EventWriter) -> torch.device:
    """Report the start of an attempt that answers prompts; returns its device. Raises JobFailure."""
    spec = attempt.job
    device = choose_device(spec.device)
    writer.write(Started(pid=os.getpid(), device=str(device), versions={"torch": torch.__version__}))
    if spec.compute.num_threads:
        torch.set_num_threads(spec.compute.num_threads)
    faults.reach("started")
    spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    return device


def open_answers(spec: JobSpec, work: Answering, questions: Questions, team: Replicas) -> AnswerFile:
    """The answers that a job has so far. A collective."""
    total = len(questions.prompts) * work.samples_per_prompt
    return AnswerFile(spec.checkpoint_dir / ANSWERS, spec.data.batch_size, total, team)


def answer_all(
    attempt: AttemptSpec,
    writer: EventWriter,
    work: Answering,
    questions: Questions,
    answers: AnswerFile,
    device: torch.device,
    more: tuple[int, int] = (0, 0),
    team: Replicas = ALONE,
) -> bool:
    """Answer the questions that earlier attempts have not. A collective. The model is released when this returns, and
    not loaded where there is none. Raises JobFailure: as `generate_attempt`. Returns False: the attempt is paused.

    Args:
        more: steps of the job after the answers: those that are done, and all.
    """
    spec, rows = attempt.job, len(questions.prompts)
    total = rows * work.samples_per_prompt
    done, steps = answers.count + more[0], total + more[1]
    with heartbeat(writer):
        _check_recorded(answers, questions, work.samples_per_prompt)
    if answers.count == total:
        _report_prepared(spec, _outlined(spec), rows, steps, done, writer)
        faults.reach("prepared")
        return True
    with ExitStack() as stack:
        with heartbeat(writer):
            answerer = stack.enter_context(_open_answerer(spec, work, device, writer, team))
            encoded = [answerer.encode(prompt, row) for row, prompt in enumerate(questions.prompts)]
        answerer.prepare(encoded)
        lost_turns = answerer.chat.lost.message("prompt", len(encoded))
        for warning in filter(None, [answerer.chat.template_warning, lost_turns]):
            writer.write(Warned(message=warning))
        _report_prepared(spec, answerer.model, rows, steps, done, writer)
        faults.reach("prepared")
        while answers.count < total:
            if pauses(attempt, writer, answers.count, team):
                return False
            _answer_batches(answerer, questions, encoded, answers, steps, writer, team)
            faults.reach(f"step-{answers.count}")
    return True


def _open_answerer(
    spec: JobSpec, work: Answering, device: torch.device, writer: EventWriter, team: Replicas
) -> Answerer:
    """The model of a job, by its engine. A collective. Raises JobFailure, OSError."""
    if work.engine == "transformers":
        return TransformersAnswerer(spec, work, device)
    if team.is_first:
        with_merged_base(spec, partial(need_space, spec), writer.heartbeat)
    team.of_first(None)  # the others read what it has written
    merged = with_merged_base(spec, partial(need_space, spec))
    return VllmAnswerer(merged, work, device, spec.data.batch_size, writer)


def pauses(attempt: AttemptSpec, writer: EventWriter, step: int, team: Replicas) -> bool:
    """Whether a pause is requested, which is reported then. A collective."""
    if not team.of_first(RunDir(attempt.run_dir).control.exists()):
        return False
    writer.write(Paused(step=step), durable=True)
    return True


def _check_recorded(answers: AnswerFile, questions: Questions, samples: int) -> None:
    """Refuse answers of earlier attempts that belong to other prompts, or have another place than theirs. Raises
    JobFailure: names the row."""
    number, lines = 0, answers.lines()
    todo = "Another program has changed the file: remove it, and submit the job again under another job_uuid"
    try:
        for number, line in enumerate(lines):
            if line["prompt"] != questions.prompts[row := line["row"]]:
                found = f"row {row}: answer {number} in {answers.path} belongs to another prompt than this row has"
                raise JobFailure(Reason.invalid_dataset, f"{found}. {todo}")
            if (row, line["sample"]) != (place := divmod(number, samples)):
                found = f"row {row}: answer {number} in {answers.path} is sample {line['sample']} of it, where sample "
                raise JobFailure(Reason.invalid_dataset, f"{found}{place[1]} of row {place[0]} belongs. {todo}")
    except (ValueError, LookupError, TypeError) as error:
        found = f"the line after answer {number} in {answers.path} cannot be read as an answer ({error})"
        raise JobFailure(Reason.invalid_dataset, f"{found}. {todo}") from error


def _answer_batches(
    answerer: Answerer,
    questions: Questions,
    encoded: list[list[int]],
    answers: AnswerFile,
    steps: int,
    writer: EventWriter,
    team: Replicas,
) -> None:
    """Answer the next prompts, a batch on each rank, and write the answers.

    Args:
        steps: answers of the job, and what follows them.
    """
    work = answerer.work
    places = [divmod(number, work.samples_per_prompt) for number in answers.batches()[team.rank]]
    began = time.monotonic()
    found = answerer.answer(
        [encoded[row] for row, _ in places],
        [random.Random(f"{work.seed}/{row}/{sample}") for row, sample in places],
        writer.heartbeat,
    )
    lines = []
    for (row, sample), answer in zip(places, found, strict=True):
        writer.heartbeat()  # each check may take a second
        line = {"row": row, "sample": sample, "prompt": questions.prompts[row], **answer._asdict()}
        lines.append({**line, **questions.describe(row, answer.text)})
    answered = answers.add(lines, found)
    report_progress(answers.count, steps, answered, time.monotonic() - began, writer)


def _outlined(spec: JobSpec) -> PreTrainedModel:
    """The model as `_load` returns it, without weights."""
    model: Any = outline(spec.source, load_config(spec.source), DTYPES[spec.compute.dtype])
    if spec.adapter is not None and spec.adapter.use == "continue":
        with torch.device("meta"):
            model = get_peft_model(model, PeftConfig.from_pretrained(spec.adapter.directory))
    return model


def _report_prepared(
    spec: JobSpec, model: PreTrainedModel, rows: int, total: int, done: int, writer: EventWriter
) -> None:
    _, parameters = parameter_counts(model)
    effective = {"model_class": type(model).__name__, "weights_dtype": spec.compute.dtype}
    writer.write(
        Prepared(
            total_steps=total,
            start_step=done,
            num_rows=rows,
            trainable_parameters=0,
            total_parameters=parameters,
            effective=effective,
        )
    )


def report_progress(done: int, total: int, found: list[Answered], seconds: float, writer: EventWriter) -> None:
    """Report the steps that are done, the last of which gave these answers."""
    tokens = sum(answer.tokens for answer in found)
    metrics = {"tokens_per_second": tokens / max(seconds, 1e-9), "answer_tokens": tokens / max(len(found), 1)}
    report_steps(done, total, metrics, writer)


def report_steps(done: int, total: int, metrics: dict[str, float], writer: EventWriter) -> None:
    """Report the steps that are done, with the memory that they have taken."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    writer.write(Progress(step=done, epoch=round(done / total, 6), metrics=metrics, peak_memory_bytes=peak))


def _make_dataset(spec: JobSpec, answers: AnswerFile, writer: EventWriter) -> dict[str, Any]:
    """Write the answers as rows to train on; returns the result of the job. Raises JobFailure: no answer has text."""
    blank = incomplete = tokens = 0

    def rows() -> Iterator[bytes]:
        nonlocal blank, incomplete, tokens
        for line in answers.lines():
            tokens += line["tokens"]
            incomplete += not line["complete"]
            if not line["text"].strip():
                blank += 1
                continue
            row = {"prompt": line["prompt"], "completion": [{"role": "assistant", "content": line["text"]}]}
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"

    digest, num_rows, staged = hashlib.sha256(), 0, spec.checkpoint_dir / f"{ROWS}.tmp"
    with open(staged, "wb") as file:
        for row in rows():
            digest.update(row)
            file.write(row)
            num_rows += 1
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, spec.checkpoint_dir / ROWS)
    if not num_rows:
        raise JobFailure(
            Reason.invalid_model,
            f"all {blank} answers are blank: the model ends them at once. Name a model that answers these prompts",
        )
    if blank:
        writer.write(Warned(message=f"{blank} of {answers.count} answers are blank and not in the dataset"))
    return {
        "dataset": {"sha256": digest.hexdigest(), "num_rows": num_rows},
        "answers": {"count": answers.count, "blank": blank, "incomplete": incomplete, "tokens": tokens},
    }
