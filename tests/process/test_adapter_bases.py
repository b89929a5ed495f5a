"""Jobs that begin with a trained adapter: continued, or merged into the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.trainer_utils import set_seed

from llama_stack_provider_trl.specs.events import Failed, Prepared, Reason
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, LoraSpec, OptimizerSpec, ReferenceSpec, ShardingSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from tests.process.plain_trl import as_chat, load, plain_arguments
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
BATCH = 4


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that SFT trained."""
    root = tmp_path_factory.mktemp("sft")
    return final_of(root, job_spec(root, tiny_model(), shuffle=False, lora=LORA))


def final_of(root: Path, spec: JobSpec, resume_from: Path | None = None) -> Path:
    status, events = run(root / "run", spec, resume_from)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    return spec.checkpoint_dir / "final"


def continuing(root: Path, adapter: Path, algorithm: str = "dpo", **changes: Any) -> JobSpec:
    fields = {"shuffle": False, "lora": LORA, "adapter": AdapterSpec(model=str(adapter), use="continue"), **changes}
    return job_spec(root, tiny_model(), algorithm, **fields)


def on_two_ranks(spec: JobSpec, strategy: str = "FULL_SHARD") -> JobSpec:
    changes = {"ranks": 2, "batch_size": BATCH // 2, "sharding": ShardingSpec(strategy=strategy)}
    return spec.changed(**changes)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def difference(one: Path, other: Path) -> float:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def by_hand(root: Path, adapter_off: bool = False) -> tuple[Path, Path]:
    """SFT, then DPO on the same adapter, with TRL and PEFT alone; the adapter after each of the two."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class InOrder:
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

    class Sft(InOrder, SFTTrainer): ...

    class Dpo(InOrder, DPOTrainer): ...

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    modules = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=modules)
    set_seed(42)
    trainer: Any = Sft(
        model=get_peft_model(load(tiny_model()), config),
        args=SFTConfig(**plain_arguments(root / "sft")),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([as_chat(row, "completion") for row in SFT_ROWS]),
    )
    trainer.train()
    trainer.model.save_pretrained(root / "adapter")
    trainer = Dpo(
        model=PeftModel.from_pretrained(load(tiny_model()), root / "adapter", is_trainable=True),
        args=DPOConfig(**plain_arguments(root / "dpo"), beta=0.1),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([as_chat(row, "chosen", "rejected") for row in DPO_ROWS]),
    )
    trainer.train()
    trainer.model.save_pretrained(root / "both", selected_adapters=["default"])
    return root / "adapter", root / "both"


def test_sft_then_dpo_on_one_adapter_gives_the_weights_of_trl_and_peft_by_hand(sft: Path, tmp_path: Path) -> None:
    first, both = by_hand(tmp_path)
    assert difference(sft, first) < 1e-5
    dpo = final_of(tmp_path, continuing(tmp_path, sft))
    assert difference(dpo, both) < 1e-5
    assert difference(dpo, sft) > 1e-3
    assert sorted(path.name for path in dpo.iterdir() if path.is_dir()) == []


def trained(ranks: Ranks, root: Path, spec: JobSpec) -> tuple[list[float], Path]:
    """Losses, and the adapter in the end."""
    codes, events = ranks.run(root / "run", spec)
    assert codes == [0] * spec.ranks, [event.message for event in of_kind(events, Failed)]
    return losses(events), spec.checkpoint_dir / "final"


@pytest.mark.parametrize(
    ("strategy", "precompute"),
    [("FULL_SHARD", True), *in_full(("NO_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", False))],
)
def test_two_ranks_continue_an_adapter_as_one_process_does(
    ranks: Ranks, sft: Path, tmp_path: Path, strategy: str, precompute: bool
) -> None:
    alone, one = trained(ranks, tmp_path / "one", continuing(tmp_path / "one", sft))
    dpo = DpoSpec(reference=ReferenceSpec(precompute=precompute))
    spec = on_two_ranks(continuing(tmp_path / "two", sft, method=dpo), strategy)
    together, two = trained(ranks, tmp_path / "two", spec)
    assert alone[0] == pytest.approx(0.693147, abs=1e-6)  # the policy is its own reference then
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert difference(one, two) < 1e-4


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(LoraSpec(method="vera", target_modules=("q_proj", "v_proj"), rank=8, alpha=1), id="vera"),
        *in_full(
            pytest.param(LORA.model_copy(update={"use_dora": True}), id="dora"),
            pytest.param(LORA.model_copy(update={"use_rslora": True, "dropout": 0.5}), id="dropout"),
            pytest.param(
                LoraSpec(method="ia3", target_modules=("k_proj", "v_proj", "down_proj"), rank=1, alpha=1), id="ia3"
            ),
        ),
    ],
)
def test_every_kind_of_adapter_is_continued_with_itself_as_the_reference(tmp_path: Path, lora: LoraSpec) -> None:
    fast = {"optimizer": OptimizerSpec(learning_rate=0.02)}
    first = final_of(tmp_path / "sft", job_spec(tmp_path / "sft", tiny_model(), lora=lora, **fast))
    plain = lora.model_copy(update={"dropout": 0.0})
    spec = continuing(tmp_path / "dpo", first, lora=plain, **fast)
    status, events = run(tmp_path / "dpo" / "run", spec)
    assert status == 0, of_kind(events, Failed)
    assert losses(events)[0] == pytest.approx(0.693147, abs=1e-6)
    assert of_kind(events, Prepared)[0].model_extra is not None
    again = continuing(tmp_path / "again", spec.checkpoint_dir / "final", "sft", lora=plain)
    assert difference(final_of(tmp_path / "again", again), spec.checkpoint_dir / "final") > 0


def test_the_frozen_copy_has_no_dropout(sft: Path, tmp_path: Path) -> None:
    """The answers of the reference are the same in every pass, whatever the policy drops."""
    noisy = LORA.model_copy(update={"dropout": 0.5})
    at_each_step = final_of(tmp_path / "a", continuing(tmp_path / "a", sft, lora=noisy))
    dpo = DpoSpec(reference=ReferenceSpec(precompute=True))
    once = final_of(tmp_path / "b", continuing(tmp_path / "b", sft, lora=noisy, method=dpo))
    assert difference(at_each_step, once) < 1e-5


def test_a_job_that_resumes_has_the_reference_of_its_beginning(sft: Path, tmp_path: Path) -> None:
    straight = continuing(tmp_path / "straight", sft, n_epochs=2, save_steps=3)
    expected = final_of(tmp_path / "straight", straight)
    resumed = straight.model_copy(update={"checkpoint_dir": tmp_path / "resumed" / "checkpoints"})
    checkpoint = straight.checkpoint_dir / "checkpoint-3"
    assert difference(final_of(tmp_path / "resumed", resumed, checkpoint), expected) == 0.0


def test_the_cache_of_reference_answers_knows_the_adapter(sft: Path, tmp_path: Path) -> None:
    cached = DpoSpec(reference=ReferenceSpec(precompute=True, cache=tmp_path / "reference"))
    another = tmp_path / "another"
    final_of(another, job_spec(another, tiny_model(), lora=LORA, seed=7))

    def source(name: str, adapter: Path | None) -> str:
        spec = continuing(tmp_path / name, adapter or sft, method=cached)
        spec = spec if adapter else spec.model_copy(update={"adapter": None})
        status, events = run(tmp_path / name / "run", spec)
        assert status == 0, of_kind(events, Failed)
        (prepared,) = of_kind(events, Prepared)
        return str(prepared.model_dump()["effective"]["reference"]["train_dataset"])

    assert [source("a", sft), source("b", sft)] == ["computed", "cache"]
    assert source("c", another / "checkpoints" / "final") == "computed"
    assert source("d", None) == "computed"


def test_a_base_in_4_bits_continues_the_exact_adapter(sft: Path, tmp_path: Path) -> None:
    quantized = LORA.model_copy(update={"quantize_base": True})
    still = {"optimizer": OptimizerSpec(learning_rate=1e-30, weight_decay=0.0)}
    spec = continuing(tmp_path, sft, "sft", lora=quantized, **still)
    assert difference(final_of(tmp_path, spec), sft) == 0.0


@pytest.mark.parametrize("number", [2, *in_full(1)])
def test_a_merged_adapter_is_peft_s_merge_with_a_fresh_adapter_on_it(
    ranks: Ranks, sft: Path, tmp_path: Path, number: int
) -> None:
    spec = job_spec(tmp_path / "job", tiny_model(), "dpo", shuffle=False, lora=LORA)
    spec = spec.model_copy(update={"adapter": AdapterSpec(model=str(sft), use="merge")})
    found, final = trained(ranks, tmp_path / "job", on_two_ranks(spec) if number == 2 else spec)
    base = spec.checkpoint_dir / "merged-base"
    merged = PeftModel.from_pretrained(load(tiny_model()), sft).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(tmp_path / "merged")
    theirs, ours = merged.state_dict(), load(base).state_dict()
    assert max(float((theirs[name] - ours[name]).abs().max()) for name in theirs) < 1e-6
    plain = job_spec(tmp_path / "plain", tmp_path / "merged", "dpo", shuffle=False, lora=LORA)
    expected, other = trained(ranks, tmp_path / "plain", plain)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert difference(final, other) < 1e-4
    assert PeftModel.from_pretrained(load(base), final).peft_config["default"].base_model_name_or_path == str(base)


def test_every_weight_can_be_trained_on_a_merged_adapter(sft: Path, tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), adapter=AdapterSpec(model=str(sft), use="merge"))
    final = final_of(tmp_path, spec)
    assert (final / "model.safetensors").exists()


def of_another_rank(directory: Path) -> None:
    found = weights(directory)
    save_file({name: weight[:2] if "lora_A" in name else weight for name, weight in found.items()}, _file(directory))


def without_a_weight(directory: Path) -> None:
    found = weights(directory)
    del found[sorted(found)[0]]
    save_file(found, _file(directory))


def damaged(directory: Path) -> None:
    _file(directory).write_bytes(b"none")


def _file(directory: Path) -> Path:
    return directory / "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (of_another_rank, r"lora_A.weight is \[2, \d+\], and \[4, \d+\] in this model"),
        (without_a_weight, "1 weights are in only one of it and this model, such as"),
        (damaged, "adapter_model.safetensors is cut off, it has 4 bytes"),
    ],
)
def test_an_adapter_that_does_not_fit_fails_the_job_by_name(
    sft: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    import shutil

    adapter = tmp_path / "adapter"
    shutil.copytree(sft, adapter)
    damage(adapter)
    status, events = run(tmp_path / "run", continuing(tmp_path, adapter))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_model)
    assert failed.message.startswith(f"adapter '{adapter}': ")
    import re

    assert re.search(message, failed.message), failed.message
