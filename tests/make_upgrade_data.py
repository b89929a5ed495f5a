"""Makes tests/data/service-before-regrouping: the data directory of a service, as an earlier commit leaves it.

    python -m tests.make_upgrade_data a7b999e      # the last commit with schema 4 and with checkpoints of pickles
    python -m tests.make_upgrade_data 6715426      # the last commit before the packages were regrouped

The commit's own service, in a temporary git worktree, trains three jobs:

- `sft-whole`, all weights, to its end;
- `dpo-whole`, LoRA with a merged model, to its end;
- `sft-cut`, the request of `sft-whole`; SIGKILL to the service and to the training at step CUT, as in a power cut.

Beside `data`, `answers.json` holds what that service answered about them, and `requests.json` what they were made from.
Every path in the data begins with `ORIGINAL`; tests/process/test_upgrade.py gives a copy a directory of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from tests.contract.stack import DPO, SFT, Json, poll
from tests.tiny import REPOSITORY, save_llama, tiny_tokenizer
from tests.trees import TreeService, worktree

DATA = REPOSITORY / "tests" / "data" / "service-before-regrouping"
MODEL = DATA / "model"
PREFIX = "/tmp/trl-upgrade-"
ORIGINAL = Path(f"{PREFIX}original")
"""As long as what `tempfile.mkdtemp` makes of PREFIX: byte offsets (cursors of events, SQLite's records) stay valid."""
SETTINGS = {"node_name": "head", "min_free_disk_mb": 1}
STEPS, SAVE_STEPS, CUT = 9, 3, 5
ROWS = [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}."} for n in range(12)]
PAIRS = [{"prompt": f"{n} plus {n}?", "chosen": f"{2 * n}.", "rejected": "No."} for n in range(12)]
HELD_OUT = [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}."} for n in range(20, 23)]
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": False,
    "apply_lora_to_output": False,
    "rank": 2,
    "alpha": 4,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.make_upgrade_data", description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit whose service makes the data; also the name of its directory")
    commit = parser.parse_args().commit
    os.environ["HF_HUB_OFFLINE"] = "1"
    ORIGINAL.mkdir()  # fails where another run is under way
    try:
        if not MODEL.exists():
            _save_model(MODEL)
        shutil.copytree(MODEL, ORIGINAL / "model")
        # An interpreter with a neutral path: command lines in run directories name it.
        (ORIGINAL / "venv").symlink_to(sys.prefix)
        (ORIGINAL / "home").mkdir()
        os.environ["HOME"] = str(ORIGINAL / "home")
        with worktree(commit, ORIGINAL / "tree") as tree:
            answers = _make(TreeService(ORIGINAL, tree, **SETTINGS))
        _keep(DATA / commit, answers)
    finally:
        shutil.rmtree(ORIGINAL)


def requests() -> dict[str, tuple[str, Json]]:
    """Job -> path and body of its request."""
    sft = _body("sft-whole", "rows")
    sft["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
    dpo = _body("dpo-whole", "pairs")
    dpo["provider_options"] |= {"lora": LORA, "merge_adapter": True}
    dpo["algorithm_config"] = {"type": "dpo", "beta": 0.2}
    return {"sft-whole": (SFT, sft), "dpo-whole": (DPO, dpo), "sft-cut": (SFT, {**sft, "job_uuid": "sft-cut"})}


def _body(job_uuid: str, dataset_id: str) -> Json:
    return {
        "job_uuid": job_uuid,
        "model": str(ORIGINAL / "model"),
        "checkpoint_dir": "results",
        "training_config": {
            "n_epochs": 3,
            "data_config": {"dataset_id": dataset_id, "batch_size": 4, "shuffle": True, "data_format": "instruct"},
            "optimizer_config": {"optimizer_type": "adamw", "lr": 5e-3, "weight_decay": 0.01, "num_warmup_steps": 2},
        },
        "hyperparam_search_config": {},
        "logger_config": {},
        "provider_options": {"save_steps": SAVE_STEPS, "keep_last": 1, "max_seq_length": 64},
    }


def _make(service: TreeService) -> Json:
    """Train the jobs, and end in the middle of the last one. Returns what the service answered."""
    service.python = str(ORIGINAL / "venv" / "bin" / "python")
    try:
        service.start()
        service.register("rows", ROWS)
        service.register("held-out", HELD_OUT)
        service.register("pairs", PAIRS, dataset_type="preference")
        *whole, cut = requests().items()
        for job, (path, body) in whole:
            service.submit(path, body)
            status = service.finished(job, timeout=120)
            assert status["status"] == "completed", status
        job, (path, body) = cut
        service.arm(f"step-{CUT}", "hold")
        service.submit(path, body)
        service.wait_taken(f"step-{CUT}")
        saved = f"{ORIGINAL}/data/results/{job}/checkpoint-{SAVE_STEPS}"
        poll(lambda: saved in {found["path"] for found in service.status(job)["checkpoints"]}, f"{saved} is listed", 30)
        answers = {path: _answer(service, path) for path in _paths()}
    finally:
        service.kill()
        service.kill_tasks()
        service.session.close()
    return answers


def _answer(service: TreeService, path: str) -> Json:
    answer = service.get(path)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _paths() -> list[str]:
    """The requests to both services."""
    jobs = "/post-training/jobs"
    # Of the other checkpoints some files name paths: the copy has other digests than the release has answered.
    files = f"{jobs}/sft-whole/checkpoints/checkpoint-{STEPS - SAVE_STEPS}"
    whole = [f"{jobs}/{job}-whole/{what}" for job in ("sft", "dpo") for what in ("status", "metrics", "events")]
    return ["/datasets", *whole, files, f"{jobs}/sft-cut/events"]


def _keep(target: Path, answers: Json) -> None:
    """Put the data directory where the tests find it, without 64 KiB that a training holds for a full disk.

    Fails where it names this machine.
    """
    with closing(sqlite3.connect(ORIGINAL / "data" / "jobs.sqlite3")) as database:
        # In a write-ahead log the paths could not be adapted: it has checksums.
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ORIGINAL / "data", target / "data", ignore=shutil.ignore_patterns("*.sqlite3-*", "ballast"))
    (target / "answers.json").write_text(json.dumps(answers) + "\n")
    (target / "requests.json").write_text(json.dumps(requests(), indent=1) + "\n")
    home = pwd.getpwuid(os.getuid()).pw_dir
    for task in target.rglob("task.json"):  # isolation covers the home of the account, whatever HOME is
        task.write_text(task.read_text().replace(f'"{home}/', f'"{ORIGINAL}/home/'))
    local = [str(REPOSITORY), str(Path(sys.prefix).parent), f"{home}/"]
    for path in [path for path in target.rglob("*") if path.is_file()]:
        named = [name for name in local if name.encode() in path.read_bytes()]
        assert not named, f"{path} names this machine: {named}"


def _save_model(path: Path) -> None:
    """One layer of width 8 and a vocabulary of bytes: 12 KiB."""
    save_llama(
        path,
        tiny_tokenizer(vocabulary=259),
        vocab_size=259,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


if __name__ == "__main__":
    main()
