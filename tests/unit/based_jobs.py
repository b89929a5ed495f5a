"""Jobs that begin with the checkpoints of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.specs.events import Finished
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, LoraSpec
from tests.fakes import job_spec

LORA = LoraSpec(target_modules=("q_proj", "v_proj"), rank=4, alpha=8)


ROWS = DatasetRef(dataset_id="rows", path=Path("/rows"), sha256="0" * 64, num_rows=8)


def add(store: Store, name: str, root: Path, **changes: object) -> JobSpec:
    spec = job_spec(
        name, **{"model": "org/base", "output_name": name, "checkpoint_dir": root / "checkpoints" / name, **changes}
    )
    store.add_job(spec, "digest")
    return spec


def complete(store: Store, name: str) -> None:
    store.launch(name, 1, "cpu", Path("/run") / name)
    store.apply_events(name, 1, [Finished(step=4)], 1)
    store.transition(name, 1, JobState.launching, JobState.completed)


def request(model: str, algorithm: str = "sft", name: str = "next", **changes: Any) -> Any:
    data = {"dataset_id": "rows", "batch_size": 2}
    body = {"job_uuid": name, "model": model, "training_config": {"n_epochs": 1, "data_config": data}, **changes}
    kind = SupervisedFineTuneRequest if algorithm == "sft" else PreferenceOptimizeRequest
    return kind.model_validate(body)


def model(root: Path, name: str, vocabulary: Any, **more: Any) -> str:
    """The directory of a model with the vocabulary of a tokenizer, and a file of no weights."""
    directory = root / name
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(directory)
