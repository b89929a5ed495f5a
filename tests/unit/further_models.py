"""Models that a job reads beside its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec
from tests.fakes import job_spec

LORA = LoraSpec(target_modules=("q_proj",), rank=4, alpha=8)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = Store(tmp_path / "jobs.sqlite3")
    yield made
    made.close()


def add(store: Store, name: str, root: Path, **changes: object) -> JobSpec:
    fields = {"model": "org/base", "output_name": name, "checkpoint_dir": root / "checkpoints" / name, **changes}
    spec = job_spec(name, **fields)
    store.add_job(spec, "digest")
    return spec


def model(root: Path, name: str, vocabulary: Any, **more: Any) -> str:
    """The directory of a model with the vocabulary of a tokenizer, and a file of no weights."""
    directory = root / name
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(directory)
