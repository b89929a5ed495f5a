"""Distil a teacher into students that train where the service has room, and average them, or their probabilities.

    python teacher_student_example.py --teacher MODEL --student MODEL --prompts FILE --held-out FILE

The service has the jobs: this program may be interrupted and run again, and repeats nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llama_stack_provider_trl_remote import TrlClient

DATA = Path(__file__).resolve().parents[1] / "data"


def section(arguments: argparse.Namespace, prompts: str, held_out: str) -> dict[str, Any]:
    """What is to be distilled, as docs/how-to/distillation.md describes it."""
    training = {"n_epochs": arguments.epochs, "data_config": {"batch_size": 4}, "learning_rate": 1e-3}
    return {
        "teacher": arguments.teacher,
        "prompts": prompts,
        "held_out": held_out,
        "students": arguments.students,
        # A model that is a directory trains on other machines only where `resources` requests them.
        "student": {
            "model": arguments.student,
            "training_config": training,
            "provider_options": {"resources": {"nodes": 1}},
        },
        "data": arguments.data,
        "result": arguments.result,
        "generate": {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of the service; default: TRL_SERVICE_URL, or http://127.0.0.1:8322")
    parser.add_argument("--teacher", required=True, help="model id or directory")
    parser.add_argument("--student", required=True, help="model id or directory")
    parser.add_argument("--students", type=int, default=2)
    parser.add_argument("--data", choices=("full", "shards"), default="shards")
    parser.add_argument("--result", choices=("merge", "ensemble", "students"), default="merge")
    parser.add_argument("--prompts", type=Path, default=DATA / "sft_train.jsonl")
    parser.add_argument("--held-out", type=Path, default=DATA / "sft_validation.jsonl")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token each time")
    arguments = parser.parse_args()

    client = TrlClient(arguments.url)
    prompts, held_out = (client.upload(file).dataset_id for file in (arguments.prompts, arguments.held_out))
    jobs = client.teacher_student(section(arguments, prompts, held_out))
    ended = {}
    for name, job_uuid in jobs.items():
        ended[name] = client.wait(job_uuid)
        print(f"{name:20} {job_uuid:40} {ended[name]['status']}", flush=True)
    if any(status["status"] != "completed" for status in ended.values()):
        raise SystemExit("not all jobs have completed: `trl-remote jobs show JOB` has the reason")
    print(f"\n{'held-out rows':20} {'loss':>10} {'perplexity':>12}")
    for name, status in ended.items():
        if name.startswith("score-"):
            found = status["resources_allocated"]["result"]
            print(f"{name.removeprefix('score-'):20} {found['loss']:10.4f} {found['perplexity'] or float('inf'):12.3f}")


if __name__ == "__main__":
    main()
