"""What the page of a job shows, from the job's status. Pure functions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from llama_stack_provider_trl.jobs.decisions.states import ACTIVE, TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.reader import SentRequest
from llama_stack_provider_trl.specs.methods import METHODS, Algorithm
from llama_stack_provider_trl.specs.work import WORKS
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse

from ..views.exports import ExportedFile, ListedExport
from ..views.logs import LAUNCHER
from . import rendering
from .export_view import SHOWN, export_commands, export_of
from .job_form import TRAINING_CALLS, same_job

_LONGEST_LINE = 2000
_LONGEST_REQUEST = 32 << 10
"""Bytes of a request, as JSON, that the page of its job repeats: YAML of 256 KiB takes half a second of a core."""
_STEP = re.compile(r"checkpoint-(\d+)$")
_PAUSABLE = (JobState.scheduled, JobState.launching, JobState.in_progress)
_ENDS = {
    JobState.completed: "the job completed",
    JobState.cancelled: "the job was cancelled",
    JobState.paused: "the job was paused",
}
_NAMED = re.compile(r"(?<=\(held by )[^()]+(?=\))|\S{1,200}(?= starts before it)|(?<=processes of job )\S+")
"""Jobs in the reason of a wait."""
_BETWEEN = re.compile(r"(, | and \d+ more$)")
"""As the supervisor lists jobs."""
_MOST_SAVED, _LAST_SAVED = 8, 4
"""Checkpoints of a list that is shown whole, and the last ones that a longer one shows."""
_SAVED = "it saved, for a pause or for a move to another node"
RIBBON = 1000
"""Width of the ribbon of attempts, in its own units."""


class Setting(NamedTuple):
    name: str
    submitted: str
    """Empty: the job was submitted without it, it is the training's own report."""
    reported: str
    """Empty: the training has reported nothing about it."""

    @property
    def differs(self) -> bool:
        return bool(self.submitted and self.reported and self.submitted != self.reported)


class Attempt(NamedTuple):
    number: int
    device: str
    begun: datetime | None
    seconds: float | None
    start_step: int
    step: int
    resumed_from: str
    ended: str
    """How it ended, as a sentence."""
    kind: str
    """Of its part of the ribbon: running, ended or failed."""
    has_saved: bool
    """Whether it ended to be continued: for a pause, or for a move to another node."""
    left: float
    """This and `width`: its part of the ribbon."""
    width: float


class Mark(NamedTuple):
    """Something that happened at a step, as charts mark it."""

    kind: str
    """checkpoint, attempt, pause or warning."""
    step: int
    text: str


class SavedModel(NamedTuple):
    """A row of the table of checkpoints. `checkpoint` is one of the status."""

    checkpoint: Any
    name: str
    """Of its directory, by which requests name it."""
    is_best: bool
    resumes: bool
    """Whether a training can continue from it: it has the state of the optimizer."""


def saved_of(status: PostTrainingJobStatusResponse) -> tuple[list[SavedModel], list[SavedModel]]:
    """The checkpoints of a job: those of a long list that matter most, the best one and the last ones, and the others,
    by step."""
    losses = [
        (one.training_metrics.validation_loss, place)
        for place, one in enumerate(status.checkpoints)
        if one.training_metrics is not None and one.training_metrics.validation_loss is not None
    ]
    best = min(losses)[1] if len(losses) > 1 else None
    found = []
    for place, one in enumerate(status.checkpoints):
        name = one.path.rstrip("/").rpartition("/")[2]
        found.append(SavedModel(one, name, place == best, _STEP.search(name) is not None))
    if len(found) <= _MOST_SAVED:
        return found, []
    first = len(found) - _LAST_SAVED
    shown = [one for place, one in enumerate(found) if one.is_best or place >= first]
    return shown, [one for one in found if one not in shown]


def values(
    status: PostTrainingJobStatusResponse,
    warnings: Sequence[tuple[int, str]] = (),
    exports: Sequence[ListedExport] = (),
    files: Sequence[ExportedFile] = (),
    url: str = "",
    requested: SentRequest | None = None,
    eval_loss: float | None = None,
) -> dict[str, Any]:
    """The values of the template `job.html`, but for the configuration in groups.

    Args:
        warnings: those that were reported while it trained, each with its step.
        exports: those of its checkpoints.
        files: of an export.
        url: of the service.
        requested: what was requested of the service; None: it has no request of its own.
        eval_loss: of the last evaluation; None: there is none.
    """
    found = status.resources_allocated
    state = JobState(found["state"])
    attempts = attempts_of(found["attempts"], state)
    export, result = export_of(status, files, url), found.get("result") or {}
    if export is not None:
        result = {name: value for name, value in result.items() if name not in SHOWN}
    repeated = _repeated(requested, url)
    saved, older = saved_of(status)
    can_continue = state in TERMINAL and again_of(state, requested) != ""
    answers = bool(status.checkpoints) and _writes_text(found["effective_config"])
    return {
        "status": status,
        "found": found,
        "state": state,
        "path": path_of(status.job_uuid),
        "attempts": attempts,
        "ribbon": RIBBON,
        "has_answers": has_answers(found["effective_config"]),
        "headline": headline_of(found["effective_config"]["algorithm"]),
        "eval_loss": eval_loss,
        "step_seconds": step_seconds_of(found.get("progress") or {}, state, attempts),
        "requested": repeated,
        "too_long": requested is not None and repeated is None,
        "again": again_of(state, requested),
        "logs": logs_of(status),
        "result": result_of(result),
        "export": export,
        "exports": exports,
        "export_command": export_commands(status.job_uuid, url),
        "epochs": epochs_of(status),
        "saved": saved,
        "older": older,
        "last": next((one.name for one in reversed([*older, *saved]) if one.resumes), ""),
        "is_running": state in ACTIVE,
        "has_ended": state in TERMINAL,
        "can": {
            "cancel": state not in TERMINAL and state is not JobState.cancelling,
            "pause": state in _PAUSABLE and not found.get("search"),
            "resume": state is JobState.paused,
            "delete": state in TERMINAL,
            "chat": answers,
            "export": answers and state is JobState.completed,
            "continue": can_continue,
        },
        "warned_at": {message: step for step, message in warnings},
        "marks": [mark._asdict() for mark in marks_of(status, attempts, warnings)],
    }


def _repeated(requested: SentRequest | None, url: str) -> dict[str, str] | None:
    """The request for other clients; None: there is none, or it is too long."""
    if requested is None or len(json.dumps(requested.body)) > _LONGEST_REQUEST:
        return None
    return same_job(requested.body, url, requested.call)


def again_of(state: JobState, requested: SentRequest | None) -> str:
    """What the link to a form with the job's request is called; empty: the form cannot have it."""
    if requested is None or requested.call not in TRAINING_CALLS:
        return ""
    return "Edit and retry" if state in (JobState.failed, JobState.cancelled) else "Clone"


def has_answers(config: Mapping[str, Any]) -> bool:
    """Whether the page of a job's answers may have some: those that it makes, rollouts, samples."""
    work = config.get("work") or {"kind": "train"}
    method = METHODS.get(config["algorithm"])
    has_rollouts = method is not None and method.rows == "prompts" and work["kind"] == "train"
    return bool(work["kind"] == "generate" or work.get("answers") or has_rollouts or config.get("samples"))


def headline_of(algorithm: Algorithm) -> str:
    """The title of the chart that tells most of a method, as `curves.js` has it."""
    method = METHODS.get(algorithm)
    if algorithm == "grpo":
        return "Reward"
    return "Rewards" if method is not None and (method.has_pairs or algorithm == "kto") else "Loss"


def step_seconds_of(progress: Mapping[str, Any], state: JobState, attempts: Sequence[Attempt]) -> float | None:
    """Seconds of a step: from the time that is left while the job runs, else the mean of its last attempt, which
    includes what the attempt did before and after its steps; None: not known."""
    if state not in ACTIVE:
        last = attempts[-1] if attempts else None
        done = 0 if last is None else last.step - last.start_step
        return last.seconds / done if last is not None and last.seconds and done > 0 else None
    left = (progress.get("total_steps") or 0) - (progress.get("step") or 0)
    eta = progress.get("eta_seconds")
    return eta / left if eta and left > 0 else None


def _writes_text(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoints of a job are models that answer."""
    work, method = config.get("work"), METHODS.get(config["algorithm"])
    kind = WORKS.get(work["kind"]) if work else None
    leaves_model = not work or (kind is not None and kind.leaves_model)  # a damaged row may have any kind
    return leaves_model and not (method is not None and method.trains_reward)


def result_of(result: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """What a job that does not train has found: each value by its dotted name, in their order; empty: not known."""
    found: list[tuple[str, str]] = []
    for name, value in result.items():
        if isinstance(value, Mapping):
            found += result_of(value, f"{above}{name}.")
        else:
            text = rendering.number(value) if value is None or isinstance(value, float) else str(value)
            found.append((f"{above}{name}", text))
    return found


def marks_of(
    status: PostTrainingJobStatusResponse, attempts: Sequence[Attempt], warnings: Sequence[tuple[int, str]]
) -> list[Mark]:
    """What the charts of a job mark: its checkpoints, attempts after the first one, pauses, and warnings."""
    saved = [(int(step[1]), one.identifier) for one in status.checkpoints if (step := _STEP.search(one.identifier))]
    return [
        *(Mark("checkpoint", step, name) for step, name in saved),
        *(Mark("attempt", one.start_step, f"attempt {one.number} begins") for one in attempts if one.number > 1),
        *(Mark("pause", one.step, f"attempt {one.number}: {one.ended}") for one in attempts if one.has_saved),
        *(Mark("warning", step, shortened(message)) for step, message in warnings),
    ]


def linked(detail: str) -> list[tuple[str, str]]:
    """A detail in parts, each with the address of the job that it names; empty: it names none."""
    parts, end = list[tuple[str, str]](), 0
    for found in _NAMED.finditer(detail):
        parts.append((detail[end : found.start()], ""))
        parts += [(one, path_of(one) if place % 2 == 0 else "") for place, one in enumerate(_BETWEEN.split(found[0]))]
        end = found.end()
    return [part for part in [*parts, (detail[end:], "")] if part[0]]


def path_of(job_uuid: str) -> str:
    """The address of a job's page."""
    return f"/jobs/{quote(job_uuid, safe='')}"


def pull_command(job_uuid: str, identifier: str, url: str) -> str:
    """The command that downloads a checkpoint into a new directory of its name.

    Args:
        url: of the service.
    """
    directory = re.sub(r"[^\w.-]+", "-", identifier).lstrip("-.") or "checkpoint"
    checkpoint = ("--checkpoint", identifier)
    return shlex.join(("trl-remote", "jobs", "pull", "--url", url, *checkpoint, "--", job_uuid, directory))


def epochs_of(status: PostTrainingJobStatusResponse) -> dict[str, float | None]:
    """Identifier of each checkpoint -> passes over the rows that it had done, 1.0 after the first, as samples have it;
    None: not known. Those without a step in their name are of the last one."""
    found = status.resources_allocated
    progress, passes = found.get("progress") or {}, found["effective_config"].get("n_epochs")
    known: dict[str, float | None] = {}
    for one in status.checkpoints:
        step, total = _STEP.search(one.identifier), progress.get("total_steps")
        if step is None:
            known[one.identifier] = progress.get("epoch")
        else:
            known[one.identifier] = int(step[1]) * passes / total if passes and total else None
    return known


def logs_of(status: PostTrainingJobStatusResponse) -> list[str]:
    """The logs that an attempt of the job has: one per rank, and the launcher's where there are several."""
    ranks = int(status.resources_allocated["effective_config"].get("ranks") or 1)
    return [*map(str, range(ranks)), *([LAUNCHER] if ranks > 1 else [])]


def attempts_of(found: Sequence[Mapping[str, Any]], state: JobState) -> list[Attempt]:
    """The attempts of a status, each with its part of the ribbon: as wide as the steps it did, and never invisible."""
    steps = [max(0, one["step"] - one["start_step"]) for one in found]
    least = max(1.0, sum(steps) / 50)
    widths = [max(least, count) for count in steps]
    scale = RIBBON / (sum(widths) or 1)
    attempts, left = [], 0.0
    for number, (one, width) in enumerate(zip(found, widths, strict=True)):
        is_last = number == len(found) - 1
        ended, kind = _ended(one, state if is_last else None)
        attempts.append(
            Attempt(
                number=one["attempt"],
                device=one["device"] or "",
                begun=_time(one["started_at"]),
                seconds=_seconds(one),
                start_step=one["start_step"],
                step=one["step"],
                resumed_from=one["resumed_from"] or "",
                ended=ended,
                kind=kind,
                has_saved=ended in (_ENDS[JobState.paused], _SAVED),
                left=round(left, 1),
                width=round(width * scale, 1),
            )
        )
        left += width * scale
    return attempts


def _ended(attempt: Mapping[str, Any], state: JobState | None) -> tuple[str, str]:
    """How an attempt ended, and the kind of its part.

    Args:
        state: of the job, for its last attempt; None: another followed.
    """
    if attempt["reason"]:
        return f"{attempt['reason']}: {attempt['message'].partition(chr(10))[0]}", "failed"
    if state in ACTIVE and not attempt["ended_at"]:
        return "it is running", "running"
    return _ENDS.get(state or JobState.scheduled, _SAVED), "ended"


def settings_of(config: Mapping[str, Any]) -> list[Setting]:
    """The configuration as it was submitted, defaults included, beside what the training has reported of it."""
    recipe = config.get("recipe") or {}
    given = {name: value for name, value in config.items() if name != "recipe"}
    if samples := given.get("samples"):  # the page of samples has the texts
        given["samples"] = {**samples, "prompts": len(samples["prompts"])}
    submitted = dict(flat(given))
    submitted.pop("search.settings", None)
    # No trial need have the values of the search's own configuration.
    searched = (given.get("search") or {}).get("settings", ())
    submitted |= {name: "searched" for name in searched if name in submitted}
    reported = dict(flat({name: value for name, value in recipe.items() if name != "effective"}))
    reported |= dict(flat(recipe.get("effective") or {}))
    names = [*submitted, *(name for name in reported if name not in submitted)]
    return [Setting(name, submitted.get(name, ""), reported.get(name, "")) for name in names]


def shortened(text: str) -> str:
    """A log with its long lines cut: a browser takes seconds to lay out a line of a megabyte."""
    return "\n".join(_cut(line) for line in text.splitlines())


def _cut(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE]} ... (the line has {len(line)} characters)"


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a tree by their dotted names, as texts, without those that are None."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{prefix}{name}", _cut(text) or '""'


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _seconds(attempt: Mapping[str, Any]) -> float | None:
    begun, ended = _time(attempt["started_at"]), _time(attempt["ended_at"])
    return None if begun is None or ended is None else (ended - begun).total_seconds()
