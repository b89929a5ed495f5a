"""Train one model by several processes, on one machine or on several, each on its own part of every batch.

    python data_parallel_example.py --model MODEL --processes 2 [--nodes 2]

The service's `sharding_strategy` decides whether each process holds the whole model (NO_SHARD) or a part of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_stack_provider_trl_remote import TrlClient

DATA = Path(__file__).resolve().parents[1] / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of the service; default: TRL_SERVICE_URL, or http://127.0.0.1:8322")
    parser.add_argument("--model", required=True, help="model id or directory")
    parser.add_argument("--processes", type=int, default=2, help="per machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--rows", type=Path, default=DATA / "sft_train.jsonl")
    parser.add_argument("--batch-size", type=int, default=8, help="of an optimizer step, over all processes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--job", default="data-parallel", help="name of the job, which another request may not have")
    arguments = parser.parse_args()

    client = TrlClient(arguments.url)
    ranks = arguments.processes * arguments.nodes
    if arguments.batch_size % ranks:
        parser.error(f"--batch-size {arguments.batch_size} is no multiple of {ranks} processes")
    data = {"dataset_id": client.upload(arguments.rows).dataset_id, "batch_size": arguments.batch_size // ranks}
    job = client.submit(
        {
            "job_uuid": arguments.job,
            "model": arguments.model,
            "algorithm_config": {"type": "LoRA"},
            "training_config": {
                "n_epochs": 1,
                "max_steps_per_epoch": arguments.steps,
                "learning_rate": 1e-3,
                "data_config": data,
            },
            "provider_options": {
                "nproc_per_node": arguments.processes,
                "resources": {"nodes": arguments.nodes},
            },
        }
    )
    for event in client.events(job):
        if event.event["type"] == "progress":
            print(f"step {event.event['step']:4}  loss {event.event['metrics']['loss']:.4f}", flush=True)
    status = client.wait(job)
    if status["status"] != "completed":
        raise SystemExit(f"{job} is {status['status']}: {status['resources_allocated'].get('error')}")
    found = status["resources_allocated"]
    sharding = found["effective_config"]["recipe"]["effective"]["sharding"] or {}
    print(f"{ranks} processes on {found['device']}: {sharding.get('strategy', 'one process')}")


if __name__ == "__main__":
    main()
