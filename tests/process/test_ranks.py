"""Several ranks train what one process trains: the same numbers and weights, however the model is sharded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.launch.runner import PAUSE
from llama_stack_provider_trl.recipes.model.fsdp import describe
from llama_stack_provider_trl.recipes.trainer.arguments import sft_arguments
from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Paused, Prepared, Progress, Reason
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, ShardingSpec
from tests.process.rank_numbers import GLOBAL_BATCH, ROWS, assert_same_numbers, numbers, spec_of, trained
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_tokenizer
from tests.training import LORA, SAMPLES, digests, of_kind, sampled

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
IA3 = LORA.model_copy(update={"method": "ia3"})
REDUCE_SCATTER = "distributed." + next(  # the name that FSDP2 uses, from torch 2.12 on and before
    name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(torch.distributed, name)
)
UNITS = 3
"""Units of the sharded tiny model that have weights of their own: two blocks, and the rest with the tied embeddings."""


Alone = Callable[..., tuple[JobSpec, list[Any]]]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one process makes of a job: its spec and its events, trained once for all tests that compare with it."""

    @cache
    def train(algorithm: str, changes: str) -> tuple[JobSpec, list[Any]]:
        root = tmp_path_factory.mktemp("alone")
        spec = spec_of(root, algorithm, 1, **known[changes])
        return spec, trained(ranks, root, spec)

    known: dict[str, dict[str, Any]] = {}

    def find(algorithm: str, **changes: Any) -> tuple[JobSpec, list[Any]]:
        known[repr(changes)] = dict(changes)
        return train(algorithm, repr(changes))

    return find


def final_weights(spec: JobSpec) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / "final").state_dict())


def generated(directory: Path, spec: JobSpec) -> list[str]:
    """The answers of transformers itself to the prompts of a job."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert spec.train.samples
    texts = []
    for prompt in spec.train.samples.prompts:
        turns = [message.model_dump() for message in prompt]
        given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = model.generate(
            **given,
            max_new_tokens=spec.train.samples.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        texts.append(tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


LONG_ROWS = {"gradient_checkpointing": True, "keep_attention": "always", "tile_mlp": "always"}
CASES = [
    pytest.param(algorithm, strategy, changes, id=f"{algorithm}-{strategy}-{name}")
    for algorithm, strategy, name, changes in (
        ("dpo", "FULL_SHARD", "promised", {"method": DpoSpec(reward_scale=1.0, reward_clip=5.0), "n_epochs": 7}),
        ("sft", "FULL_SHARD", "adapters", {"lora": LORA, "fuse_lora": "always", **LONG_ROWS}),
        ("sft", "NO_SHARD", "long-rows", LONG_ROWS),
        *in_full(
            ("sft", "HYBRID_SHARD", "accumulating", {"gradient_accumulation_steps": 2}),  # below, and over two nodes
            ("sft", "FULL_SHARD", "checkpointing", {"gradient_checkpointing": True}),  # test_quantization.py
            ("sft", "FULL_SHARD", "packed", {"packed": True, "max_seq_length": 96}),  # test_rows_by_method.py
        ),
    )
]


# tests/matrix has the plain ones.
@pytest.mark.parametrize(("algorithm", "strategy", "changes"), CASES)
def test_two_ranks_train_what_one_process_trains(
    ranks: Ranks, alone: Alone, tmp_path: Path, algorithm: str, strategy: str, changes: dict[str, Any]
) -> None:
    changes = {"validation_rows": ROWS[algorithm][:5], **changes}
    single, expected = alone(algorithm, **changes)
    together = spec_of(tmp_path, algorithm, 2, strategy, **changes)
    events = trained(ranks, tmp_path, together)
    assert_same_numbers(numbers(events), numbers(expected))
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective.get("kept_attention") == ("used" if "keep_attention" in changes else None)
    assert prepared.num_rows == 11
    assert prepared.effective["token_cache"].keys() == {"train_dataset", "validation_dataset"}
    kept = [path.suffix for path in (tmp_path / "tokens").iterdir() if path.suffix != ".lock"]
    assert kept == [""] * (4 if together.data.packed else 2)  # each written by one of the ranks
    assert prepared.effective["global_batch_size"] == GLOBAL_BATCH * single.train.gradient_accumulation_steps
    for point in of_kind(events, Progress):
        assert len(point.rank_memory_bytes) == len(point.rank_peak_memory_bytes) == 2
        assert point.rank_peak_memory_bytes[0] == point.peak_memory_bytes
        assert all(size > 1 << 20 for size in (*point.rank_memory_bytes, *point.rank_peak_memory_bytes))
    sharding = prepared.effective["sharding"]
    assert sharding["strategy"] == strategy
    if strategy != "NO_SHARD":
        assert sharding["local_elements"] <= 0.6 * sharding["total_elements"]
    one, two = final_weights(single), final_weights(together)
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


def test_ranks_that_have_no_row_of_an_adapter_train_what_one_process_trains(ranks: Ranks, tmp_path: Path) -> None:
    """As those beyond the eighth with a rank of 8. torch's kernels for CUDA skip empty shards (pytorch#140103)."""
    found, adapters = [], []
    for number in (1, 3):
        root = tmp_path / str(number)
        lora = LORA.model_copy(update={"rank": 2})
        spec = spec_of(root, "sft", 1, batch_size=3, sharding=ShardingSpec(), lora=lora, save_steps=2)
        codes, events = ranks.run(root / "run", spec, world_size=number)
        assert codes == [0] * number, [event.message for event in of_kind(events, Failed)]
        found.append(numbers(events))
        adapters.append(load_file(spec.checkpoint_dir / "final" / "adapter_model.safetensors"))
    assert_same_numbers(found[1], found[0])
    assert all(torch.allclose(weight, adapters[1][name], atol=1e-3) for name, weight in adapters[0].items())
    codes, events = ranks.run(tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-2", world_size=3)
    assert codes == [0] * 3
    assert numbers(events) == found[1][2:]


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(ShardingSpec(forward_prefetch=True, backward_prefetch="BACKWARD_PRE"), id="prefetch"),
        *in_full(
            pytest.param(ShardingSpec(cpu_offload=True), id="cpu_offload"),  # test_dpo.py
            pytest.param(ShardingSpec(strategy="SHARD_GRAD_OP", forward_prefetch=True), id="grad-op-prefetch"),
        ),
    ],
)
def test_what_saves_memory_or_time_changes_no_number(
    ranks: Ranks, alone: Alone, tmp_path: Path, sharding: ShardingSpec
) -> None:
    _, expected = alone("sft", validation_rows=ROWS["sft"][:5])
    spec = spec_of(tmp_path, "sft", 2, sharding=sharding, validation_rows=ROWS["sft"][:5])
    assert_same_numbers(numbers(trained(ranks, tmp_path, spec)), numbers(expected))


@pytest.mark.parametrize(("gradient_sync", "in_parts"), [("micro_step", True), ("auto", True), ("step", False)])
def test_ranks_keep_their_share_of_accumulated_gradients_unless_whole_ones_fit(
    tmp_path: Path, gradient_sync: str, in_parts: bool
) -> None:
    changes = {"gradient_accumulation_steps": 2, "gradient_sync": gradient_sync}
    config = sft_arguments(spec_of(tmp_path, "sft", 2, **changes), torch.device("cpu")).accelerator_config
    assert config.gradient_accumulation_kwargs["sync_each_batch"] is in_parts


def test_whole_gradients_are_reduced_once_per_optimizer_step(ranks: Ranks, tmp_path: Path) -> None:
    def of(root: Path, gradient_sync: str) -> JobSpec:
        changes = {"gradient_accumulation_steps": 2, "batch_size": 1, "rows": ROWS["sft"][:8], "save_steps": 2}
        return spec_of(root, "sft", 2, gradient_sync=gradient_sync, **changes)

    def counted(run_dir: Path, spec: JobSpec, resume_from: Path | None = None) -> tuple[list[Any], str, float]:
        """Numbers, the effective setting, and the collectives of an optimizer step."""
        estimates = spec.train.gradient_sync == "auto"
        codes, events = ranks.run(run_dir, spec, resume_from, counted=REDUCE_SCATTER, estimates=estimates)
        assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
        calls = len((run_dir / "calls").read_text().splitlines())
        effective = of_kind(events, Prepared)[0].effective
        assert effective.get("merged_micro_steps") == (2 if spec.train.merge_micro_batches == "always" else None)
        return numbers(events), effective.get("gradient_sync", ""), calls / len(of_kind(events, Progress))

    parts, whole = of(tmp_path / "parts", "micro_step"), of(tmp_path / "whole", "auto")
    expected, sync, per_step = counted(tmp_path / "parts" / "run", parts)
    assert (sync, per_step) == ("micro_step", 2 * UNITS)
    found, sync, per_step = counted(tmp_path / "whole" / "run", whole)
    assert (sync, per_step) == ("step", UNITS)
    assert_same_numbers(found, expected)
    merged = of(tmp_path / "merged", "auto").changed(merge_micro_batches="always")
    together, sync, per_step = counted(tmp_path / "merged" / "run", merged)
    assert (sync, per_step) == ("", UNITS)  # one micro step: nothing is accumulated
    assert_same_numbers(together, expected)
    written = digests(whole)
    (whole.checkpoint_dir / "final").rename(tmp_path / "first-final")
    again, sync, _ = counted(tmp_path / "again", whole, whole.checkpoint_dir / "checkpoint-2")
    assert (sync, again, digests(whole)) == ("step", found[2:], written)
    # An attempt that would choose otherwise does as its checkpoint did: every later number stays the same.
    resumed = parts.changed(gradient_sync="auto")
    again, sync, _ = counted(tmp_path / "resumed", resumed, parts.checkpoint_dir / "checkpoint-2")
    assert (sync, again) == ("micro_step", expected[2:])


def test_without_shards_gradients_are_reduced_once_per_optimizer_step(ranks: Ranks, tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "batch_size": 1, "n_epochs": 1, "samples": SAMPLES}
    spec = spec_of(tmp_path, "sft", 2, "NO_SHARD", **changes)
    counted = "nn.parallel.DistributedDataParallel.no_sync"
    codes, events = ranks.run(tmp_path / "run", spec, counted=counted)
    assert codes == [0, 0]
    assert of_kind(events, Prepared)[0].effective["gradient_sync"] == "step"
    assert len((tmp_path / "run" / "calls").read_text().splitlines()) == len(of_kind(events, Progress)) == 3
    # Each rank answers some of the prompts.
    before, after = sampled(events)
    assert [before[:2], after[:2]] == [("before", 0), ("after", 3)]
    assert before[2] == generated(Path(spec.source.model), spec)
    assert after[2] == generated(spec.checkpoint_dir / "final", spec)


def test_hybrid_sharding_over_two_nodes_has_parts_within_and_copies_across(
    ranks: Ranks, alone: Alone, tmp_path: Path
) -> None:
    _, expected = alone("sft", validation_rows=ROWS["sft"][:5])
    spec = spec_of(tmp_path, "sft", 4, "HYBRID_SHARD", validation_rows=ROWS["sft"][:5])
    codes, events = ranks.run(tmp_path / "run", spec, per_node=2)
    assert codes == [0] * 4, [event.message for event in of_kind(events, Failed)]
    assert_same_numbers(numbers(events), numbers(expected))
    sharding = of_kind(events, Prepared)[0].effective["sharding"]
    assert set(sharding["placements"]) == {"Replicate, Shard(0)"}
    assert sharding["local_elements"] == pytest.approx(sharding["total_elements"] / 2, rel=0.1)


def test_hybrid_sharding_with_one_rank_per_node_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sft", 2, "HYBRID_SHARD")
    codes, events = ranks.run(tmp_path / "run", spec, per_node=1)
    assert codes == [1, 1]
    assert "HYBRID_SHARD shards within a node" in of_kind(events, Failed)[0].message


def test_bf16_adapters_over_a_sharded_base_are_exported_and_merged(ranks: Ranks, tmp_path: Path) -> None:
    changes = {"merge_adapter": True, "samples": SAMPLES, "fuse_lora": "always"}
    spec = spec_of(tmp_path, "dpo", 2, lora=LORA, dtype="bf16", **changes)
    events = trained(ranks, tmp_path, spec)
    assert of_kind(events, Prepared)[0].effective["fused_lora"].startswith("used in ")
    assert [event.kind for event in of_kind(events, CheckpointSaved)][-2:] == ["final", "merged"]
    assert [found[:2] for found in sampled(events)] == [("before", 0), ("checkpoint", 3), ("after", 6)]
    # The policy is the reference still: log 2, for which bf16 has only 0.69141.
    assert of_kind(events, Progress)[0].metrics["loss"] == pytest.approx(0.693147, abs=5e-4)
    base = AutoModelForCausalLM.from_pretrained(spec.source.model, dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(base, spec.checkpoint_dir / "final").eval()
    merged = AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / "merged", dtype=torch.bfloat16).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=0.1)
    assert any(weight.abs().sum() > 0 for name, weight in adapted.named_parameters() if "lora_B" in name)


def test_a_sharded_policy_in_bf16_equals_its_reference_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    events = trained(ranks, tmp_path, spec_of(tmp_path, "dpo", 2, dtype="bf16", save_steps=100))
    first = of_kind(events, Progress)[0].metrics
    assert [first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")] == [0.0, 0.0, 0.0]
    assert first["loss"] == pytest.approx(0.69314718, abs=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "strategy", "changes"),
    [
        pytest.param("sft", "FULL_SHARD", {"lora": IA3, "dtype": "bf16"}, id="sft-sharded-ia3"),
        # Sums of three ranks depend on their order, which a new DDP might not have from its first step on.
        pytest.param("sft", "NO_SHARD", {"ranks": 3, "gradient_checkpointing": True}, id="sft-ddp-of-three"),
        *in_full(  # tests/matrix has such
            pytest.param("sft", "NO_SHARD", {"packed": True, "max_seq_length": 96, "n_epochs": 3}, id="sft-ddp-packed"),
            pytest.param("sft", "FULL_SHARD", {}, id="sft-sharded"),
            pytest.param("dpo", "FULL_SHARD", {"lora": LORA}, id="dpo-sharded-lora"),
            pytest.param("dpo", "NO_SHARD", {}, id="dpo-ddp"),
        ),
    ],
)
def test_a_checkpoint_of_several_ranks_continues_exactly(
    ranks: Ranks, tmp_path: Path, algorithm: str, strategy: str, changes: dict[str, Any]
) -> None:
    spec = spec_of(tmp_path, algorithm, **{"ranks": 2, "strategy": strategy, "save_steps": 2, **changes})
    whole = trained(ranks, tmp_path / "first", spec)
    written = digests(spec)
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    # In the second epoch, whose order of rows is not the first one's.
    resumed = trained(ranks, tmp_path / "second", spec, spec.checkpoint_dir / "checkpoint-4")
    assert of_kind(resumed, Prepared)[0].start_step == 4
    assert numbers(resumed) == numbers(whole)[4:]
    assert digests(spec) == written


def test_at_an_order_to_stop_every_rank_saves_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sft", 2)
    codes, events = ranks.run(tmp_path / "run", spec, prepare=lambda paths: paths.control.write_text(json.dumps(PAUSE)))
    assert codes == [0, 0]
    assert of_kind(events, Paused)[0].step == 0


def test_a_rank_that_fails_alone_is_named(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sft", 2)
    codes, events = ranks.run(tmp_path / "run", spec.model_copy(update={"ranks": 3}), started=2)
    assert codes == [1, 1]
    assert "3 ranks" in of_kind(events, Failed)[0].message


def test_a_model_that_is_whole_on_every_rank_is_no_sharded_one() -> None:
    spec = JobSpec.model_construct(ranks=2, sharding=ShardingSpec())
    with pytest.raises(JobFailure, match="whole on every rank") as raised:
        describe(torch.nn.Linear(2, 2), spec)
    assert raised.value.reason == Reason.not_sharded


@pytest.mark.parametrize(
    ("algorithm", "architecture", "sizes"),
    [
        ("dpo", "mamba", {"state_size": 4, "tie_word_embeddings": True}),
        (
            "sft",
            "qwen3_5_text",
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64},
        ),
    ],
)
def test_architectures_with_blocks_of_another_kind_are_sharded(
    ranks: Ranks, tmp_path: Path, algorithm: str, architecture: str, sizes: dict[str, Any]
) -> None:
    """Mamba has blocks inside of blocks, in the reference of DPO, too; Qwen3.5 lists a block that it does not have."""
    config = AutoConfig.for_model(architecture, vocab_size=1024, hidden_size=32, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    spec = spec_of(tmp_path, algorithm, 2, model=tmp_path / "model", n_epochs=1, max_steps_per_epoch=1)
    (prepared,) = of_kind(trained(ranks, tmp_path, spec), Prepared)
    assert prepared.effective["sharding"]["units"] >= 3  # two blocks at least, and the rest
    before = model.state_dict()
    assert all(not torch.equal(weight, before[name]) for name, weight in final_weights(spec).items() if "norm" in name)
