"""A checkpoint, or a model, from another author: nothing of it runs, and nothing outside of it is read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, load_model
from llama_stack_provider_trl.specs.events import CheckpointSaved, Event, Failed, Reason
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.system.files import file_names, write_manifest
from tests.ranks import Ranks
from tests.tiny import tiny_model
from tests.training import SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
DATA = {".safetensors", ".json", ".md", ".jinja"}


def spec_of(root: Path, world: int = 2, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "ranks": world,
        "sharding": ShardingSpec(strategy="FULL_SHARD"),
        "batch_size": 4 // world,
        "n_epochs": 2,
        "save_steps": 2,
        "rows": SFT_ROWS[:11],
        "optimizer": OptimizerSpec(learning_rate=5e-3, warmup_steps=2),
        "lora": LoraSpec(target_modules=("q_proj",), mlp=False, rank=2, alpha=8),
        "num_threads": 1,
    }
    return job_spec(root, tiny_model(), "sft", **{**fields, **changes})


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return sealed(target)


def sealed(checkpoint: Path) -> Path:
    """With a manifest that fits, as the author of a checkpoint gives it."""
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    write_manifest(checkpoint)
    return checkpoint


class Runs:
    """Pickled, it creates a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[JobSpec, list[Event]]]:
    """The job on one rank and on two, from its beginning to its end."""
    done: dict[int, tuple[JobSpec, list[Event]]] = {}

    def train(world: int) -> tuple[JobSpec, list[Event]]:
        if world not in done:
            root = tmp_path_factory.mktemp("undisturbed")
            spec = spec_of(root, world)
            codes, events = ranks.run(root / "run", spec)
            assert set(codes) == {0}, [event.message for event in of_kind(events, Failed)]
            done[world] = spec, events
        return done[world]

    return train


Undisturbed = Callable[[int], tuple[JobSpec, list[Event]]]


@pytest.mark.parametrize("world", [1, 2])
def test_new_checkpoints_hold_data_only(undisturbed: Undisturbed, world: int) -> None:
    _, events = undisturbed(world)
    for saved in of_kind(events, CheckpointSaved):
        names = file_names(saved.path)
        assert {Path(name).suffix for name in names} <= DATA
        assert {name.partition("/")[0] for name in names if "/" in name} <= {"optimizer"}
        if saved.kind == "step":
            states = {"optimizer/state.safetensors", "optimizer/state.json", "scheduler.json", "trainer_state.json"}
            assert {*states, *(f"rng_state_{rank}.json" for rank in range(world))} <= set(names)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimizer/state.json", "{"),
        ("optimizer/state.json", '{"param_groups": [], "values": {}}'),
        ("optimizer/state.safetensors", "?" * 100),
        ("scheduler.json", "[]"),
        ("scheduler.json", "{}"),
        ("rng_state_0.json", '{"python": 1}'),
    ],
    ids=["no JSON", "other weights", "no safetensors", "no object", "nothing in it", "no random numbers"],
)
def test_a_malformed_state_is_named(undisturbed: Undisturbed, tmp_path: Path, name: str, text: str) -> None:
    spec, _ = undisturbed(1)
    checkpoint = copied(spec.checkpoint_dir / "checkpoint-2", tmp_path / "given" / "checkpoint-2")
    (checkpoint / name).write_text(text)
    sealed(checkpoint)
    status, events = run(tmp_path / "run", spec_of(tmp_path, 1), checkpoint)
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert str(checkpoint) in failed.message


def test_a_checkpoint_of_no_known_format_is_refused(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Such as one with accelerate's `optimizer_0`, which torch.distributed.checkpoint would read."""
    spec, _ = undisturbed(1)
    checkpoint = copied(spec.checkpoint_dir / "checkpoint-2", tmp_path / "given" / "checkpoint-2")
    for name in ("optimizer/state.safetensors", "optimizer/state.json"):
        (checkpoint / name).unlink()
    mark = tmp_path / "it-ran"
    (checkpoint / "optimizer_0").mkdir()
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    sealed(checkpoint)
    status, events = run(tmp_path / "run", spec_of(tmp_path, 1), checkpoint)
    assert (status, mark.exists()) == (1, False)
    assert "optimizer/state.json" in of_kind(events, Failed)[0].message


# Models


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "named"])
@pytest.mark.parametrize("where", ["../other/model.safetensors", "{}/other/model.safetensors", "a/../../other/x"])
def test_an_index_that_names_weights_outside_of_the_model_is_refused(tmp_path: Path, index: str, where: str) -> None:
    other, model = tmp_path / "other", tmp_path / "model"
    shutil.copytree(tiny_model(), other)
    shutil.copytree(tiny_model(), model)
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    if index == "named":
        index = "sub/elsewhere.safetensors.index.json"
        (model / "sub").mkdir()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "transformers_weights": index}))
    named = where.format(tmp_path)
    (model / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, named)}))
    spec = job_spec(tmp_path, model)
    with pytest.raises(JobFailure, match="which is outside the model's directory") as refused:
        load_model(spec.source, WeightStorage.of(spec), torch.device("cpu"))
    assert named in str(refused.value)
    assert refused.value.reason == Reason.invalid_model


def test_a_model_in_several_files_is_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model()).save_pretrained(model, max_shard_size="200KB")
    assert (model / "model.safetensors.index.json").exists()
    spec = job_spec(tmp_path, model)
    load_model(spec.source, WeightStorage.of(spec), torch.device("cpu"))
