"""A checkpoint, or a model, from another author: nothing of it runs, and nothing outside of it is read.

`tests/data/checkpoint-before-safetensors` was written by two FSDP2 ranks with the code of commit a7b999e, the last one
whose checkpoints were pickles; of it the tokenizer was left out.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, load_model
from llama_stack_provider_trl.specs.events import CheckpointSaved, Event, Failed, Prepared, Progress, Reason
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.system.files import file_names, write_manifest
from tests.ranks import Ranks, forked_ranks
from tests.tiny import REPOSITORY, tiny_model
from tests.training import SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
BEFORE = REPOSITORY / "tests" / "data" / "checkpoint-before-safetensors"
DATA = {".safetensors", ".json", ".md", ".jinja"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with forked_ranks() as ranks:
        yield ranks


def spec_of(root: Path, world: int = 2, **changes: Any) -> JobSpec:
    """The job whose checkpoint after two of six steps `BEFORE` is."""
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


def losses(events: list[Event]) -> list[float]:
    return [point.metrics["loss"] for point in of_kind(events, Progress)]


def exported(spec: JobSpec) -> dict[str, torch.Tensor]:
    (file,) = (spec.checkpoint_dir / "final").glob("*model.safetensors")
    found: dict[str, torch.Tensor] = load_file(file)
    return found


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return sealed(target)


def sealed(checkpoint: Path) -> Path:
    """With a manifest that fits, as the author of a checkpoint gives it."""
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    write_manifest(checkpoint)
    return checkpoint


def for_one_rank(root: Path) -> Path:
    """`BEFORE` as one process would have written it: the number of ranks decides about its random numbers."""
    checkpoint = copied(BEFORE, root / "given" / "checkpoint-2")
    (checkpoint / "rng_state_0.pth").rename(checkpoint / "rng_state.pth")
    (checkpoint / "rng_state_1.pth").unlink()
    state = json.loads((checkpoint / "recipe_state.json").read_text())
    (checkpoint / "recipe_state.json").write_text(json.dumps({**state, "world_size": 1}))
    return sealed(checkpoint)


class Runs:
    """Pickled, it creates a file when it is read."""

    def __init__(self, mark: Path, how: str) -> None:
        self.mark, self.how = mark, how

    def __reduce__(self) -> tuple[Any, ...]:
        if self.how == "os.system":
            return os.system, (f"touch {self.mark}",)
        if self.how == "eval":
            return eval, (f"open({str(self.mark)!r}, 'w')",)
        return Path.touch, (self.mark,)


def in_metadata(checkpoint: Path, value: Any) -> None:
    (checkpoint / "optimizer" / ".metadata").write_bytes(pickle.dumps(value))


def in_groups(checkpoint: Path, value: Any) -> None:
    """In the place of the parameter groups, which torch.distributed.checkpoint reads with weights_only=False."""
    path = checkpoint / "optimizer" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == "param_groups"]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(buffer.getvalue())
    (checkpoint / "optimizer" / "__9_0.distcp").write_bytes(buffer.getvalue())
    path.write_bytes(pickle.dumps(metadata))


def in_file(name: str) -> Callable[[Path, Any], None]:
    def write(checkpoint: Path, value: Any) -> None:
        torch.save(value, checkpoint / name)

    return write


@pytest.mark.parametrize(
    ("put", "how"),
    [
        pytest.param(in_metadata, "os.system", id="metadata-system"),
        pytest.param(in_metadata, "eval", id="metadata-eval"),
        pytest.param(in_metadata, "method", id="metadata-method"),
        pytest.param(in_groups, "os.system", id="groups"),
        pytest.param(in_file("scheduler.pt"), "os.system", id="scheduler"),
        pytest.param(in_file("rng_state.pth"), "eval", id="random"),
    ],
)
def test_a_pickle_in_a_checkpoint_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, put: Callable[[Path, Any], None], how: str
) -> None:
    mark = tmp_path / "it-ran"
    checkpoint = for_one_rank(tmp_path)
    put(checkpoint, Runs(mark, how))
    sealed(checkpoint)
    status, events = run(tmp_path / "run", spec_of(tmp_path, world=1), checkpoint)
    assert not mark.exists()
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "which no checkpoint needs and which could run code" in failed.message
    assert str(checkpoint) in failed.message
    assert not of_kind(events, Progress)


def test_a_name_inside_a_known_module_is_no_way_around(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.checkpoint import legacy as legacy_checkpoints

    checkpoint, mark = copied(BEFORE, tmp_path / "checkpoint-2"), tmp_path / "it-ran"
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch", "load"),
        ("pathlib", "Path"),
    ):
        called = pickle.PROTO + b"\x04" + _text(module) + _text(name) + pickle.STACK_GLOBAL
        called += _text(f"touch {mark}") + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
        (checkpoint / "optimizer" / ".metadata").write_bytes(called)
        with pytest.raises(JobFailure, match=f"names {module}.{name}, which no checkpoint needs"):
            legacy_checkpoints.read_optimizer(checkpoint)
    assert not mark.exists()


def _text(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def test_metadata_cannot_name_files_outside_of_its_directory(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.checkpoint import legacy as legacy_checkpoints

    checkpoint = copied(BEFORE, tmp_path / "checkpoint-2")
    path = checkpoint / "optimizer" / ".metadata"
    for wrong in ("../../secret.distcp", "/etc/passwd", "__0_0.distcp/../x", ""):
        metadata = pickle.loads((BEFORE / "optimizer" / ".metadata").read_bytes())
        next(iter(metadata.storage_data.values())).relative_path = wrong
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(JobFailure, match=r"rows of it in a \.distcp file are expected"):
            legacy_checkpoints.read_optimizer(checkpoint)


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(b"x" * 100)])
def test_metadata_that_is_damaged_is_named(tmp_path: Path, data: bytes) -> None:
    from llama_stack_provider_trl.recipes.checkpoint import legacy as legacy_checkpoints

    checkpoint = copied(BEFORE, tmp_path / "checkpoint-2")
    (checkpoint / "optimizer" / ".metadata").write_bytes(data)
    with pytest.raises(JobFailure, match=r"optimizer/\.metadata .*another checkpoint"):
        legacy_checkpoints.read_optimizer(checkpoint)


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


def test_a_checkpoint_of_the_release_before_is_resumed_where_it_ended(
    ranks: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    _, events = undisturbed(2)
    for world in (1, 2, 3):
        root = tmp_path / str(world)
        given, there = copied(BEFORE, root / "given" / "checkpoint-2"), spec_of(root)
        codes, resumed = ranks.run(root / "run", there, given, world_size=world)
        assert set(codes) == {0}, [event.message for event in of_kind(resumed, Failed)]
        assert of_kind(resumed, Prepared)[0].start_step == 2
        # It was trained on another machine, whose arithmetic may differ in the last digits.
        assert losses(resumed) == pytest.approx(losses(events)[2:], rel=1e-4)
        assert {Path(name).suffix for name in file_names(there.checkpoint_dir / "checkpoint-4")} <= DATA


def test_the_optimizer_of_the_release_before_is_read_as_its_own_reader_did() -> None:
    from llama_stack_provider_trl.recipes.checkpoint import legacy as legacy_checkpoints

    metadata = pickle.loads((BEFORE / "optimizer" / ".metadata").read_bytes()).state_dict_metadata
    expected: dict[str, Any] = {
        name: torch.empty(found.size) if name != "param_groups" else None for name, found in metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(expected, checkpoint_id=BEFORE / "optimizer", planner=planner, no_dist=True)
    saved = legacy_checkpoints.read_optimizer(BEFORE)
    assert saved.groups == expected.pop("param_groups")
    assert saved.groups[0]["betas"] == (0.9, 0.999)
    found = {name: torch.full(outline.shape, torch.nan) for name, outline in saved.tensors.items()}
    saved.read_into(found)
    assert len(found) == 12  # four weights, three values each
    assert found.keys() == {name.removeprefix("state.") for name in expected}
    assert all(torch.equal(found[name.removeprefix("state.")], value) for name, value in expected.items())


def as_before(checkpoint: Path, target: Path) -> Path:
    """A checkpoint of one process in the earlier format, written as that release did."""
    shutil.copytree(checkpoint, target)
    document = json.loads((target / "optimizer/state.json").read_text())
    state: dict[str, Any] = {
        f"state.{name}": value for name, value in load_file(target / "optimizer/state.safetensors").items()
    }
    groups = [{**group, "betas": tuple(group["betas"])} for group in document["param_groups"]]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = dcp.FileSystemWriter(target / "optimizer")
    dcp.save({**state, "param_groups": groups}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save(json.loads((target / "scheduler.json").read_text()), target / "scheduler.pt")
    numbers = json.loads((target / "rng_state_0.json").read_text())
    version, values, gauss = numbers["python"]
    name, keys, *others = numbers["numpy"]
    cpu = torch.frombuffer(bytearray(base64.b64decode(numbers["torch"]["cpu"])), dtype=torch.uint8)
    states = {"python": (version, tuple(values), gauss), "numpy": (name, numpy.array(keys, dtype="uint32"), *others)}
    torch.save({**states, "cpu": cpu}, target / "rng_state.pth")
    for name in ("optimizer/state.safetensors", "optimizer/state.json", "scheduler.json", "rng_state_0.json"):
        (target / name).unlink()
    return sealed(target)


def test_both_formats_resume_to_the_same_weights_bit_for_bit(
    ranks: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    spec, events = undisturbed(1)
    expected = exported(spec)
    given = as_before(spec.checkpoint_dir / "checkpoint-2", tmp_path / "given" / "checkpoint-2")
    for number, checkpoint in enumerate((given, spec.checkpoint_dir / "checkpoint-2")):
        there = spec_of(tmp_path / str(number), 1)
        codes, resumed = ranks.run(tmp_path / str(number) / "run", there, checkpoint)
        assert codes == [0], [event.message for event in of_kind(resumed, Failed)]
        assert losses(resumed) == losses(events)[2:]
        found = exported(there)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        one, other = (path.checkpoint_dir / "checkpoint-4" / "rng_state_0.json" for path in (spec, there))
        assert one.read_bytes() == other.read_bytes()


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
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Runs(mark, "os.system")))
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
