"""Jobs that are written into a data directory without any training: very many, very long, and hostile ones."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import (
    Answer,
    Evaluated,
    Event,
    Finished,
    Prepared,
    Progress,
    Reason,
    RolledOut,
    RolloutAnswer,
    RolloutCall,
    RolloutTurn,
    Sampled,
    Started,
    Warned,
    read_events,
)
from llama_stack_provider_trl.specs.work import ANSWERS, CheckedAnswering, EvaluateSpec
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.ownership import Ownership
from tests.fakes import job_spec

MANY, POINTS = 10_000, 200_000
SPIKE = 123_457
"""The step of the long job whose loss is 1000."""
METRICS = ("learning_rate", "grad_norm", "tokens_per_second", "num_tokens", "entropy", "mean_token_accuracy")
"""Of the long job, beside its loss and memory."""
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"


def add_many(data_dir: Path) -> None:
    """10,000 jobs that were cancelled (many-00000 ...), and two that are paused, with a low and a high priority."""
    store = Store(data_dir / DATABASE)
    first = "many-00000"
    store.add_job(job_spec(first, checkpoint_dir=data_dir / "checkpoints" / first), "digest")
    store.request_cancel(first)
    with closing(sqlite3.connect(data_dir / DATABASE)) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)") if row[1] != "age"]
        copied = [
            f"replace({name}, '{first}', printf('many-%05d', n))" if name in ("job_uuid", "spec") else name
            for name in columns
        ]
        database.execute(
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {MANY - 1})"
            f" INSERT INTO jobs ({', '.join(columns)}) SELECT {', '.join(copied)} FROM jobs, numbers"
            f" WHERE job_uuid = '{first}'"
        )
    for name, priority in (("paused-low", 0), ("paused-high", 9)):
        store.add_job(job_spec(name, priority=priority, checkpoint_dir=data_dir / "checkpoints" / name), "digest")
        store.request_pause(name)
    store.close()


def add_long(data_dir: Path) -> None:
    """`long`: 200,000 points of eight metrics."""
    _add_completed(data_dir, "long", _points(POINTS, POINTS))
    values = ", ".join(f"'{name}', step / 7.0" for name in METRICS)
    with closing(sqlite3.connect(data_dir / DATABASE)) as database, database:  # through events it takes 10 s
        database.execute(
            f"WITH RECURSIVE steps(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < {POINTS - 1})"
            " INSERT INTO points (job_uuid, step, kind, attempt, time, epoch, metrics)"
            f" SELECT 'long', step, 'train', 1, 1e9 + step, step * 1.0 / {POINTS}, json_object('loss',"
            f" iif(step = {SPIKE}, 1000.0, 5.0 - step * 1.0 / {POINTS}), 'peak_memory_bytes', step, {values})"
            " FROM steps"
        )


def add_verbose(data_dir: Path) -> None:
    """`verbose`: a log of 2 GiB whose last but one line has 50 MB. The file has holes before it."""
    run_dir = _add_completed(data_dir, "verbose", _points(1, 0))
    with open(run_dir.log, "wb") as log:
        log.write(b"the beginning\n")
        log.seek((2 << 30) - 50_000_000)
        log.write(b"\n")
        for _ in range(50):
            log.write(b"x" * 1_000_000)
        log.write(b"\nthe end\n")


def add_hostile(data_dir: Path) -> None:
    """`hostile`: a failed job whose texts are all HTML: model, warnings, metrics, log, samples, error, creator."""
    store = Store(data_dir / DATABASE)
    run_dir = data_dir / "jobs" / "hostile" / "attempts" / "1"
    run_dir.mkdir(parents=True)
    (run_dir / "rank-0.log").write_text(f"{HOSTILE}\n{'x' * 5000}\n")
    samples = {"prompts": [[{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE}]]}
    spec = job_spec(
        "hostile",
        model=HOSTILE,
        checkpoint_dir=data_dir / "checkpoints" / "hostile",
        samples={**samples, "max_new_tokens": 9},
    )
    store.add_job(spec, "digest", [HOSTILE], created_by=HOSTILE)
    store.launch("hostile", 1, "cpu", run_dir)
    answers = [Answer(text=HOSTILE, tokens=9, complete=False)] * 2  # one more than there are prompts
    metrics = {"loss": 1.0, HOSTILE: 1.0, "<b>bold</b>": 2.0, '<a href="javascript:alert(3)">link</a>': 3.0}
    events: list[Event] = [
        Sampled(kind="before", step=0, epoch=0.0, answers=answers),
        RolledOut(
            **{"step": 1, "epoch": 0.1, "row": 0},
            prompt=[RolloutTurn(role="user", content=HOSTILE, calls=[RolloutCall(name=HOSTILE, arguments=HOSTILE)])],
            answers=[
                RolloutAnswer(
                    **{"tokens": 9, "complete": True, "reward": reward, "advantage": reward},
                    text=f"<think>{HOSTILE}</think>{HOSTILE}",
                    rewards={HOSTILE: reward, "length": 0.5},
                )
                for reward in (-1.0, 1.0)
            ],
        ),
        Prepared(total_steps=9, num_rows=1, trainable_parameters=1, total_parameters=1),
        *(Progress(step=step, epoch=step / 9, metrics=metrics, peak_memory_bytes=1) for step in (1, 2, 3)),
        Warned(message=f"while it trained: {HOSTILE}"),
    ]
    store.apply_events("hostile", 1, events, 10)
    state = store.get("hostile").state
    assert store.transition("hostile", 1, state, JobState.failed, Reason.internal, HOSTILE)
    store.close()


def add_running(data_dir: Path, name: str) -> RunDir:
    """A job of two ranks that runs, as long as nothing supervises it."""
    store = Store(data_dir / DATABASE)
    run_dir = _add(store, data_dir, name, ranks=2)
    run_dir.events.write_text("\n")  # what was read of it
    store.apply_events(name, 1, list(_points(1, 1)), 1)
    store.close()
    return run_dir


def add_overfitting(data_dir: Path, name: str, algorithm: str = "sft") -> None:
    """A job that runs, whose evaluations rise while its training loss falls."""
    store = Store(data_dir / DATABASE)
    run_dir = _add(store, data_dir, name, algorithm=algorithm)
    run_dir.events.write_text("\n")  # what was read of it
    run_dir.log.write_text("it trains\n")
    begun = time.time() - 120
    rewards = {"rewards/margins": 0.2, "rewards/accuracies": 0.7} if algorithm == "dpo" else {}
    events: list[Event] = [
        Started(time=begun, pid=1, device="cpu", versions={}),
        Prepared(time=begun, total_steps=300, num_rows=1, trainable_parameters=1, total_parameters=1),
    ]
    for step in range(1, 121):
        metrics = {
            "loss": 3 - step / 60,
            "learning_rate": 1e-4,
            "grad_norm": 0.5 if step != 60 else 0.0,
            "tokens_per_second": 900.0,
            **rewards,
        }
        at = {"time": begun + step, "step": step, "epoch": step / 100}
        events.append(Progress(**at, metrics=metrics | rewards, peak_memory_bytes=3 << 30))
        if step % 30 == 0:
            events.append(Evaluated(**at, metrics={"eval_loss": 1.5 + abs(step - 60) / 100}))
    store.apply_events(name, 1, events, 1)
    store.close()


def add_step(data_dir: Path, name: str, step: int) -> None:
    """Have a job of `add_overfitting` report a further step."""
    events = RunDir(data_dir / "jobs" / name / "attempts" / "1").events
    begin = events.stat().st_size
    progress = Progress(step=step, epoch=step / 100, metrics={"loss": 0.5}, peak_memory_bytes=3 << 30)
    with open(events, "a") as file:
        file.write(f"{progress.model_dump_json()}\n")
    store = Store(data_dir / DATABASE)
    store.apply_events(name, 1, *read_events(events, begin))
    store.close()


def add_search(data_dir: Path, name: str, state: JobState) -> None:
    """A search without trials, in this state."""
    search = {"method": "grid", "parameters": {"optimizer.lr": [1e-3]}, "trials": 1, "objective": "eval_loss"}
    store = Store(data_dir / DATABASE)
    spec = job_spec(name, checkpoint_dir=data_dir / "checkpoints" / name, search={**search, "direction": "minimize"})
    store.add_job(spec, "digest")
    store.close()
    with closing(sqlite3.connect(data_dir / DATABASE)) as database, database:
        database.execute("UPDATE jobs SET state = ? WHERE job_uuid = ?", (state.value, name))


def add_answered(data_dir: Path, name: str, passes: Sequence[bool]) -> None:
    """An evaluation that has completed: an answer to each row, and whether it passes the check `exact`."""
    check = AnswerCheck(type="exact", name="exact", column="expected")
    sampling = {"max_new_tokens": 9, "temperature": 0, "top_p": 1, "seed": 0, "samples_per_prompt": 1}
    work = EvaluateSpec(answers=CheckedAnswering(checks=(check,), **sampling))
    store = Store(data_dir / DATABASE)
    _add(store, data_dir, name, work=work)
    directory = data_dir / "checkpoints" / name
    Ownership(data_dir).claim(directory, name)
    lines = [
        {
            **{"row": row, "sample": 0, "prompt": [{"role": "user", "content": f"{HOSTILE} {row}"}]},
            **{"text": f"<b>{name}</b> {row}", "tokens": 3, "complete": True, "passed": {"exact": passed}},
        }
        for row, passed in enumerate(passes)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"passed": sum(passes) / len(passes), "answers": {"count": len(passes)}, "rows": len(passes)}
    events: list[Event] = [
        Started(pid=1, device="cpu", versions={}),
        Prepared(total_steps=1, num_rows=len(passes), trainable_parameters=0, total_parameters=1),
        Finished(step=1, result=result),
    ]
    store.apply_events(name, 1, events, 1)
    assert store.transition(name, 1, JobState.in_progress, JobState.completed)
    store.close()


def complete(data_dir: Path, name: str) -> None:
    """The job of `add_running` completes."""
    store = Store(data_dir / DATABASE)
    assert store.transition(name, 1, JobState.in_progress, JobState.completed)
    store.close()


def _add_completed(data_dir: Path, name: str, events: Iterator[Event]) -> RunDir:
    store = Store(data_dir / DATABASE)
    run_dir = _add(store, data_dir, name)
    store.apply_events(name, 1, list(events), 1)
    assert store.transition(name, 1, JobState.in_progress, JobState.completed)
    store.close()
    return run_dir


def _add(store: Store, data_dir: Path, name: str, **fields: object) -> RunDir:
    run_dir = RunDir(data_dir / "jobs" / name / "attempts" / "1")
    run_dir.root.mkdir(parents=True)
    run_dir.events.touch()
    store.add_job(job_spec(name, checkpoint_dir=data_dir / "checkpoints" / name, **fields), "digest")
    store.launch(name, 1, "cpu", run_dir.root)
    return run_dir


def _points(first: int, last: int) -> Iterator[Event]:
    yield Started(pid=1, device="cpu", versions={})
    yield Prepared(total_steps=POINTS, num_rows=1, trainable_parameters=1, total_parameters=1)
    for step in range(first, last + 1):
        metrics = {"loss": 5.0 - step / POINTS, **dict.fromkeys(METRICS, step / 7)}
        yield Progress(step=step, epoch=step / POINTS, metrics=metrics, peak_memory_bytes=step, time=1e9 + step)
