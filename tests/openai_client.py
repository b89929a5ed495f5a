"""A script for OpenAI's fine-tuning API with its Python SDK: only `base_url` is another. `openai_clients.py` runs it.

    OPENAI_BASE_URL=http://127.0.0.1:8322/openai/v1 OPENAI_API_KEY=none python openai_client.py MODEL

Uploads chats, preferences and prompts with references, trains by each of the three methods, follows the events of each
job to the end, downloads its result file, lists its checkpoints, chats with its model, and deletes it.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAI

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Cuba": "Havana"}
QUESTION = "What is the capital of {}?"

client = OpenAI()  # base_url is OPENAI_BASE_URL


def asked(land: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION.format(land)}]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ROWS: dict[str, list[dict[str, Any]]] = {
    "supervised": [{"messages": [*asked(land), said(f"Ahoy! It is {city}.")]} for land, city in CITIES.items()],
    "dpo": [
        {
            "input": {"messages": asked(land)},
            "preferred_output": [said(f"Ahoy! It is {city}.")],
            "non_preferred_output": [said("I do not know.")],
        }
        for land, city in CITIES.items()
    ],
    "reinforcement": [{"messages": asked(land), "reference_answer": city} for land, city in CITIES.items()][:4],
}
METHODS: dict[str, Any] = {
    "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 3}},
    "dpo": {"hyperparameters": {"n_epochs": 1, "batch_size": 3, "beta": 0.1}},
    "reinforcement": {
        "grader": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.reference_answer}}",
            "evaluation_metric": "fuzzy_match",
        },
        "hyperparameters": {"n_epochs": 1, "batch_size": 2},
    },
}


def uploaded(method: str) -> str:
    """The id of a file with the rows of a method."""
    content = "".join(json.dumps(row) + "\n" for row in ROWS[method])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{method}.jsonl")
        path.write_text(content)
        with path.open("rb") as rows:
            file = client.files.create(file=rows, purpose="fine-tune")
    client.files.wait_for_processing(file.id)
    assert client.files.content(file.id).text == content
    return file.id


def followed(job_id: str) -> list[Any]:
    """The events of a job, printed as they come, once it has ended."""
    seen: dict[str, Any] = {}
    while True:
        has_ended = client.fine_tuning.jobs.retrieve(job_id).status in ("succeeded", "failed", "cancelled")
        new = []
        for event in client.fine_tuning.jobs.list_events(job_id, limit=10):  # the newest first
            if event.id in seen:
                break
            new.append(event)
        for event in reversed(new):
            seen[event.id] = event
            print(f"  {event.message}", flush=True)
        if has_ended:
            return [*seen.values()]
        time.sleep(1)


def trained(model: str, method: str) -> str:
    """Train by a method, and use and delete what it has made. Returns a summary."""
    began = time.monotonic()
    print(f"== {method}", flush=True)
    file = uploaded(method)
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=file,
        method={"type": method, method: METHODS[method]},  # type: ignore[arg-type]
        suffix=method,
        seed=7,
    )
    assert job.status in ("validating_files", "queued"), job.status
    events = followed(job.id)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    assert events[-1].message == "The job has successfully completed", events[-1].message
    metrics = [event.data for event in events if event.type == "metrics"]
    assert metrics, "no event has metrics"

    (result,) = job.result_files
    rows = list(csv.DictReader(io.StringIO(client.files.content(result).text)))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert (
        len(losses)
        == len(ROWS[method])
        * METHODS[method]["hyperparameters"]["n_epochs"]
        // (METHODS[method]["hyperparameters"]["batch_size"])
    ), rows
    if method == "supervised":
        half = len(losses) // 2
        assert sum(losses[half:]) < sum(losses[:half]), losses  # the second epoch
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert checkpoints
    assert checkpoints[0].step_number == len(losses), checkpoints

    tuned = job.fine_tuned_model
    assert tuned
    assert tuned.startswith(f"ft:{model}:")
    assert client.models.retrieve(tuned).id == tuned
    messages: Any = asked("France")
    whole = client.chat.completions.create(model=tuned, messages=messages, max_tokens=16, temperature=0)
    parts = client.chat.completions.create(model=tuned, messages=messages, max_tokens=16, temperature=0, stream=True)
    answer = whole.choices[0].message.content
    assert answer == "".join(part.choices[0].delta.content or "" for part in parts)
    print(f"  {QUESTION.format('France')} {answer!r}", flush=True)

    assert client.models.delete(tuned).deleted
    try:
        client.models.retrieve(tuned)
    except NotFoundError:
        pass
    else:
        raise AssertionError(f"{tuned} is still there")
    assert client.files.delete(file).deleted
    counted = {"steps": losses, "events": events, "checkpoints": checkpoints}
    numbers = ", ".join(f"{name} {len(found)}" for name, found in counted.items())
    return f"{method}: {numbers}, {time.monotonic() - began:.0f} s"


def main() -> None:
    (model,) = sys.argv[1:]
    print("; ".join([trained(model, method) for method in ROWS]))


if __name__ == "__main__":
    main()
