"""Periodic averaging: where workers meet, what they exchange, and what a request may combine with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.averaging import AveragingSpec, passes_multiple, ring_bytes
from llama_stack_provider_trl.specs.checkpoint_files import is_data_name
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, ShardingSpec
from llama_stack_provider_trl.specs.parallel import Exchange, verdict_after


def test_workers_meet_after_every_interval_and_at_the_end() -> None:
    spec = AveragingSpec(interval=4)
    assert [step for step in range(1, 11) if spec.meets(step, 10)] == [4, 8, 10]


def test_a_checkpoint_that_was_due_between_two_averages_is_due_at_the_second() -> None:
    assert [step for step in range(1, 13) if passes_multiple(step, 1, 5)] == [5, 10]
    assert [step for step in (4, 8, 12) if passes_multiple(step, 4, 5)] == [8, 12]
    assert [step for step in (4, 8, 12) if passes_multiple(step, 4, 8)] == [8]


def test_nodes_exchange_the_weights_once_in_an_interval() -> None:
    assert ring_bytes(400, 4) == 600
    every = Exchange(nodes=4, trainable=10**6, total=10**6)
    averaged = Exchange(nodes=4, trainable=10**6, total=10**6, interval=20)
    assert averaged.bytes_per_node == every.bytes_per_node / 20
    hybrid = Exchange(nodes=2, trainable=10**6, total=10**6, ranks_per_node=4, strategy="HYBRID_SHARD", interval=20)
    assert hybrid.bytes_per_node == 4 * 10**6 / 20, "each part is averaged over the nodes"
    found = verdict_after(averaged, 1.0, 10)
    assert found.helps, "the measured steps exchange nothing"
    assert found.step_seconds == pytest.approx(1.0 + averaged.seconds(10))
    assert found.reason.startswith("parallel helps: 4 nodes train ")


@pytest.mark.parametrize("name", ["optimizer/worker-3.safetensors", "optimizer/outer.safetensors"])
def test_a_checkpoint_may_hold_the_states_of_workers(name: str) -> None:
    assert is_data_name(name)
    assert not is_data_name(name.replace(".safetensors", ".pt"))


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path / "data",
        devices=("cpu",),
        max_ranks=8,
        max_nodes=4,
        sharding=ShardingSpec(strategy="NO_SHARD"),
    )


def sft(**training: Any) -> SupervisedFineTuneRequest:
    config = {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}, **training}
    return SupervisedFineTuneRequest.model_validate({"job_uuid": "job", "model": "org/base", "training_config": config})


def spec_of(request: Any, settings: Settings, **options: Any) -> JobSpec:
    ref = DatasetRef(dataset_id="rows", path=Path("/rows.jsonl"), sha256="0" * 64, num_rows=10)
    given = {"nproc_per_node": 2, "averaging": {"interval": 20}, **options}
    return resolve(request, ProviderOptions.parse(given), settings).spec(ref, ref)


def test_a_job_logs_and_saves_where_its_workers_meet(settings: Settings) -> None:
    spec = spec_of(sft(), settings)
    assert spec.train.averaging == AveragingSpec(
        interval=20, outer_learning_rate=0.7, outer_momentum=0.9, nesterov=True
    )
    assert (spec.train.logging_steps, spec.train.save_steps) == (20, None)
    assert spec_of(sft(), settings, logging_steps=1).train.logging_steps == 1
    assert spec_of(sft(), settings, save_steps=40).train.save_steps == 40
    configured = settings.model_copy(update={"save_steps": 50})
    assert spec_of(sft(), configured).train.save_steps == 60, "a default moves to the next average"
    plain = spec_of(sft(), settings, averaging={"interval": 1, "outer_learning_rate": 1.0, "outer_momentum": 0})
    assert plain.train.averaging
    assert not plain.train.averaging.nesterov
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


HYBRID = ShardingSpec(strategy="HYBRID_SHARD")


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"nproc_per_node": 1}, {}, r"averaging=.* one rank has no other to average with: set nproc_per_node"),
        (
            {},
            {"sharding": ShardingSpec()},
            r"averaging=.* FULL_SHARD, under which all ranks train one copy .* NO_SHARD",
        ),
        ({}, {"sharding": HYBRID}, r"averaging=.* on one node, which is one worker: use NO_SHARD"),
        (
            {"nproc_per_node": 1, "resources": {"nodes": 2}},
            {"sharding": HYBRID},
            r"averaging=.* with one rank on each node, which shards nothing: use NO_SHARD",
        ),
        ({"nproc_per_node": 1}, {"sharding": None}, r"averaging=.* this provider trains in one process"),
        ({"save_steps": 30}, {}, r"save_steps=30.* same weights after every 20 steps only .* send 40"),
        (
            {"averaging": {"interval": 0}},
            {},
            r"averaging\.interval=0.*greater than 0$",
        ),
        (
            {"averaging": {"interval": 2, "rate": 1}},
            {},
            r"averaging\.rate=1.*there is no such option; the options are: int",
        ),
        (
            {"averaging": {"interval": 2, "outer_momentum": 0, "nesterov": True}},
            {},
            r"averaging\.nesterov=True.*outer_momentum is 0: set a momentum, or leave nesterov out",
        ),
        ({"averaging": {}}, {}, r"averaging\.interval"),
    ],
)
def test_what_averaging_excludes_is_refused_by_name(
    settings: Settings, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        spec_of(sft(), settings.model_copy(update=changes), **options)


def test_an_evaluation_between_two_averages_is_refused(settings: Settings) -> None:
    data = {"dataset_id": "rows", "batch_size": 2, "validation_dataset_id": "held-out"}
    with pytest.raises(InvalidRequest, match=r"eval_steps=30.* send 40"):
        spec_of(sft(data_config=data), settings, eval_steps=30)


def test_a_loss_scale_or_a_loss_over_all_ranks_is_refused(settings: Settings) -> None:
    on_gpus = settings.model_copy(update={"devices": ("cuda:0", "cuda:1")})
    with pytest.raises(InvalidRequest, match=r"dtype='fp16'.* a loss scale of its own"):
        spec_of(sft(dtype="fp16"), on_gpus)
    body = sft().model_dump(exclude_unset=True) | {"algorithm_config": {"type": "dpo", "loss_type": "kto_pair"}}
    body["finetuned_model"] = "out"
    with pytest.raises(InvalidRequest, match=r"loss_type='kto_pair'.* means over the pairs of all ranks"):
        spec_of(PreferenceOptimizeRequest.model_validate(body), settings)
    body["algorithm_config"] = {"type": "orpo"}
    with pytest.raises(InvalidRequest, match=r"averaging=.* ORPO has means over all ranks"):
        spec_of(PreferenceOptimizeRequest.model_validate(body), settings)


def test_hybrid_workers_are_nodes(settings: Settings) -> None:
    hybrid = settings.model_copy(update={"sharding": HYBRID})
    spec = spec_of(sft(), hybrid, resources={"nodes": 2})
    assert (spec.ranks, spec.nodes, spec.train.averaging is not None) == (4, 2, True)
