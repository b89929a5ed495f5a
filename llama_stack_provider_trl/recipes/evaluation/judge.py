"""Has models judge the answers of an `evaluate` job, once the model that gave them is released.

Each check of type judge has a file of verdicts beside the answers, one line per answer, which is written and continued
as that is: a batch per write, the same batches in every attempt, greedy. So an attempt that continues after any end of
the one before it writes the same bytes. One judge is in memory at a time, on each of several ranks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any, NamedTuple

import torch

from ... import faults
from ...errors import JobFailure
from ...specs.answer_checks import AnswerCheck
from ...specs.answer_rows import CheckedRow
from ...specs.events import EventWriter, Reason, Warned
from ...specs.job import AttemptSpec, JobSpec
from ...specs.judging import VERDICT_TOKENS, default_template, filled, read_verdict
from ...specs.work import ANSWERS, VERDICTS, Answering, CheckedAnswering, FurtherModel
from ..answers.answerer import Answered, Answerer
from ..answers.by_transformers import TransformersAnswerer
from ..answers.generate import AnswerFile, pauses, report_progress
from ..data.chat import Chat, LostTurns
from ..data.forms import THINK, opens_thought
from ..distributed.heartbeat import heartbeat
from ..distributed.replicas import ALONE, Replicas
from ..model.loading import load_config, load_tokenizer


class Judge(NamedTuple):
    number: int
    """Of the check among the job's."""
    check: AnswerCheck
    model: FurtherModel
    verdicts: AnswerFile

    def loads(self, spec: JobSpec, device: torch.device) -> Answerer:
        """The model, ready to give verdicts. Raises JobFailure."""
        most = self.check.max_new_tokens or VERDICT_TOKENS
        greedy = Answering(max_new_tokens=most, temperature=0.0, top_p=1.0, seed=0, samples_per_prompt=1)
        return TransformersAnswerer(spec.model_copy(update=self.model.as_own()), greedy, device)

    def reads(self, answer: dict[str, Any], row: CheckedRow) -> str:
        check = self.check
        template = check.template or default_template(check.scale, has_reference=check.has_reference)
        return filled(template, answer["prompt"], answer["text"], row.references[self.number])


class Judges:
    """The judges of a job, and their verdicts so far. Close it.

    Args:
        from_start: the answers are not complete: no verdict of an earlier attempt counts.
        team: the ranks of the job, all of which make this object.
    """

    def __init__(
        self, spec: JobSpec, work: CheckedAnswering, total: int, *, from_start: bool, team: Replicas = ALONE
    ) -> None:
        self._spec, self._total, self._team = spec, total, team
        self._files = ExitStack()
        self.all: list[Judge] = []
        of_judges = [(number, check) for number, check in enumerate(work.checks) if check.type == "judge"]
        for (number, check), model in zip(of_judges, work.judges, strict=True):
            path = spec.checkpoint_dir / VERDICTS.format(number)
            if from_start and team.is_first:
                path.unlink(missing_ok=True)
            file = AnswerFile(path, spec.data.batch_size, total, team, "judging")
            self.all.append(Judge(number, check, model, self._files.enter_context(closing(file))))

    @property
    def done(self) -> int:
        return sum(judge.verdicts.count for judge in self.all)

    @property
    def total(self) -> int:
        return self._total * len(self.all)

    def close(self) -> None:
        self._files.close()

    def check(self) -> None:
        """Read the small files of all judges that have verdicts to give. Raises JobFailure: one cannot be used."""
        for judge in self.all:
            if judge.verdicts.count < self._total:
                load_config(judge.model.source)
                load_tokenizer(judge.model.source)

    def judge_all(
        self,
        attempt: AttemptSpec,
        writer: EventWriter,
        rows: Sequence[CheckedRow],
        answers: AnswerFile,
        device: torch.device,
    ) -> bool:
        """Have the answers judged that earlier attempts have not. A collective. Returns False: the attempt is paused.
        Raises JobFailure: a judge, or a verdict of an earlier attempt, cannot be used."""
        with heartbeat(writer):
            for judge in self.all:
                _check_recorded(judge, answers)
        loaded: tuple[Any, Answerer] | None = None
        for judge in self.all:
            if judge.verdicts.count == self._total:
                continue
            key = judge.model, judge.check.max_new_tokens
            if loaded is None or loaded[0] != key:
                loaded = None
                release(device)
                with heartbeat(writer):
                    loaded = key, judge.loads(self._spec, device)
            with heartbeat(writer):
                self._warn_of_template(judge, loaded[1].chat, rows, answers, writer)
            unjudged = islice(answers.lines(), judge.verdicts.count, None)
            while judge.verdicts.count < self._total:
                if pauses(attempt, writer, self._total + self.done, self._team):
                    return False
                batch = self._team.deal([[*islice(unjudged, len(numbers))] for numbers in judge.verdicts.batches()])
                self._judge_batch(judge, loaded[1], rows, batch, writer)
                faults.reach(f"step-{self._total + self.done}")
        return True

    def _warn_of_template(
        self, judge: Judge, chat: Chat, rows: Sequence[CheckedRow], answers: AnswerFile, writer: EventWriter
    ) -> None:
        """Report what the judge's chat template leaves out of the prompts that are left. A rank without the file of
        answers has none."""
        warned, chat.lost, count = chat.template_warning, LostTurns(), 0
        for answer in islice(answers.lines(), judge.verdicts.count, None):
            turns = [{"role": "user", "content": judge.reads(answer, rows[answer["row"]])}]
            chat.render_counted(turns, answer["row"], add_generation_prompt=True)
            count += 1
        if chat.template_warning and not warned:
            writer.write(Warned(message=f"the judge {judge.check.model}: {chat.template_warning}"))
        if lost_turns := chat.lost.message("prompt", count, f"the judge {judge.check.model}'s"):
            writer.write(Warned(message=lost_turns))

    def _judge_batch(
        self,
        judge: Judge,
        answerer: Answerer,
        rows: Sequence[CheckedRow],
        batch: list[dict[str, Any]],
        writer: EventWriter,
    ) -> None:
        began = time.monotonic()
        texts = [judge.reads(answer, rows[answer["row"]]) for answer in batch]
        turns = [[{"role": "user", "content": text}] for text in texts]
        encoded = [answerer.tokens_of(one, answer["row"]) for one, answer in zip(turns, batch, strict=True)]
        fitting = [ids for ids in encoded if answerer.has_room(ids)]
        sources = [random.Random(0) for _ in fitting]  # a greedy choice reads none
        found = answerer.answer(fitting, sources, writer.heartbeat)
        given = iter(found)
        verdicts = [next(given) if answerer.has_room(ids) else None for ids in encoded]
        begins = [THINK if opens_thought(answerer.tokenizer, ids) else "" for ids in encoded]
        lines = [_line(judge.check, *of_one) for of_one in zip(batch, verdicts, begins, strict=True)]
        found = judge.verdicts.add(lines, found)
        report_progress(self._total + self.done, self._total + self.total, found, time.monotonic() - began, writer)


def _check_recorded(judge: Judge, answers: AnswerFile) -> None:
    """Refuse verdicts of earlier attempts that are damaged, or on other answers. Raises JobFailure: names the line."""
    file, number = judge.verdicts, 0
    least, most = judge.check.scale or (0.0, 1.0)
    try:
        for line, answer in zip(file.lines(), answers.lines(), strict=False):
            score, text = line["score"], line["verdict"]
            if (line["row"], line["sample"]) != (answer["row"], answer["sample"]):
                raise ValueError(f"it is of row {line['row']}, the answer of row {answer['row']}")
            if not (score is None or least <= score <= most) or not (text is None or isinstance(text, str)):
                raise ValueError("it has no score and verdict")
            number += 1
    except (ValueError, LookupError, TypeError) as error:
        raise JobFailure(
            Reason.invalid_dataset,
            f"line {number + 1} in {file.path} cannot be read as a verdict ({error}). Another program has changed "
            "the file: remove it, and submit the job again under another job_uuid",
        ) from error


def _line(check: AnswerCheck, answer: dict[str, Any], verdict: Answered | None, begins: str) -> dict[str, Any]:
    """The line of a verdict. None: prompt and answer are longer than the judge has positions for.

    Args:
        begins: with what the judge's turn begins that it has not written.
    """
    score = text = None
    if verdict is not None:
        text = verdict.text
        score = read_verdict(f"{begins}{text}", check.scale, is_complete=verdict.complete)
    return {"row": answer["row"], "sample": answer["sample"], "score": score, "verdict": text}


def passes_verdict(check: AnswerCheck, score: float | None) -> bool:
    """Whether an answer with this score passes. An unreadable verdict, None, does not."""
    return score is not None and score >= (1.0 if check.at_least is None else check.at_least)


def add_verdicts(spec: JobSpec, checks: Sequence[AnswerCheck], answers: AnswerFile, judges: Judges) -> None:
    """Write the file of answers again, each with its verdicts. A repetition changes nothing."""
    staged = spec.checkpoint_dir / f"{ANSWERS}.tmp"
    lines = [judge.verdicts.lines() for judge in judges.all]
    with open(staged, "wb") as file:
        for answer, *verdicts in zip(answers.lines(), *lines, strict=True):
            file.write(json.dumps(_joined(answer, checks, judges, verdicts), ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    faults.reach("verdicts-staged")
    os.replace(staged, spec.checkpoint_dir / ANSWERS)


def _joined(
    answer: dict[str, Any], checks: Sequence[AnswerCheck], judges: Judges, verdicts: list[dict[str, Any]]
) -> dict[str, Any]:
    passed, judged = {**answer["passed"]}, {}
    for judge, verdict in zip(judges.all, verdicts, strict=True):
        judged[judge.check.measure] = {"score": verdict["score"], "verdict": verdict["verdict"]}
        passed[judge.check.measure] = passes_verdict(judge.check, verdict["score"])
    return {**answer, "passed": {check.measure: passed[check.measure] for check in checks}, "judged": judged}


def release(device: torch.device) -> None:
    """Give back the memory of models that nothing refers to any longer."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
