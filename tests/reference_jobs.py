"""Twelve reference jobs (SFT and DPO; full, LoRA, QLoRA; 1 process and 2 FSDP2 ranks) with the sha256 of their weights.

    python -m tests.reference_jobs
    python -m tests.reference_jobs --against COMMIT [--only sft-lora-2]

With --against the same jobs also train on the code of that commit, in a temporary git worktree. The exit status is 1
where a job ends with other weights, another number of steps or another final loss, or where it fails.

A refactoring of the recipes must leave all twelve equal. The jobs train a tiny model on the CPU with a fixed seed, and
both trees run on the same interpreter: every bit of the weights is comparable.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.service import running
from tests.contract.stack import DPO, SFT, Json
from tests.tiny import REPOSITORY, tiny_model
from tests.trees import TreeService, worktree

SECONDS_PER_JOB = 240.0
"""A job of two ranks takes 20 s on 2 quiet cores; most of it are imports."""
EPOCHS, GLOBAL_BATCH = 2, 4
SFT_ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}."} for n in range(11)]
DPO_ROWS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": f"I would rather not add {n}."}
    for n in range(11)
]
"""Eleven rows: the last batch of an epoch is not full."""
ADAPTERS = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}


class Job(NamedTuple):
    algorithm: str
    method: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.method}-{self.ranks}"

    @property
    def path(self) -> str:
        return SFT if self.algorithm == "sft" else DPO

    def body(self) -> Json:
        """The request."""
        lora = {"full": None, "lora": ADAPTERS, "qlora": {**ADAPTERS, "quantize_base": True}}[self.method]
        options: Json = {"seed": 42, "nproc_per_node": self.ranks, "retries": 0}
        body: Json = {
            "job_uuid": self.name,
            "model": str(tiny_model(tied=False)),
            "training_config": {
                "n_epochs": EPOCHS,
                "dtype": "fp32",
                "data_config": {
                    "dataset_id": self.algorithm,
                    "batch_size": GLOBAL_BATCH // self.ranks,
                    "shuffle": True,
                    "data_format": "instruct",
                },
                "optimizer_config": {
                    "optimizer_type": "adamw",
                    "lr": 5e-3,
                    "weight_decay": 0.01,
                    "num_warmup_steps": 1,
                },
            },
            "hyperparam_search_config": {},
            "logger_config": {},
            "provider_options": options,
        }
        if self.algorithm == "dpo":
            body["algorithm_config"] = {"type": "dpo", "beta": 0.1}
            return {**body, "provider_options": {**options, "lora": lora}} if lora else body
        return {**body, "algorithm_config": lora} if lora else body


JOBS = [
    Job(algorithm, method, ranks)
    for algorithm in ("sft", "dpo")
    for method in ("full", "lora", "qlora")
    for ranks in (1, 2)
]


class Outcome(NamedTuple):
    """What a job ends with."""

    weights: str
    """sha256 of the names and bytes of all safetensors files of `final`; empty where there is none."""
    steps: int = 0
    loss: float = 0.0
    layout: str = ""
    """How the ranks held the model, as the training reported it."""
    problem: str = ""
    """Why the request was refused, or the job failed."""

    def __str__(self) -> str:
        return self.problem or f"{self.weights}  {self.steps:2} steps  loss {self.loss!r}  {self.layout}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    jobs = [job for job in JOBS if options.only in (None, job.name)]
    os.environ["HF_HUB_OFFLINE"] = "1"
    here = train(REPOSITORY, jobs)
    failed = [name for name, outcome in here.items() if outcome.problem.startswith("failed")]
    if options.against is None:
        return 1 if failed else 0
    with worktree(options.against) as tree:
        there = train(tree, jobs)
    differing = [name for name in here if here[name] != there[name]]
    for name in differing:
        print(f"DIFFERENT {name}\n  this tree  {here[name]}\n  {options.against:9}  {there[name]}")
    if differing or failed:
        print(f"{len(differing)} of {len(here)} jobs differ from {options.against}; {len(failed)} failed")
        return 1
    refused = sum(1 for outcome in here.values() if outcome.problem)
    print(f"equal: {len(here)} jobs end with the same weights as on {options.against} ({refused} refused by both)")
    return 0


def train(tree: Path, jobs: Sequence[Job]) -> dict[str, Outcome]:
    """Name -> outcome of each job, trained one after the other on the code of a tree."""
    print(f"{tree}", flush=True)
    outcomes = {}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-reference-")))
        service = stack.enter_context(running(TreeService(root, tree)))
        service.register("sft", SFT_ROWS)
        service.register("dpo", DPO_ROWS, dataset_type="preference")
        for job in jobs:
            outcomes[job.name] = outcome = _trained(service, job)
            print(f"  {job.name:12} {outcome}", flush=True)
    return outcomes


def _trained(service: TreeService, job: Job) -> Outcome:
    answer = service.post(job.path, job.body())
    if answer.status_code == 400:
        return Outcome("", problem=f"refused: {answer.json()['detail']}")
    if answer.status_code != 200:
        return Outcome("", problem=f"failed: HTTP {answer.status_code} {answer.text}")
    status = service.finished(job.name, SECONDS_PER_JOB)
    if status["status"] != "completed":
        return Outcome("", problem=f"failed: {status['resources_allocated'].get('message')}")
    (final,) = (Path(found["path"]) for found in status["checkpoints"] if Path(found["path"]).name == "final")
    points: list[Any] = service.get(f"/post-training/jobs/{job.name}/metrics").json()["data"]
    last = [point for point in points if point["kind"] == "train"][-1]
    layout = _layout(status)
    if job.ranks > 1 and not layout.startswith("FULL_SHARD"):
        return Outcome("", problem=f"failed: {layout}, expected FULL_SHARD over {job.ranks} ranks")
    return Outcome(_digest(final), last["step"], last["metrics"]["loss"], layout)


def _layout(status: Json) -> str:
    sharding = status["resources_allocated"]["effective_config"]["recipe"]["effective"].get("sharding")
    return f"{sharding['strategy']} over {sharding['ranks']} ranks" if sharding else "1 process"


def _digest(final: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(final.glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"{final} has no safetensors file: the export is incomplete")
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.reference_jobs", description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="train on this commit too, and compare")
    parser.add_argument("--only", metavar="NAME", choices=[job.name for job in JOBS], help="one job, e.g. sft-lora-2")
    return parser


if __name__ == "__main__":
    sys.exit(main())
