"""Run one attempt in this process, as the training process would, and read back what it reported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.recipes import train
from llama_stack_provider_trl.specs.events import Event, Failed, Finished, Progress, Sampled, iter_events
from llama_stack_provider_trl.specs.job import (
    AttemptSpec,
    DatasetRef,
    JobSpec,
    LoraSpec,
    OptimizerSpec,
    SampleMessage,
    SamplesSpec,
)
from llama_stack_provider_trl.specs.model_source import ModelSource, ReferenceSpec
from llama_stack_provider_trl.system.files import RunDir, put_rows
from tests.fakes import method_of
from tests.traces import shared_traces

LORA = LoraSpec(target_modules=("q_proj", "v_proj"), mlp=True, rank=4, alpha=8)
SFT_ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}."} for n in range(12)]
DPO_ROWS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": f"I would rather not add {n}."}
    for n in range(12)
]

SAMPLES = SamplesSpec(
    prompts=tuple((SampleMessage(role="user", content=f"What is {n} plus {n}?"),) for n in (3, 5, 100)),
    max_new_tokens=6,
)


def dataset(root: Path, rows: Iterable[dict[str, Any]]) -> DatasetRef:
    blob = put_rows(root / "datasets", rows)
    return DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)


def reference_to(model: Path | str, **more: Any) -> ReferenceSpec:
    """A reference, or a teacher, that is another model than the base model."""
    return ReferenceSpec(source=ModelSource(model=str(model)), **more)


def job_spec(root: Path, model: Path | str, algorithm: str = "sft", **changes: Any) -> JobSpec:
    """A small fp32 job on the CPU; `rows`, `validation_rows` and any field of JobSpec may be given."""
    rows = changes.pop("rows", SFT_ROWS if algorithm == "sft" else DPO_ROWS)
    validation_rows = changes.pop("validation_rows", None)
    fields: dict[str, Any] = {
        "job_uuid": "job",
        "method": changes.pop("method", None) or method_of(algorithm),
        "model": str(model),
        "output_name": "job",
        "checkpoint_dir": root / "checkpoints",
        "dataset": dataset(root, rows),
        "validation": dataset(root, validation_rows) if validation_rows else None,
        "n_epochs": 1,
        "batch_size": 4,
        "dtype": "fp32",
        "gradient_sync": "micro_step",
        "dataloader_num_workers": 0,
        "token_cache": root / "tokens",
        "device": "cpu",
        "optimizer": OptimizerSpec(learning_rate=1e-3),
    }
    return JobSpec.of(**{**fields, **changes})


def run(
    root: Path, spec: JobSpec, resume_from: Path | None = None, *, estimates: bool = False, **changes: Any
) -> tuple[int, list[Event]]:
    """Exit status and events of one attempt at `spec`; any field of AttemptSpec may be given.

    Args:
        estimates: whether it estimates its memory first, as in `Ranks.run`.
    """
    if not estimates:
        spec = spec.model_copy(update={"preflight": "off"})
    root.mkdir(parents=True, exist_ok=True)
    paths = RunDir(root)
    attempt = AttemptSpec(job=spec, attempt=1, run_dir=root, resume_from=resume_from).model_copy(update=changes)
    paths.spec.write_text(attempt.model_dump_json())
    return attempt_in_process(paths.spec), list(iter_events(paths.events))


def attempt_in_process(spec: Path) -> int:
    """Exit status of the training program, called here; the umask that it sets for itself stays out of other tests."""
    import torch

    # Tensors of tiny models are so small that a second thread only waits for the first: 0.4 instead of 2 CPU seconds.
    torch.set_num_threads(1)
    os.umask(umask := os.umask(0o077))
    try:
        with shared_traces():
            return train.main(["train", str(spec)])
    finally:
        os.umask(umask)


def sampled(events: Iterable[Event]) -> list[tuple[str, int, list[str]]]:
    """Kind, step and texts of each set of answers."""
    return [
        (event.kind, event.step, [answer.text for answer in event.answers])
        for event in events
        if isinstance(event, Sampled)
    ]


def of_kind[E](events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def losses(events: Iterable[Any]) -> list[float]:
    """Those of the steps, in order."""
    return [event.metrics["loss"] for event in of_kind(events, Progress)]


def result_of(events: list[Event]) -> dict[str, Any]:
    assert not of_kind(events, Failed), of_kind(events, Failed)
    (found,) = (event.result for event in of_kind(events, Finished))
    assert found is not None
    return found


def digests(spec: JobSpec) -> dict[str, str]:
    files = (spec.checkpoint_dir / "final").glob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
