"""Train several models at once: each job gets devices, or cores, of its own, and the others wait for their turn.

python multi_model_training.py --model MODEL --model OTHER [--cores 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_stack_provider_trl_remote import TrlClient

DATA = Path(__file__).resolve().parents[1] / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of the service; default: TRL_SERVICE_URL, or http://127.0.0.1:8322")
    parser.add_argument("--model", action="append", required=True, help="model id or directory; once for each")
    parser.add_argument("--cores", type=int, help="cores of a CPU that each trains on, side by side; default: devices")
    parser.add_argument("--rows", type=Path, default=DATA / "sft_train.jsonl")
    parser.add_argument("--held-out", type=Path, default=DATA / "sft_validation.jsonl")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()

    client = TrlClient(arguments.url)
    rows, held_out = (client.upload(file).dataset_id for file in (arguments.rows, arguments.held_out))
    resources = {"nodes": 1, **({"reserve_cpus": arguments.cores} if arguments.cores else {})}
    jobs = {}
    for number, model in enumerate(arguments.model, 1):
        data = {"dataset_id": rows, "validation_dataset_id": held_out, "batch_size": 4}
        jobs[f"model-{number}"] = {
            "model": model,
            "algorithm_config": {"type": "LoRA"},
            "training_config": {"n_epochs": arguments.epochs, "learning_rate": 1e-3, "data_config": data},
            "provider_options": {"resources": resources},
        }
    names = client.run({"jobs": jobs})
    print(f"{'model':40} {'status':>10} {'held-out loss':>14}  device")
    failed = False
    for (name, job_uuid), model in zip(names.items(), arguments.model, strict=True):
        status = client.wait(job_uuid)
        failed |= status["status"] != "completed"
        points = [point for point in client.metrics(job_uuid) if "eval_loss" in point["metrics"]]
        loss = f"{points[-1]['metrics']['eval_loss']:.4f}" if points else "-"
        device = status["resources_allocated"]["device"]
        print(f"{Path(model).name or name:40} {status['status']:>10} {loss:>14}  {device}", flush=True)
    if failed:
        raise SystemExit("not all jobs have completed: `trl-remote jobs show JOB` has the reason")


if __name__ == "__main__":
    main()
