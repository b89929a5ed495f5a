"""GRPO's rewards: how they are requested, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.jobs.decisions.placement import Node, place
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.isolation import spec_paths
from llama_stack_provider_trl.launch.torchrun import visible_gpus
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.answer_rows import refuse_unchecked_rows
from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, JobSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec, VllmSpec
from llama_stack_provider_trl.specs.rewards import RewardSource, checks_of
from llama_stack_provider_trl.specs.rows import check_rows
from llama_stack_provider_trl.system.process import VLLM_GPUS

EXACT = {"check": {"type": "exact", "column": "answer"}}
REGEX = {"check": {"type": "regex", "pattern": "a"}}


def spec_of(
    config: dict[str, Any],
    *,
    sharding: bool = False,
    data: Any = None,
    vllm_python: Path | None = Path("/vllm/python"),
    devices: tuple[str, ...] = ("cpu",),
    dtype: str | None = None,
    **options: Any,
) -> JobSpec:
    data = {"dataset_id": "prompts", "batch_size": 2, **(data or {})}
    body = PreferenceOptimizeRequest(
        job_uuid="job-1",
        model="org/base",
        training_config={"n_epochs": 1, "data_config": data, "dtype": dtype},
        algorithm_config={"type": "grpo", **config},
    )
    many = {"sharding": ShardingSpec(), "max_ranks": max(2, len(devices)), "max_nodes": 2} if sharding else {}
    settings = Settings(data_dir=Path("/data"), devices=devices, vllm_python=vllm_python, **many)
    rows = DatasetRef(dataset_id="prompts", path=Path("/rows"), sha256="0" * 64, num_rows=4)
    spec = resolve(body, ProviderOptions.parse(options), settings).spec(rows, None)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    return spec


def _sources(spec: JobSpec) -> tuple[RewardSource, ...]:
    assert isinstance(spec.method, GrpoSpec)
    return spec.method.rewards


def test_a_method_gets_its_parameters_and_names_its_rewards_apart() -> None:
    named = {"check": {**REGEX["check"], "name": "b"}, "weight": -0.5}
    spec = spec_of({"rewards": [EXACT, REGEX, named], "num_generations": 4, "beta": 0.1})
    assert isinstance(spec.method, GrpoSpec)
    assert [(one.name, one.weight) for one in spec.method.rewards] == [("exact", 1), ("regex", 1), ("b", -0.5)]
    assert (spec.method.num_generations, spec.method.loss_type, spec.method.kl_weight) == (4, "dapo", 0.1)
    assert (spec.algorithm, spec.sequences_per_row, spec.has_pairs) == ("grpo", 4, False)


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({}, {}, "rewards", "send at least one"),
        ({"rewards": [{}]}, {}, "rewards.0", "a check, a function, or a model"),
        ({"rewards": [{**EXACT, "function": "f"}]}, {}, "rewards.0", "a check, a function, or a model"),
        ({"rewards": [{**EXACT, "model": "job:r"}]}, {}, "rewards.0", "a check, a function, or a model"),
        ({"rewards": [{"check": {"type": "exakt"}}]}, {}, "rewards.0.check.type", "should be 'exact'"),
        ({"rewards": [EXACT, {"check": {"type": "regex"}}]}, {}, "rewards.1.check.pattern", "needs pattern"),
        ({"rewards": [{"check": {"type": "json", "pattern": "a"}}]}, {}, "rewards.0.check.pattern", "leave it out"),
        ({"rewards": [{"check": {"type": "regex", "pattern": "("}}]}, {}, "rewards.0.check.pattern", "not a regular"),
        ({"rewards": [REGEX, {**REGEX, "weight": 2}]}, {}, "rewards.1", "another reward has this name"),
        ({"rewards": [{**EXACT, "weight": 0}]}, {}, "rewards.0.weight", "teaches nothing"),
        ({"rewards": [{**EXACT, "weight": 1e7}]}, {}, "rewards.0.weight", "less than or equal to 1000000"),
        ({"rewards": [{**EXACT, "weight": float("nan")}]}, {}, "rewards.0.weight", "Input should be"),
        ({"rewards": [{**EXACT, "weight": float("-inf")}]}, {}, "rewards.0.weight", "greater than or equal to"),
        ({"rewards": [{**EXACT, "code": "x"}]}, {}, "rewards.0.code", "no such field: leave it out"),
        ({"rewards": [{**EXACT, "weights": 2}]}, {}, "rewards.0.weights", "did you mean `weight`?"),
        ({"rewards": [{"check": {"type": "judge", "model": "m"}}]}, {}, "rewards.0.check.type", "a second model"),
        ({"rewards": [{"model": "org/r"}]}, {}, "rewards.0.model", "send job:NAME, or job:NAME/CHECKPOINT"),
        ({"rewards": [{"model": "job:r/"}]}, {}, "rewards.0.model", "send job:NAME, or job:NAME/CHECKPOINT"),
        ({"rewards": [{"model": "job:../r"}]}, {}, "rewards.0.model", "send job:NAME, or job:NAME/CHECKPOINT"),
        ({"rewards": [{"model": "job:r"}, {"model": "job:r/final"}]}, {}, "rewards.1", "another reward has this name"),
        ({"rewards": [{"function": "absent"}]}, {}, "rewards.0.function", "no installed package adds one"),
        ({"rewards": [EXACT], "loss_type": "dr_grpo"}, {}, "loss_type", "expected one of grpo, dapo"),
        ({"rewards": [EXACT], "scale_rewards": "std"}, {}, "scale_rewards", "expected one of group, batch, none"),
        ({"rewards": [EXACT], "epsilon": 0.2}, {}, "epsilon", "GRPO has no such field"),
        ({"rewards": [EXACT], "max_completion_length": 64}, {"max_seq_length": 64}, "max_completion_length", "prompt"),
        ({"rewards": [EXACT]}, {"reference_model": "org/b"}, "provider_options.reference_model", "as it begins"),
        ({"rewards": [EXACT]}, {"truncation_side": "left"}, "provider_options.truncation_side", "cuts no prompt"),
        ({"rewards": [EXACT]}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "smoothed labels"),
        ({"rewards": [EXACT]}, {"lora": {"quantize_base": True}}, "provider_options.lora.quantize_base", "4 bits"),
    ],
)
def test_what_grpo_cannot_do_is_refused_by_name(config: Any, options: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(config, **options)
    assert refused.value.field == (field if field.startswith("provider_options.") else f"algorithm_config.{field}")
    assert words in str(refused.value)


def test_ranks_of_one_node_divide_the_prompts_and_several_nodes_and_held_out_rows_are_refused_by_name() -> None:
    spec = spec_of({"rewards": [EXACT]}, sharding=True, nproc_per_node=2)
    assert (spec.ranks, spec.rows_per_step) == (2, 4)
    with pytest.raises(InvalidRequest, match=r"resources.nodes=2 .*GRPO trains on the ranks of one node: send 1"):
        spec_of({"rewards": [EXACT]}, sharding=True, resources={"nodes": 2})
    with pytest.raises(InvalidRequest, match=r"validation_dataset_id='more' .*on no held-out rows"):
        spec_of({"rewards": [EXACT]}, data={"validation_dataset_id": "more"})


def install(site: Path, package: str) -> None:
    """The metadata of a package that adds the function polite."""
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    points = f"[llama_stack_provider_trl.rewards]\npolite = {package}:polite\n"
    (metadata / "entry_points.txt").write_text(points)


def test_a_function_of_two_packages_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "judges")
    monkeypatch.syspath_prepend(tmp_path)
    again = tmp_path / "again"
    install(again, "judges")
    monkeypatch.syspath_prepend(again)  # one package on two entries of sys.path
    assert len(_sources(spec_of({"rewards": [{"function": "polite"}]}))) == 1
    install(tmp_path, "critics")
    with pytest.raises(InvalidRequest, match="several packages add a reward function 'polite'") as refused:
        spec_of({"rewards": [{"function": "polite"}]})
    assert refused.value.field == "algorithm_config.rewards.0.function"
    assert "judges 1.0" in str(refused.value)
    assert "critics 1.0" in str(refused.value)


def test_a_function_is_found_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "judges")
    monkeypatch.syspath_prepend(tmp_path)
    (source,) = _sources(spec_of({"rewards": [{"function": "polite", "weight": 2}]}))
    assert (source.name, source.function, source.weight) == ("polite", "polite", 2.0)
    assert source.package == "judges 1.0"
    assert "judges" not in sys.modules  # a service imports no code of a reward
    with pytest.raises(InvalidRequest, match="the nearest is 'polite'"):
        spec_of({"rewards": [{"function": "polit"}]})


def test_a_row_without_the_column_of_a_reward_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetRef(dataset_id="prompts", path=path, sha256="0" * 64, num_rows=2)
    with pytest.raises(InvalidRows, match="dataset 'prompts', row 1: no column 'answer'"):
        refuse_unchecked_rows(dataset, checks_of(_sources(spec_of({"rewards": [REGEX, EXACT]}))))
    report = check_rows(rows, "grpo")
    assert (report.shapes, report.warnings) == ({"prompt": 2}, [])


def test_vllm_answers_where_the_operator_has_named_an_interpreter_with_it() -> None:
    plain = spec_of({"rewards": [EXACT], "use_vllm": False}, sharding=True).method
    assert isinstance(plain, GrpoSpec)
    assert plain.vllm is None
    spec = spec_of({"rewards": [EXACT], "use_vllm": True}, sharding=True)
    assert isinstance(spec.method, GrpoSpec)
    assert spec.method.vllm == VllmSpec(python=Path("/vllm/python"))
    assert spec_of({"rewards": [EXACT]}, sharding=True).resources is not None
    assert spec.resources is None  # vLLM is on the service's machine
    fields = {"gpu_memory_utilization": 0.4, "importance_sampling_mode": "token_mask"}
    bounds = {"importance_sampling_clip_max": 2.0, "importance_sampling_clip_min": 0.5}
    config = {f"vllm_{name}": value for name, value in {**fields, **bounds}.items()}
    found = spec_of({"rewards": [EXACT], "use_vllm": True, **config}).method
    assert isinstance(found, GrpoSpec)
    assert found.vllm == VllmSpec(python=Path("/vllm/python"), **fields, **bounds)  # type: ignore[arg-type]


MODE, MOST, LEAST = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
SHARE, SYNC, TENSOR = "vllm_gpu_memory_utilization", "vllm_sync", "vllm_tensor_parallel_size"
MODE_OF, GPUS = "vllm_mode", ("cuda:0", "cuda:1", "cuda:2")
SERVER = {"use_vllm": True, MODE_OF: "server"}
LORA = {"type": "LoRA", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False, "rank": 8, "alpha": 16}


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({"use_vllm": True}, {"vllm_python": None}, "algorithm_config.use_vllm", r"has no vLLM.*\(vllm_python\)"),
        ({MODE: "token_mask"}, {}, f"algorithm_config.{MODE}", "it belongs to use_vllm"),
        ({"use_vllm": False, MOST: 2.0}, {}, f"algorithm_config.{MOST}", "it belongs to use_vllm"),
        ({"use_vllm": True, MODE: "token"}, {}, f"algorithm_config.{MODE}", "expected one of token_truncate"),
        ({"use_vllm": True, LEAST: 3.0}, {}, f"algorithm_config.{LEAST}", "less than vllm_importance.*_clip_max, 3"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False, MOST: 2.0}, {}, MOST, "has no effect"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 1.0}, {}, "vllm_gpu_memory_utilization", "less than 1"),
        ({"use_vllm": True, SHARE: 0.4}, {"device": "cpu"}, f"algorithm_config.{SHARE}", "the device is cpu"),
        ({"use_vllm": True, "temperature": 0.009}, {}, "algorithm_config.temperature", "no temperature below 0.01"),
        ({"use_vllm": True}, {"resources": {"nodes": 1}}, "provider_options.resources", "service's machine only"),
        ({"use_vllm": True, MODE_OF: "serve"}, {}, f"algorithm_config.{MODE_OF}", "nearest is 'server'"),
        ({"use_vllm": True, TENSOR: 2}, {}, f"algorithm_config.{TENSOR}", "divides the ranks of a job, .* has 1"),
        ({**SERVER, TENSOR: 3}, {}, f"algorithm_config.{TENSOR}", "CPU cores for 2 processes"),
        (SERVER, {"devices": GPUS, "device": "cuda:0"}, f"algorithm_config.{MODE_OF}", "leave the option device out"),
        (
            {**SERVER, TENSOR: 2},
            {"devices": GPUS, "nproc_per_node": 2},
            f"algorithm_config.{MODE_OF}",
            "are 4 GPUs.* 3 here",
        ),
        ({"use_vllm": True, SYNC: "adapters"}, {}, f"algorithm_config.{SYNC}", "nearest is 'adapter'"),
        ({SYNC: "weights"}, {}, f"algorithm_config.{SYNC}", "it belongs to use_vllm"),
        *(
            ({"use_vllm": True, SYNC: "adapter"}, options, f"algorithm_config.{SYNC}", f"{words}.*send 'weights'")
            for options, words in (
                ({}, "trains every weight"),
                ({"lora": {**LORA, "use_dora": True}}, "no adapters with use_dora"),
                ({"lora": {**LORA, "rank": 513}}, "of rank 512 at most"),
                ({"lora": LORA, "peft_method": "vera"}, "peft_method is 'vera'"),
            )
        ),
    ],
)
def test_what_vllm_cannot_do_for_grpo_is_refused_by_name(config: Any, options: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        spec_of({"rewards": [EXACT], **config}, sharding=True, **options)
    assert caught.value.field.endswith(field)


def test_where_the_method_is_an_option_its_field_is_named_there() -> None:
    method = {"type": "grpo", "rewards": [EXACT], "use_vllm": True}
    with pytest.raises(InvalidRequest, match="has no vLLM") as caught:
        spec_of({}, vllm_python=None, method=method)
    assert caught.value.field == "provider_options.method.use_vllm"


@pytest.mark.parametrize(
    ("config", "options", "dtype", "sync"),
    [
        ({}, {"lora": LORA}, None, "adapter"),
        ({SYNC: "weights"}, {"lora": LORA}, None, "weights"),
        ({SYNC: "adapter"}, {"lora": LORA, "nproc_per_node": 2}, None, "adapter"),
        ({"vllm_mode": "colocate", TENSOR: 1}, {"nproc_per_node": 2}, None, "weights"),
        ({}, {"lora": {**LORA, "use_dora": True}}, None, "weights"),
        ({}, {"lora": LORA, "device": "cuda:0"}, "fp32", "weights"),
        ({}, {"lora": LORA, "device": "cuda:0"}, "bf16", "adapter"),
    ],
)
def test_an_adapter_alone_is_sent_where_vllm_can_add_it(config: Any, options: Any, dtype: Any, sync: str) -> None:
    config = {"rewards": [EXACT], "use_vllm": True, **config}
    spec = spec_of(config, sharding=True, devices=("cpu", "cuda:0"), dtype=dtype, **options)
    assert spec.method.answered_by_vllm == VllmSpec(python=Path("/vllm/python"), sync=sync)  # type: ignore[arg-type]
    assert spec.ranks == options.get("nproc_per_node", 1)


@pytest.mark.parametrize(("size", "ranks"), [(2, 1), (1, 2)])
def test_a_vllm_with_gpus_of_its_own_has_those_that_no_rank_trains_on(store: Store, size: int, ranks: int) -> None:
    config = {"rewards": [EXACT], **SERVER, TENSOR: size}
    spec = spec_of(config, sharding=True, devices=GPUS, nproc_per_node=ranks)
    assert spec.method.answered_by_vllm is not None
    assert (spec.ranks, spec.method.answered_by_vllm.gpu_memory_utilization) == (ranks, 0.9)
    store.add_job(spec, "digest")
    assert place(store.queue(), [Node("", GPUS[:2], head=True)], []) == {}
    devices = place(store.queue(), [Node("", GPUS, head=True)], [])["job-1"]
    assert sorted(devices) == [*GPUS]
    visible = visible_gpus(TaskSpec("a-1", Path("/r"), devices, ranks=ranks), {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    assert visible["CUDA_VISIBLE_DEVICES"] == ",".join("456"[:ranks])
    assert visible[VLLM_GPUS] == ",".join("456"[ranks:])


def test_checkpoints_do_not_record_where_the_interpreter_of_vllm_is() -> None:
    spec = spec_of({"rewards": [EXACT], "use_vllm": True, SHARE: 0.4}).without_model_paths()
    assert isinstance(spec.method, GrpoSpec)
    assert spec.method.vllm == VllmSpec(gpu_memory_utilization=0.4)


def test_a_training_that_is_isolated_reads_the_interpreter_of_vllm() -> None:
    attempt = AttemptSpec(job=spec_of({"rewards": [EXACT], "use_vllm": True}), attempt=1, run_dir=Path("/run"))
    assert Path("/vllm/python") in spec_paths(attempt, []).read
    without = attempt.model_copy(update={"job": spec_of({"rewards": [EXACT]})})
    assert Path("/vllm/python") not in spec_paths(without, []).read
