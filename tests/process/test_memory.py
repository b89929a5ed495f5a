"""The memory estimate: what it counts, and that each recipe of examples/recipes fits where it claims to."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from trl.trainer.utils import add_fused_lm_head

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import micro_steps, preflight
from llama_stack_provider_trl.recipes.build import load_policy
from llama_stack_provider_trl.recipes.data.lengths import row_lengths
from llama_stack_provider_trl.recipes.data.packing import pack
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan
from llama_stack_provider_trl.recipes.fast import attention, mlp
from llama_stack_provider_trl.recipes.fast.kept_attention import checkpoint_arguments
from llama_stack_provider_trl.recipes.fast.model import use_rows
from llama_stack_provider_trl.recipes.memory import estimate as estimates
from llama_stack_provider_trl.recipes.memory import nearest as nearest_jobs
from llama_stack_provider_trl.recipes.memory import trace as memory
from llama_stack_provider_trl.recipes.memory.estimate import MemoryEstimate, _Placed, estimate
from llama_stack_provider_trl.recipes.memory.nearest import Capacity, nearest
from llama_stack_provider_trl.recipes.memory.trace import Batch, trace_model
from llama_stack_provider_trl.recipes.memory.trace_cache import trace
from llama_stack_provider_trl.recipes.micro_steps import RowsOnDevice, fix_order, keep_order, plan_steps, with_groups
from llama_stack_provider_trl.recipes.model.loading import adapter_config, quantize
from llama_stack_provider_trl.recipes.preflight import (
    before_training,
    check,
    choose_answer_weights,
    choose_gradient_sync,
)
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import EventWriter, Warned, iter_events
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, OptimizerSpec, QatSpec, ReferenceSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec, VllmSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.process.peaks import most, sharded_peak
from tests.required import in_full
from tests.tiny import CACHE, REPOSITORY, _cached, tiny_decoder, tiny_model
from tests.training import LORA, SAMPLES, dataset, job_spec, of_kind

pytestmark = pytest.mark.process

RECIPES = REPOSITORY / "examples" / "recipes"
SHAPES: dict[str, dict[str, int]] = {
    "7b-2x24g": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70b-8gpu": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        "num_key_value_heads": 8,
    },
}
"""Llama 2's (arXiv:2307.09288)."""
GIB = 2**30
NO_SHARD = ShardingSpec(strategy="NO_SHARD")
LONG_ROW = {"lora": LORA, "gradient_checkpointing": True, "max_seq_length": 32768}


def shaped(layers: int, **more: Any) -> Path:
    """A directory with a config.json, no weights and no tokenizer: the same one for all tests, as a process traces the
    same job on it once."""
    config = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, **more}
    config |= {"num_hidden_layers": layers, "max_position_embeddings": 4096}
    name = "shape-" + "-".join(str(value) for _, value in sorted(config.items()))
    return _cached(CACHE, name, LlamaConfig(**config).save_pretrained)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("sft", {"packed": True}),
        ("sft", {"padding_free": False}),
        ("dpo", {"gradient_checkpointing": True}),
        ("sft", {**LONG_ROW, "keep_attention": "always", "tile_mlp": "always"}),
        *in_full(
            ("sft", {"gradient_checkpointing": True, "checkpoint_every": 2}),
            ("sft", {"qat": QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)}),
            ("dpo", {}),
            *(("sft", changes) for changes in ({}, {"gradient_checkpointing": True})),
            ("sft", {"packed": True, "padding_free": False}),
            ("dpo", {"padding_free": False}),
        ),
    ],
)
def test_what_is_traced_is_what_a_real_step_holds(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "LONG", 128)
    monkeypatch.setattr(mlp, "TILE", 64)
    model = tiny_decoder("llama", intermediate_size=2048) if "tile_mlp" in settings else tiny_model()
    spec, batch = job_spec(tmp_path, model, algorithm, **settings), Batch(8, 64)
    assert most(trace(spec, batch, "cpu").windows) == pytest.approx(most(held(spec, batch)), rel=0.01)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("sft", {"dtype": "bf16", "gradient_checkpointing": True}),
        *in_full(("dpo", {}), ("sft", {}), ("sft", {"lora": LORA.model_copy(update={"mlp": False})})),
    ],
)
def test_experts_are_traced_as_a_real_step_holds_them(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    mixture(tmp_path / "model")
    spec, batch = job_spec(tmp_path, tmp_path / "model", algorithm, **settings), Batch(8, 64)
    assert most(trace(spec, batch, "cpu").windows) == pytest.approx(most(held(spec, batch)), rel=0.001)


def test_on_a_cpu_the_files_of_experts_are_memory_too(tmp_path: Path) -> None:
    weights = dict(mixture(tmp_path / "model").named_parameters())
    size = sum(weight.nbytes for weight in weights.values())
    experts = sum(weight.nbytes for name, weight in weights.items() if ".experts." in name)
    spec, batch = job_spec(tmp_path, tmp_path / "model", "dpo"), Batch(2, 32)
    on_cpu, on_cuda = estimate(spec, batch, "cpu"), estimate(spec, batch, "cuda")
    assert 0 < experts < size
    assert (on_cpu.weights, on_cpu.reference) == (size + experts, size + experts)
    assert (on_cuda.weights, on_cuda.reference) == (size, size)


def mixture(path: Path) -> MixtralForCausalLM:
    """A mixture of experts with its files."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    model = MixtralForCausalLM(config)
    model.save_pretrained(path)
    return model


def held(spec: JobSpec, batch: Batch) -> Sequence[memory.Window]:
    """What a real step holds, with real weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(spec.source.model)
    algorithm, config = spec.algorithm, model.config
    quantize(spec, model)
    if spec.compute.gradient_checkpointing:
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=checkpoint_arguments(spec, "cpu"),
            every_n_layers=spec.compute.checkpoint_every,
        )
        if spec.lora:
            model.enable_input_require_grads()
    if spec.compute.padding_free:
        use_rows(model, "cpu")
    mlp.tile_mlp(model, spec, "cpu")
    add_fused_lm_head(model, outputs=("log_probs", "is_top1") if algorithm == "sft" else ("log_probs",))
    if spec.lora:
        model = get_peft_model(model, adapter_config(model, spec.lora))
    model.train()
    live = memory._LiveMemory(1.0)
    for weight in model.parameters():
        live.ignore(weight)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: live.became_gradient(weight.grad))
    with memory._head_of(spec, "cpu", live, config), live:
        memory._step(model, spec, batch, "cpu")
    return live.windows


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        (8, {"lora": LORA}),
        *in_full(
            (10, {"gradient_checkpointing": True, "keep_attention": "always", "lora": LORA, "tile_mlp": "always"}),
            (17, {"gradient_checkpointing": True, "checkpoint_every": 2}),
            (8, {}),
            (10, {"gradient_checkpointing": True}),
            (10, {"gradient_checkpointing": True, "lora": LORA}),
        ),
    ],
)
def test_two_shallow_traces_predict_what_the_whole_depth_takes(
    tmp_path: Path, layers: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "LONG", 64)
    monkeypatch.setattr(mlp, "TILE", 32)
    spec = job_spec(tmp_path, shaped(layers), **settings)
    message = trace_model(spec, Batch(2, 128), "cpu")
    monkeypatch.setattr(memory, "_blocks_are_alike", lambda *_: False)
    whole = trace_model(spec, Batch(2, 128), "cpu")
    assert (message.trainable, message.frozen, message.blocks) == (whole.trainable, whole.frozen, whole.blocks)
    assert most(message.windows) == pytest.approx(most(whole.windows), rel=0.01)


def test_the_parts_are_those_of_the_method(tmp_path: Path) -> None:
    model, batch = shaped(2), Batch(4, 64)
    parameters = trace(job_spec(tmp_path, model), batch, "cpu").trainable
    adam = estimate(job_spec(tmp_path, model), batch, "cpu")
    assert (adam.weights, adam.optimizer, adam.reference) == (4 * parameters, 8 * parameters, 0)
    plain = OptimizerSpec(name="sgd", learning_rate=1e-3)
    assert estimate(job_spec(tmp_path, model, optimizer=plain), batch, "cpu").optimizer == 0
    assert estimate(job_spec(tmp_path, model, "dpo"), batch, "cpu").reference == 4 * parameters
    adapters = job_spec(tmp_path, model, "dpo", lora=LORA, dtype="bf16")
    traced, lora = trace(adapters, batch, "cpu"), estimate(adapters, batch, "cpu")
    assert lora.reference == 0
    assert lora.weights == 2 * traced.frozen + 4 * traced.trainable
    assert lora.optimizer == 8 * traced.trainable


def test_fp16_takes_what_bf16_takes_with_gradients_of_the_head_in_the_backward_pass(tmp_path: Path) -> None:
    model, batch = shaped(2), Batch(4, 64)
    for settings in ({}, {"lora": LORA}, {"ranks": 2, "sharding": ShardingSpec()}):
        fp16, bf16 = (
            estimate(job_spec(tmp_path, model, dtype=dtype, **more, **settings), batch, "cuda")
            for dtype, more in (("fp16", {}), ("bf16", {"head_gradients": "backward"}))
        )
        assert fp16 == bf16


def test_flash_attention_counts_what_it_adds_up_in_a_fixed_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = shaped(2), Batch(4, 64)
    cases = [("cuda", "bf16", True), ("cuda", "fp16", True), ("cuda", "fp32", True)]
    cases += [("cuda", "bf16", False), ("cpu", "bf16", True)]

    def activations() -> list[int]:
        return [
            estimate(job_spec(tmp_path, model, dtype=dtype, padding_free=free), batch, device).activations
            for device, dtype, free in cases
        ]

    counted = activations()
    monkeypatch.setattr(estimates, "flash_bytes", lambda *_: 0)
    sums = 4 * (64 + 128) * 4 * 32  # fp32: of a row's 64 tokens and 128 more, 4 heads of size 16, which count as 32
    # Copies for 160 multiprocessors and 4 heads.
    found = [one - other for one, other in zip(counted, activations(), strict=True)]
    assert found == [40 * sums, 40 * sums, 0, 0, 0]


def test_long_rows_add_in_a_fixed_order_where_the_device_has_the_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaped(2, hidden_size=4096, num_attention_heads=32)
    spec = job_spec(tmp_path, model, batch_size=2, max_seq_length=8192, dtype="bf16")
    heads = {"largest": 128}
    monkeypatch.setattr(micro_steps, "largest_head", lambda gpu: heads["largest"])
    rows = [
        Dataset.from_list([{"input_ids": [1] * n, "labels": [1] * n} for n in sizes])
        for sizes in ((7001, 6001), (9, 8))
    ]
    plan = BatchPlan.of_job(spec)

    def fixed(
        total: int, dataset: Dataset = rows[0], device: str = "cuda", *, may_raise: bool = True, **changes: Any
    ) -> tuple[int | None, str]:
        rows_on_device = RowsOnDevice(dataset, device, lambda: (Capacity(1), total))
        job, repeats = fix_order(
            spec.changed(**changes), plan, rows_on_device, gpu=torch.device(device), may_raise=may_raise
        )
        return job.compute.accumulator_bytes, repeats

    together, alone = 3 * 4 * (13000 + 256) * 4096, 5 * 4 * (7000 + 128) * 4096  # of 160 multiprocessors, 32 heads
    assert fixed(1 << 60) == (together, "bit for bit")  # whatever is free at the moment
    batch = Batch(2, 7001, ((0, (7000,)), (0, (6000,))), 13000)
    counted = {limit: estimate(spec.changed(accumulator_bytes=limit), batch, "cuda") for limit in (together, alone)}
    assert counted[together].activations - counted[alone].activations == together - alone
    needed = {limit: int(memory.total * nearest_jobs.MARGIN) + 1 for limit, memory in counted.items()}
    assert fixed(needed[together]) == (together, "bit for bit")
    assert fixed(needed[together] - 2) == (alone, "bit for bit")
    too_much = "up to rounding: attention would take 0.54 GiB to add in a fixed order, "
    assert fixed(needed[alone] - 2) == (None, too_much + "which its device does not have")
    assert fixed(1 << 60, preflight="off") == (None, too_much + "and the memory of the job is not estimated")
    assert fixed(1 << 60, may_raise=False) == (None, too_much + "and an attempt before ran out of memory")
    compiled = fixed(needed[together] - 2, compile_blocks="always")  # whose one call computes all rows
    assert compiled == (None, too_much.replace("0.54", "0.61") + "which its device does not have")
    assert fixed(1, rows[1]) == fixed(1, device="cpu") == (None, "bit for bit")
    for changes in ({"dtype": "fp32"}, {"padding_free": False}):
        assert fixed(1 << 60, **changes)[1].startswith("up to rounding: ")
    no_kernel = "up to rounding: no kernel for its layers is known to add in a fixed order: "
    for largest, why in ((0, "has no flash attention"), (64, "takes heads up to 64")):
        heads["largest"] = largest
        job, repeats = fixed(1 << 60)
        assert (job, repeats.startswith(no_kernel), repeats.endswith(why)) == (None, True, True)
    for limit in (together, None):
        load_policy(job_spec(tmp_path, tiny_model()).changed(accumulator_bytes=limit), torch.device("cpu"))
        assert attention._limit == [limit or attention.LARGEST_ACCUMULATORS]


def test_what_a_fixed_order_takes_is_given_up_where_other_processes_hold_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaped(2, hidden_size=4096, num_attention_heads=32)
    spec = job_spec(tmp_path, model, batch_size=1, max_seq_length=8192, dtype="bf16")
    rows = Dataset.from_list([{"input_ids": [1] * 7001, "labels": [1] * 7001}])
    plan, writer = BatchPlan.of_job(spec), EventWriter(tmp_path / "events")
    raised, repeats = fix_order(spec, plan, RowsOnDevice(rows, "cuda", lambda: (Capacity(1), 1 << 60)))

    def checked(job: JobSpec, free: int) -> dict[str, Any]:
        monkeypatch.setattr(preflight, "memory_of", lambda *_: (Capacity(free), 1 << 60))
        found = before_training(job, plan, rows, torch.device("cuda"), writer)
        assert found is not None
        return found

    needed = [int(checked(job, 1 << 60)["estimate_bytes"] * nearest_jobs.MARGIN) + 1 for job in (spec, raised)]
    assert needed[0] < needed[1]
    assert keep_order(raised, repeats, checked(raised, needed[1])) == (raised, "bit for bit")
    assert list(iter_events(tmp_path / "events")) == []
    why = "up to rounding: attention would take 0.54 GiB to add in a fixed order, and other processes hold memory of "
    assert keep_order(raised, repeats, checked(raised, needed[1] - 2)) == (spec, why + "its device")
    (warned,) = of_kind(list(iter_events(tmp_path / "events")), Warned)
    assert "attention would take 0.54 GiB" in warned.message
    refused = []
    for job in (spec, raised):
        with pytest.raises(JobFailure, match="does not fit") as found:
            checked(job, needed[0] - 2)
        refused.append(str(found.value))
    assert refused[0] == refused[1]


def test_batches_of_packed_rows_have_other_rows_than_the_one_with_the_most_tokens(tmp_path: Path) -> None:
    def call(tokens: int, rows: int) -> int:  # of 160 multiprocessors and 32 heads
        return max(1, -(-5 // rows)) * 4 * (tokens + 128 * rows) * 32 * 128

    assert attention.fixed_order_bytes([90, 90, 90], 32, 128) == (call(180, 2), call(90, 1))
    packed = attention.fixed_order_bytes([90, 90, 90], 32, 128, (200, 100))
    assert packed == (call(273, 100), call(200, 1))
    model = shaped(2, hidden_size=4096, num_attention_heads=32)
    spec = job_spec(tmp_path, model, batch_size=1, max_seq_length=8192, dtype="bf16", packed=True)
    rows = pack(Dataset.from_list([{"input_ids": [1] * n, "labels": [1] * n} for n in (4096, 4096, 7000)]), 8192)
    limits = [
        fix_order(spec, BatchPlan.of_job(spec), RowsOnDevice(rows, "cuda", lambda total=total: (Capacity(1), total)))
        for total in (1 << 60, 1)
    ]
    together = 5 * 4 * (8192 + 128) * 32 * 128  # as if those of the sequence with the most tokens were one row
    assert [job.compute.accumulator_bytes for job, _ in limits] == [together, None]
    assert limits[1][1].startswith("up to rounding: attention would take 0.54 GiB")  # of the row of 7000
    batch = with_groups(Batch(1, 8192), spec, rows, None)
    assert estimates.flash_bytes(limits[0][0], batch, "cuda") == together


def test_step_checkpoints_are_copied_to_cpu_memory_which_is_the_device_on_a_cpu(tmp_path: Path) -> None:
    model, batch = shaped(2), Batch(4, 64)
    parameters = trace(job_spec(tmp_path, model), batch, "cpu").trainable
    cpu, cuda = (estimate(job_spec(tmp_path, model), batch, device) for device in ("cpu", "cuda"))
    assert (cpu.checkpoint_copy, cpu.host) == (12 * parameters, 0)
    assert (cuda.checkpoint_copy, cuda.host) == (0, 12 * parameters)
    assert sum(cuda.parts.values()) == cuda.total
    shared = estimate(job_spec(tmp_path, model, ranks=4, sharding=ShardingSpec()), batch, "cpu")
    assert shared.checkpoint_copy == 3 * parameters


def test_offloaded_activations_wait_in_cpu_memory(tmp_path: Path) -> None:
    model, batch = shaped(6), Batch(4, 64)
    here, away = (
        estimate(job_spec(tmp_path, model, activation_offloading=offloading), batch, "cuda")
        for offloading in (False, True)
    )
    assert away.activations < here.activations / 2
    assert away.host - here.host > here.activations / 2


def test_blocks_that_are_not_recomputed_keep_their_activations(tmp_path: Path) -> None:
    model, batch = shaped(6), Batch(4, 64)
    some, all_of_them = (
        estimate(job_spec(tmp_path, model, gradient_checkpointing=True, checkpoint_every=every), batch, "cpu")
        for every in (2, 1)
    )
    none = estimate(job_spec(tmp_path, model), batch, "cpu")
    assert all_of_them.activations < some.activations < none.activations


def test_the_reference_is_loaded_when_it_is_used(tmp_path: Path) -> None:
    model, batch = shaped(2), Batch(2, 16)
    larger = shaped(8, hidden_size=256, intermediate_size=512)
    size = sum(4 * weight.numel() for weight in LlamaForCausalLM(LlamaConfig.from_pretrained(larger)).parameters())

    def of(
        device: str = "cuda", ranks: int = 1, lora: Any = None, model_of: Path | None = None, **reference: Any
    ) -> memory.MemoryEstimate:
        source = None if model_of is None else ModelSource(model=str(model_of))
        requested = DpoSpec(reference=ReferenceSpec(source=source, **reference))
        sharding = ShardingSpec() if ranks > 1 else None
        return estimate(
            job_spec(tmp_path, model, "dpo", lora=lora, method=requested, ranks=ranks, sharding=sharding), batch, device
        )

    # Another model is loaded under LoRA, too; used before training, it is there without what training takes.
    assert of(lora=LORA).reference == 0
    assert of(lora=LORA, model_of=larger).reference == size
    before = of(model_of=larger, precompute=True)
    assert (before.reference, before.optimizer, before.gradients) == (size, 0, 0)
    assert of(precompute=True).reference == 0
    assert of(precompute=True).optimizer > 0
    # Ranks shard it, and gather its head and three of its eight blocks at a time.
    assert size // 8 < of(model_of=larger, ranks=8).reference < size * 5 // 8
    # The policy is not sharded yet: its weights are in the files.
    assert of("cpu", ranks=8, model_of=larger, precompute=True).weights == 0


def test_accumulated_gradients_are_there_from_the_second_micro_step_on(tmp_path: Path) -> None:
    model, batch = shaped(2), Batch(4, 64)
    once = estimate(job_spec(tmp_path, model), batch, "cpu")
    again = estimate(job_spec(tmp_path, model, gradient_accumulation_steps=2), batch, "cpu")
    assert again.gradients == once.weights
    assert again.total > once.total


def test_ranks_shard_what_the_strategy_names(tmp_path: Path) -> None:
    model, batch = shaped(8), Batch(1, 16)

    def of(strategy: str, steps: int = 1, **more: Any) -> memory.MemoryEstimate:
        sharding = ShardingSpec(strategy=strategy, **more)  # type: ignore[arg-type]
        spec = job_spec(tmp_path, model, ranks=4, sharding=sharding, gradient_accumulation_steps=steps)
        return estimate(spec, batch, "cuda")

    alone = estimate(job_spec(tmp_path, model), batch, "cuda")
    assert of("NO_SHARD").optimizer == alone.optimizer
    assert of("NO_SHARD").gradients >= alone.weights  # DDP's buckets
    assert of("FULL_SHARD").optimizer == alone.optimizer // 4
    assert of("FULL_SHARD").weights < of("SHARD_GRAD_OP").weights
    assert of("FULL_SHARD", cpu_offload=True).optimizer == 0
    assert of("FULL_SHARD", steps=2).gradients == alone.weights // 4


def test_whole_gradients_on_sharded_ranks_are_counted_and_chosen_where_they_fit(tmp_path: Path) -> None:
    model, batch = shaped(8, hidden_size=512, intermediate_size=2048), Batch(1, 16)
    spec = job_spec(tmp_path, model, ranks=4, sharding=ShardingSpec(), gradient_accumulation_steps=2, batch_size=1)
    weights = 4 * trace(spec, batch, "cuda").trainable

    def of(gradient_sync: str, **changes: Any) -> JobSpec:
        return spec.changed(gradient_sync=gradient_sync, **changes)

    parts, whole = (estimate(of(sync), batch, "cuda") for sync in ("micro_step", "step"))
    assert estimate(of("auto"), batch, "cuda") == parts
    assert (parts.gradients, whole.gradients) == (weights // 4, weights)
    assert whole.total > parts.total
    offloaded = estimate(of("step", sharding=ShardingSpec(cpu_offload=True)), batch, "cuda")
    assert offloaded.gradients == weights
    assert estimate(of("step", gradient_accumulation_steps=1), batch, "cuda").gradients < weights
    enough, less = int(whole.total * 1.11), int(whole.total * 1.09)
    for sync, limit, fits, chosen in (
        ("auto", enough, True, "step"),
        ("auto", less, True, "micro_step"),
        ("micro_step", enough, True, "micro_step"),
        ("step", less, False, "step"),
    ):
        found = check(of(sync), batch, "cuda", Capacity(limit))
        assert (found["fits"], found["gradient_sync"]) == (fits, chosen)
        assert found["gradients_bytes"] == (weights if chosen == "step" else weights // 4)
        assert choose_gradient_sync(of(sync), found).train.gradient_sync == chosen
    assert found["nearest"]["changes"] == {"provider_options.gradient_sync": "micro_step"}
    assert choose_gradient_sync(of("auto"), None).train.gradient_sync == "micro_step"
    assert "gradient_sync" not in check(of("auto", gradient_accumulation_steps=1), batch, "cuda", Capacity(enough))


def test_a_prompt_of_grpo_is_trained_once_and_read_for_each_answer(tmp_path: Path) -> None:
    rewards = (RewardSource(name="a", check=AnswerCheck(type="regex", pattern="a")),)
    method = GrpoSpec(rewards=rewards, num_generations=16, max_completion_length=16)
    spec = job_spec(tmp_path, shaped(2), "grpo", method=method, batch_size=2, dtype="fp32", gradient_checkpointing=True)
    rows = Dataset.from_list([{"prompt_ids": [1] * size, "row": [size]} for size in (900, 10, 500)])
    batch = with_groups(plan_steps(spec, row_lengths(rows)).batch, spec, rows, None)
    assert batch == Batch(32, 916, ((900, (15,) * 16), (500, (15,) * 16)), 512)
    of_answers = (2 * 2 * 64 + 4 * 64 + 3 * 128) * 32 * 916 * 4  # two layers, 64 wide, with networks of 128
    found = estimate(spec, batch, "cuda")
    assert (found.activations, found.logits) == (of_answers, 32 * 1024 * 8)
    padded = estimate(spec.changed(padding_free=False), batch, "cuda")
    assert padded.total > found.total


@pytest.mark.parametrize(
    ("ranks", "strategy", "tied", "changes", "most_beyond"),
    [
        (8, "FULL_SHARD", False, {}, 1.4),
        *in_full(
            (64, "FULL_SHARD", False, {"lora": LORA}, 1.15),
            (8, "FULL_SHARD", False, {"gradient_checkpointing": True}, 1.4),
            (8, "FULL_SHARD", True, {}, 1.4),
            (64, "FULL_SHARD", False, {}, 1.4),
            (8, "SHARD_GRAD_OP", False, {}, 1.4),
            (8, "SHARD_GRAD_OP", False, {"lora": LORA}, 1.15),
            # What is gathered at most in the forward pass is added to the activations of the backward pass.
            (8, "FULL_SHARD", False, LONG_ROW, 1.35),
            (8, "FULL_SHARD", False, {**LONG_ROW, "keep_attention": "always"}, 1.3),
        ),
    ],
)
def test_what_sharded_ranks_gather_is_counted_as_torchs_own_tracker_counts_it(
    tmp_path: Path, ranks: int, strategy: str, tied: bool, changes: dict[str, Any], most_beyond: float
) -> None:
    """Blocks of 8B, with its vocabulary."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = shaped(4, **shape, vocab_size=128256, tie_word_embeddings=tied)
    spec = job_spec(tmp_path, model, ranks=ranks, sharding=ShardingSpec(strategy=strategy), dtype="bf16", **changes)
    batch = Batch(1, changes.get("max_seq_length", 1024))
    found, tracked = estimate(spec, batch, "cuda"), sharded_peak(spec, batch)
    # The tracker sees no optimizer, and no sums of flash attention, which computes on a CPU there.
    counted = found.total - found.overhead - found.optimizer - estimates.flash_bytes(spec, batch, "cuda")
    assert tracked <= counted <= most_beyond * tracked


def test_blocks_stay_gathered_for_answers_where_the_whole_model_fits(tmp_path: Path) -> None:
    model, batch = shaped(8, hidden_size=512, intermediate_size=2048), Batch(1, 16)
    spec = job_spec(tmp_path, model, ranks=4, sharding=ShardingSpec(), samples=SAMPLES)
    whole = estimate(spec.changed(sharding=ShardingSpec(strategy="SHARD_GRAD_OP")), batch, "cuda")
    needed = (whole.total - whole.gradients) * nearest_jobs.MARGIN
    for limit, expected in ((needed + 10, "kept"), (needed - 10, "per_token")):
        verdict = check(spec, batch, "cuda", Capacity(int(limit)))
        assert verdict["answer_weights"] == expected
        assert choose_answer_weights(spec, verdict) is (expected == "kept")
    assert not choose_answer_weights(spec, None)
    rewards = (RewardSource(name="a", check=AnswerCheck(type="regex", pattern="a")),)
    of_vllm = {"method": GrpoSpec(rewards=rewards, vllm=VllmSpec(python=tmp_path)), "samples": None}
    sharding: Any
    for sharding in (NO_SHARD, ShardingSpec(strategy="SHARD_GRAD_OP")):
        assert "answer_weights" not in check(spec.changed(sharding=sharding), batch, "cuda", Capacity(int(needed)))
    for change in ({"samples": None}, of_vllm):
        assert "answer_weights" not in check(spec.changed(**change), batch, "cuda", Capacity(int(needed)))


def recipe(name: str, root: Path, **changes: Any) -> tuple[JobSpec, int, int]:
    """The job of a recipe on as many GPUs as it is for, their memory, and their number."""
    text = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    settings = ServiceSettings(**text["service"], data_dir=root)
    gpus = tuple(f"cuda:{index}" for index in range(text["service"]["torch_run_config"]["nproc_per_node"]))
    body = {**text["job"], "model": str(shaped(**{"vocab_size": 32000, **depth(SHAPES[name])}))}
    options = ProviderOptions.parse(body.pop("provider_options"))
    for_jobs = settings.for_jobs(gpus)
    spec = resolve(SupervisedFineTuneRequest.model_validate({**body, **changes}), options, for_jobs).spec(
        dataset(root, [{"prompt": "a", "completion": "b"}]), None
    )
    assert settings.device_memory_gb is not None
    return spec, int(settings.device_memory_gb * GIB), for_jobs.max_ranks


def test_a_proposal_for_a_job_whose_batches_were_divided_sets_their_size(tmp_path: Path) -> None:
    requested = job_spec(tmp_path, tiny_model(), batch_size=4, gradient_accumulation_steps=2)
    divided, batch = requested.with_batches_of(1), Batch(1, 2000)
    recomputed = divided.changed(gradient_checkpointing=True)
    limit = int(estimate(recomputed, batch, "cpu").total * nearest_jobs.MARGIN) + 1
    sizes = {"training_config.data_config.batch_size": 1, "training_config.gradient_accumulation_steps": 8}
    for given, expected in ((requested, sizes), (divided, {}), (None, {})):
        found = check(divided, batch, "cpu", Capacity(limit), given)
        assert not found["fits"]
        others = {"training_config.efficiency_config.enable_activation_checkpointing": True}
        assert found["nearest"]["changes"] == expected | others
        assert ("batch_size=1" in found["message"]) == bool(expected)


def depth(shape: dict[str, int]) -> dict[str, int]:
    return {"layers": shape["num_hidden_layers"], **{k: v for k, v in shape.items() if k != "num_hidden_layers"}}


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_fits_the_gpus_that_it_names(name: str, tmp_path: Path) -> None:
    spec, limit, max_ranks = recipe(name, tmp_path)
    batch = Batch(spec.data.batch_size, spec.data.max_seq_length)
    found = check(spec, batch, "cuda", Capacity(limit, 32 * GIB, max_ranks))
    assert found["fits"], found["message"]
    assert found["devices"] == found["ranks_per_machine"] == max_ranks
    assert 0 < found["machine_bytes"] < 32 * GIB == found["machine_limit_bytes"]
    assert found["host_loading_bytes"] == 0


def test_a_recipe_is_refused_with_the_cause_of_what_exceeds_the_cpu_memory_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "nearest", lambda *_, **__: None)  # which would trace many more jobs
    spec, _, ranks = recipe("7b-2x24g", tmp_path)
    batch = Batch(1, 64)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((Path(spec.source.model) / "config.json").read_bytes())
    (tmp_path / "bin" / "pytorch_model.bin").touch()
    assert spec.lora is not None
    assert spec.sharding is not None

    def refused(expected: str, **changes: Any) -> str:
        """The message on the largest machines that are too small."""
        # With gradients reduced at every micro step, which is not compared with the other way: half the traces.
        changed = spec.changed(gradient_sync="micro_step", **changes)
        needed = estimate(changed, batch, "cuda").machine * nearest_jobs.MARGIN
        assert check(changed, batch, "cuda", Capacity(1 << 60, machine=int(needed) + 1))["fits"]
        found = check(changed, batch, "cuda", Capacity(1 << 60, machine=int(needed) - 1))
        assert not found["fits"]
        message: str = found["message"]
        assert f"of CPU memory on each machine, for {ranks} of its ranks while they {expected} (" in message
        assert message.endswith("Use machines with more memory, or fewer ranks on each.")
        return message

    message = refused("train")
    assert ", copies for checkpoints" in message
    assert "offloaded" not in message
    message = refused("train", sharding=spec.sharding.model_copy(update={"cpu_offload": True}))
    assert "(offloaded from the GPUs" in message
    assert "Set fsdp_cpu_offload to false." in message
    message = refused("load", model=str(tmp_path / "bin"))
    assert "(copies of weights" in message
    assert "their files are no safetensors files of one dtype" in message
    message = refused("load", lora=spec.lora.model_copy(update={"quantize_base": True, "use_dora": True}))
    assert "(copies of weights" in message
    assert "Under quantize_base each rank holds the whole base in 4 bits" in message


def test_what_checkpoints_are_written_from_is_the_cause_where_every_weight_is_trained(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, shaped(8, hidden_size=1024, intermediate_size=4096), batch_size=1)
    limit = int(estimate(spec, Batch(1, 16), "cuda").machine * nearest_jobs.MARGIN) - 1
    message = check(spec, Batch(1, 16), "cuda", Capacity(1 << 60, machine=limit))["message"]
    assert "Checkpoints are written from a copy of the trained weights and their optimizer state" in message
    assert "of CPU memory on each machine: algorithm_config={'type': 'LoRA'" in message
    both = check(spec, Batch(1, 16), "cuda", Capacity(1, machine=limit))["message"]
    assert "per GPU" in both
    assert "of CPU memory on each machine, for 1 of its ranks" in both


def test_each_reason_for_copies_while_loading_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "nearest", lambda *_, **__: None)
    model, batch = stored_as(tmp_path, shaped(4), "bf16", "bfloat16"), Batch(1, 16)
    spec = job_spec(tmp_path, model, ranks=2, sharding=ShardingSpec(), lora=LORA)
    mixture(tmp_path / "experts")
    attention_only = LORA.model_copy(update={"mlp": False})

    def why(**changes: Any) -> str:
        found = check(spec.changed(**changes), batch, "cuda", Capacity(1 << 60, machine=1))
        message: str = found["message"]
        return message

    assert "Under use_dora each rank copies all weights" in why(lora=LORA.model_copy(update={"use_dora": True}))
    assert "Without sharding each rank copies all weights" in why(sharding=NO_SHARD)
    assert "Loading copies the experts of the model" in why(
        model=str(tmp_path / "experts"), lora=attention_only, sharding=NO_SHARD
    )


def stored_as(root: Path, model: Path, name: str, dtype: str) -> Path:
    """A copy of a model that consists of its configuration, with the dtype of files that are not there."""
    config = json.loads((model / "config.json").read_text())
    (root / name).mkdir()
    (root / name / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return root / name


def test_eight_ranks_load_a_model_of_70_billion_parameters_in_its_size_of_cpu_memory(tmp_path: Path) -> None:
    """Every rank maps the files, which are in memory once: 138 GB, where eight copies in fp32 were 2.2 TB."""
    spec, _, _ = recipe("70b-8gpu", tmp_path, algorithm_config=None)
    model = stored_as(tmp_path, Path(spec.source.model), "bf16", "bfloat16")
    batch = Batch(1, 128)
    full = estimate(spec.changed(model=str(model)), batch, "cuda")
    size = 2 * 68_976_648_192
    assert full.page_cache == size
    assert full.host_loading == 0
    qlora = LORA.model_copy(update={"quantize_base": True})
    quantized = estimate(spec.changed(model=str(model), lora=qlora), batch, "cuda")
    assert (quantized.page_cache, quantized.host_loading) == (size, 0)
    assert quantized.machine < 16 * GIB
    whole = estimate(spec.changed(model=str(model), sharding=NO_SHARD), batch, "cuda")
    assert whole.host_loading == 2 * size
    assert whole.machine > 16 * size


def test_copies_that_loading_makes_are_counted_for_every_rank(tmp_path: Path) -> None:
    model, batch = stored_as(tmp_path, shaped(4), "bf16", "bfloat16"), Batch(1, 16)
    spec = job_spec(tmp_path, model, ranks=4, sharding=ShardingSpec())

    def of(**changes: Any) -> MemoryEstimate:
        return estimate(spec.changed(**changes), batch, "cuda")

    in_fp32 = 2 * of().page_cache
    assert of().host_loading == 0
    assert of(lora=LORA).host_loading == 0
    dora = of(lora=LORA.model_copy(update={"use_dora": True}))
    assert in_fp32 < dora.host_loading < 1.5 * in_fp32
    qlora = LORA.model_copy(update={"quantize_base": True})
    assert of(lora=qlora).host_loading == 0
    qdora = of(lora=qlora.model_copy(update={"use_dora": True}))
    assert 0 < qdora.host_loading < in_fp32
    assert dora.machine - of(lora=LORA).machine == 4 * (dora.host_loading - of(lora=LORA).host)
    assert of(sharding=NO_SHARD).host_loading == in_fp32
    mixture(tmp_path / "experts")
    named_experts = {"model": str(tmp_path / "experts")}
    assert of(**named_experts).host_loading == 0
    assert 0 < of(**named_experts, sharding=NO_SHARD).host_loading < of(**named_experts).page_cache
    named = {"model": str(model), "method": DpoSpec()}
    assert of(**named).page_cache == of().page_cache  # the reference is in the same files


def test_every_rank_has_the_quantization_constants_of_every_layer(tmp_path: Path) -> None:
    model, batch = shaped(4, hidden_size=1024, intermediate_size=4096), Batch(1, 16)
    spec = job_spec(tmp_path, model, lora=LORA.model_copy(update={"quantize_base": True}), dtype="bf16")

    def at_rest(ranks: int) -> float:
        sharded = spec.model_copy(update={"ranks": ranks, "sharding": ShardingSpec()})
        return _Placed(sharded, trace(sharded, batch, "cuda"), "cuda").part(trace(sharded, batch, "cuda"))

    linear = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    constants = linear / 64 + 4 * linear / (64 * 256)
    assert trace(spec, batch, "cuda").block_linear == linear
    assert at_rest(8) * 8 - at_rest(1) == pytest.approx(7 * constants, rel=1e-5)


def test_parts_in_cpu_memory_are_not_proposed_where_it_is_too_small(tmp_path: Path) -> None:
    model = shaped(8, hidden_size=1024, intermediate_size=4096)
    spec = job_spec(tmp_path, model, ranks=2, sharding=ShardingSpec(), gradient_checkpointing=True, batch_size=1)
    batch = Batch(1, 16)
    offloaded = spec.model_copy(update={"sharding": ShardingSpec(cpu_offload=True)})
    there = estimate(offloaded, batch, "cuda")
    limit = int(there.total * 1.5)
    assert not Capacity(limit).holds(estimate(spec, batch, "cuda"))
    field = "training_config.efficiency_config.fsdp_cpu_offload"
    found = nearest(spec, batch, "cuda", Capacity(limit, int(1.2 * there.machine), max_ranks=2))
    assert found is not None
    assert found.changes == {field: True}
    small = Capacity(limit, there.machine, max_ranks=2)
    other = nearest(spec, batch, "cuda", small)
    assert other is not None
    assert field not in other.changes
    refused = check(offloaded, batch, "cuda", small)
    assert not refused["fits"]
    assert "Set fsdp_cpu_offload to false." in refused["message"]


@pytest.mark.parametrize("name", ["7b-2x24g", *in_full("13b", "70b-8gpu")])
def test_training_every_weight_does_not_fit_there_and_the_nearest_that_does_is_named(name: str, tmp_path: Path) -> None:
    spec, limit, max_ranks = recipe(name, tmp_path, algorithm_config=None)
    batch = Batch(spec.data.batch_size, spec.data.max_seq_length)
    found = check(spec, batch, "cuda", Capacity(limit, max_ranks=max_ranks))
    assert not found["fits"]
    assert "does not fit in" in found["message"]
    assert found["machine_limit_bytes"] is None
    proposal = nearest(spec, batch, "cuda", Capacity(limit, max_ranks=max_ranks))
    assert proposal is not None
    share = batch.sequences * proposal.spec.data.batch_size // spec.data.batch_size
    again = check(proposal.spec, Batch(share, batch.tokens), "cuda", Capacity(limit, max_ranks=max_ranks))
    assert again["fits"]
    for field in proposal.changes:
        assert field in found["message"]


def test_the_nearest_keeps_the_results_where_it_can(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, shaped(2, hidden_size=256, intermediate_size=1024), batch_size=8)
    batch = Batch(8, 1024)
    wanted = estimate(spec, batch, "cpu").total
    little_less = nearest(spec, batch, "cpu", Capacity(int(wanted * 1.05)))
    assert little_less is not None
    assert list(little_less.changes) == ["training_config.efficiency_config.enable_activation_checkpointing"]
    less = nearest(spec, batch, "cpu", Capacity(int(little_less.memory.total * 1.05)))
    assert less is not None
    assert less.spec.data.batch_size * less.spec.train.gradient_accumulation_steps == 8
    assert less.spec.lora is None
    assert nearest(spec, batch, "cpu", Capacity(1000)) is None


def test_pairs_that_are_compared_within_their_batch_keep_it(tmp_path: Path) -> None:
    sharding = ShardingSpec()
    for loss_type, micro in (("sigmoid", 4), ("kto_pair", 8)):
        dpo = DpoSpec(loss_type=loss_type)  # type: ignore[arg-type]
        settings = {"method": dpo, "gradient_checkpointing": True, "ranks": 2, "sharding": sharding, "batch_size": 8}
        spec = job_spec(tmp_path, shaped(2), "dpo", **settings)
        batch = Batch(16, 1024)
        limit = int(estimate(spec, batch, "cpu").total * 1.09)
        found = nearest(spec, batch, "cpu", Capacity(limit, max_ranks=4))
        assert found is not None
        assert (found.spec.data.batch_size, found.spec.ranks) == (micro, 2)


def test_what_trains_every_weight_is_not_advised_to_train_adapters(tmp_path: Path) -> None:
    qat = QatSpec(quantizer_name="Int4WeightOnlyQATQuantizer", group_size=32)
    spec = job_spec(tmp_path, shaped(2), qat=qat, gradient_checkpointing=True, checkpoint_every=2)
    wanted = estimate(spec.changed(checkpoint_every=1), Batch(4, 256), "cpu").total
    found = nearest(spec, Batch(4, 256), "cpu", Capacity(int(wanted * 1.101)))
    assert found is not None
    assert (found.spec.compute.checkpoint_every, found.spec.data.batch_size) == (1, 4)
    assert nearest(spec, Batch(4, 256), "cpu", Capacity(1000)) is None


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs whose memory is estimated, each of which is too large."""
    found: list[JobSpec] = []

    def too_large(spec: JobSpec, *_: Any) -> MemoryEstimate:
        found.append(spec)
        return MemoryEstimate(GIB, 0, 0, 0, 0, 0, 0)

    monkeypatch.setattr(nearest_jobs, "estimate", too_large)
    return found


def test_products_in_8_bits_are_counted_and_no_adapters_are_proposed_with_them(
    tmp_path: Path, tried: list[JobSpec]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256}
    spec = job_spec(tmp_path, shaped(2, **sizes), compile_blocks="always", float8="always")
    beside = estimate(spec, Batch(2, 32), "cpu").activations
    beside -= estimate(spec.changed(float8="never"), Batch(2, 32), "cpu").activations
    assert beside > 10 * 64 * 256  # numbers of the widest input, before those of the weights
    assert nearest(spec, Batch(2, 32), "cpu", Capacity(1000)) is None
    assert {one.compute.float8 for one in tried if one.lora is None} == {"always"}
    assert {one.compute.float8 for one in tried if one.lora} == {"never"}


@pytest.mark.parametrize(
    ("method", "quantizes", "ranks"),
    [("lora", {False, True}, {1, 2}), ("ia3", {False}, {1, 2}), ("vera", {False}, {1})],
)
def test_adapters_are_proposed_what_their_method_can_do(
    tmp_path: Path, tried: list[JobSpec], method: Any, quantizes: set[bool], ranks: set[int]
) -> None:
    lora = LORA.model_copy(update={"method": method})
    assert nearest(job_spec(tmp_path, "model", lora=lora), Batch(4, 256), "cpu", Capacity(1000, max_ranks=2)) is None
    assert {spec.lora.quantize_base for spec in tried if spec.lora} == quantizes
    assert {spec.ranks for spec in tried} | {1} == ranks


@pytest.mark.parametrize("answers", [False, True])
def test_grpo_is_proposed_nothing_that_it_refuses(tmp_path: Path, tried: list[JobSpec], answers: bool) -> None:
    """A base in 4 bits, and sequences without room for a prompt."""
    rewards = (RewardSource(name="a", check=AnswerCheck(type="regex", pattern="a")),)
    vllm = VllmSpec(python=tmp_path) if answers else None
    method = GrpoSpec(rewards=rewards, num_generations=4, max_completion_length=256, vllm=vllm)
    spec = job_spec(tmp_path, "model", "grpo", method=method, lora=LORA, max_seq_length=1024)
    assert nearest(spec, Batch(16, 1024), "cpu", Capacity(1000, max_ranks=2)) is None
    assert {one.lora.quantize_base for one in tried if one.lora} == {False}
    assert min(one.data.max_seq_length for one in tried) == 512
    assert {one.ranks for one in tried} | {1} == {1, 2}


def test_the_estimate_takes_no_memory(tmp_path: Path) -> None:
    spec, _, _ = recipe("70b-8gpu", tmp_path)
    batch = Batch(spec.data.batch_size, spec.data.max_seq_length)
    assert estimate(spec, batch, "cuda").total > 17 * GIB  # an eighth of 140 GB of weights
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20  # KiB
