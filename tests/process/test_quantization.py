"""Few bits: a base in 4 bits under adapters, training for few bits, and DoRA, in one process and on two ranks."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import build_trainer
from llama_stack_provider_trl.recipes.model.loading import linear_modules
from llama_stack_provider_trl.recipes.model.quantization import fake_quantize, prepare_4bit_base
from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Prepared, Reason
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, QatSpec, ShardingSpec
from tests.process.rank_numbers import trained
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, digests, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

QLORA = LORA.model_copy(update={"quantize_base": True})
DORA = LORA.model_copy(update={"use_dora": True})
QDORA = DORA.model_copy(update={"quantize_base": True})
INT8 = QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)
INT4 = QatSpec(quantizer_name="Int4WeightOnlyQATQuantizer", group_size=32)
IN_4_BITS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
"""Weights of the tiny model's linear layers: q and o, k and v, gate, up and down of each of two blocks."""


def spec_of(root: Path, algorithm: str, ranks: int = 1, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    """The same job for any number of ranks; the last batch of an epoch is not full."""
    rows = {"sft": SFT_ROWS, "dpo": DPO_ROWS}[algorithm][:11]
    return job_spec(
        root,
        tiny_model(tied=False),
        algorithm,
        **{
            "rows": rows,
            "ranks": ranks,
            "sharding": ShardingSpec(strategy=strategy) if ranks > 1 else None,
            "batch_size": 4 // ranks,
            "n_epochs": 2,
            "optimizer": OptimizerSpec(learning_rate=5e-3),
            **changes,
        },
    )


Alone = Callable[..., tuple[JobSpec, list[Any]]]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one process makes of a job, trained once for all tests that check it."""
    known: dict[str, dict[str, Any]] = {}

    @cache
    def train(algorithm: str, key: str) -> tuple[JobSpec, list[Any]]:
        root = tmp_path_factory.mktemp("alone")
        changes = known[key]
        spec = spec_of(root, algorithm, save_steps=2, merge_adapter="lora" in changes, **changes)
        return spec, trained(ranks, root, spec)

    def find(algorithm: str, **changes: Any) -> tuple[JobSpec, list[Any]]:
        known[repr(changes)] = changes
        return train(algorithm, repr(changes))

    return find


def load(path: Path | str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 23)[None]).logits


def packed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The 4-bit weights as bytes."""
    weights = {name: weight for name, weight in model.named_parameters() if type(weight).__name__ == "Params4bit"}
    return {name: weight.detach().clone().view(torch.uint8) for name, weight in weights.items()}


# --- a base in 4 bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sft", *in_full("dpo")])
def test_adapters_learn_over_a_base_in_4_bits_and_load_over_any(alone: Alone, algorithm: str) -> None:
    spec, events = alone(algorithm, lora=QLORA)
    assert losses(events)[-1] < losses(events)[0] - 0.05
    (prepared,) = of_kind(events, Prepared)
    assert prepared.total_parameters - prepared.trainable_parameters == 205120
    assert prepared.effective["quantization"]["base"] == "nf4"
    assert prepared.effective["quantization"]["bytes"] == 4 * (205120 - IN_4_BITS) + IN_4_BITS // 2
    assert {saved.kind for saved in of_kind(events, CheckpointSaved)} == {"step", "final", "merged"}
    final = spec.checkpoint_dir / "final"
    assert {weight.dtype for weight in load_file(final / "adapter_model.safetensors").values()} == {torch.float32}
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == spec.source.model
    adapted = logits(PeftModel.from_pretrained(load(spec.source.model), final))
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    over_4_bits = logits(PeftModel.from_pretrained(load(spec.source.model, quantization_config=in_4_bits), final))
    learnt = (adapted - logits(load(spec.source.model))).abs().max()
    assert 0 < (over_4_bits - adapted).abs().max() < learnt
    merged = load(spec.checkpoint_dir / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert torch.allclose(logits(merged), adapted, atol=1e-4)


def test_the_base_stays_in_4_bits_and_as_it_was_under_fp32_adapters(tmp_path: Path) -> None:
    trainer = build_trainer(spec_of(tmp_path, "sft", lora=QDORA), torch.device("cpu")).trainer
    before = packed(trainer.model)
    assert sum(weight.numel() for weight in before.values()) == IN_4_BITS // 2
    trainer.train()
    after = packed(trainer.model)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    moved = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in moved.values()} == {torch.float32}
    assert all(weight.abs().sum() > 0 for name, weight in moved.items() if "lora_B" in name)


def test_a_model_without_layers_for_4_bits_is_refused() -> None:
    with pytest.raises(JobFailure, match="no linear layer") as raised:
        prepare_4bit_base(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=32)))
    assert raised.value.reason == Reason.invalid_request


def test_a_base_that_is_stored_in_few_bits_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(tied=False), model)
    config = json.loads((model / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    for lora in (LORA, QLORA):
        root = tmp_path / str(lora.quantize_base)
        status, events = run(root, job_spec(root, model, lora=lora))
        (failed,) = of_kind(events, Failed)
        assert (status, failed.reason) == (1, Reason.invalid_model)
        assert "quantized already" in failed.message


# --- training for few bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qat", [INT8, INT4], ids=lambda qat: qat.quantizer_name)
def test_qat_rounds_while_it_trains_and_writes_plain_weights(alone: Alone, qat: QatSpec) -> None:
    spec, events = alone("sft", qat=qat)
    _, without = alone("sft")
    assert losses(events) == pytest.approx(losses(without), abs=0.1)
    # Of a single step it may be next to nothing: it has both signs.
    by_rounding = [abs(one - other) for one, other in zip(losses(events), losses(without), strict=True)]
    assert by_rounding[0] > 1e-3
    assert statistics.median(by_rounding) > 1e-3
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["quantization"] == {"quantizer": qat.quantizer_name, "group_size": 32, "layers": 14}
    plain = load(spec.checkpoint_dir / "final")
    assert {type(module) for name, module in plain.named_modules() if name.endswith("_proj")} == {torch.nn.Linear}
    assert not torch.equal(logits(plain), logits(rounding(spec.checkpoint_dir / "final", qat)))


def test_what_qat_trained_for_is_what_torchao_makes_of_the_export(alone: Alone) -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup
    from transformers import TorchAoConfig

    spec, _ = alone("sft", qat=INT8)
    final = spec.checkpoint_dir / "final"
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantized = load(final, quantization_config=TorchAoConfig(config, modules_to_not_convert=["lm_head"]))
    assert torch.equal(logits(quantized), logits(rounding(final, INT8)))


def rounding(path: Path, qat: QatSpec) -> Any:
    model = load(path)
    attention, mlp = linear_modules(model)
    fake_quantize(model, [*attention, *mlp], qat)
    return model


def test_the_same_seed_gives_the_same_weights_under_qat(ranks: Ranks, alone: Alone, tmp_path: Path) -> None:
    first, _ = alone("sft", qat=INT8)
    again = spec_of(tmp_path, "sft", qat=INT8, save_steps=2)
    trained(ranks, tmp_path, again)
    assert digests(again) == digests(first)


def test_a_group_size_that_does_not_divide_a_layer_names_it_and_what_would(tmp_path: Path) -> None:
    qat = INT8.model_copy(update={"group_size": 48})
    status, events = run(tmp_path, job_spec(tmp_path, tiny_model(), qat=qat))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_request)
    assert "48 does not divide the 64 inputs of model.layers.0.self_attn.q_proj" in failed.message
    assert "divisors of 64" in failed.message


def test_qat_refuses_layers_that_torchao_would_leave_alone() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=32))
    attention, mlp = linear_modules(model)
    with pytest.raises(JobFailure, match="is a Conv1D") as raised:
        fake_quantize(model, [*attention, *mlp], INT8)
    assert raised.value.reason == Reason.invalid_request


# --- several ranks, resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "strategy", "changes", "exact"),
    [
        # FSDP2 in bf16 returns bf16 log-probabilities; packed bits converted with them would be noise.
        pytest.param("sft", "FULL_SHARD", {"lora": QLORA, "dtype": "bf16"}, 3e-3, id="qlora-bf16-sharded"),
        # A number that lies between two steps of 8 bits is rounded to either for a difference in its last digit.
        pytest.param("sft", "FULL_SHARD", {"qat": INT8}, 2e-3, id="qat-int8-sharded"),
        *in_full(
            pytest.param("dpo", "FULL_SHARD", {"lora": QLORA}, 1e-4, id="qlora-dpo-sharded"),
            pytest.param("sft", "NO_SHARD", {"lora": DORA}, 1e-4, id="dora-sft-ddp"),
            pytest.param("dpo", "NO_SHARD", {"lora": QLORA}, 1e-4, id="qlora-dpo-ddp"),
            pytest.param("sft", "FULL_SHARD", {"lora": QDORA}, 1e-4, id="qdora-sft-sharded"),
            pytest.param("sft", "NO_SHARD", {"qat": INT4}, 1e-4, id="qat-int4-ddp"),
            pytest.param("sft", "FULL_SHARD", {"lora": QLORA}, 1e-4, id="qlora-sft-sharded"),
            pytest.param("dpo", "FULL_SHARD", {"lora": DORA}, 1e-4, id="dora-dpo-sharded"),
        ),
    ],
)
def test_two_ranks_train_what_one_process_trains(
    ranks: Ranks, alone: Alone, tmp_path: Path, algorithm: str, strategy: str, changes: dict[str, Any], exact: float
) -> None:
    _, expected = alone(algorithm, **changes)
    checkpointing = {"gradient_checkpointing": True}  # changes no number, and must get along with all of it
    together = spec_of(tmp_path, algorithm, 2, strategy, **changes, **checkpointing)
    events = trained(ranks, tmp_path, together)
    assert losses(events) == pytest.approx(losses(expected), rel=exact)
    (one,), (two,) = of_kind(expected, Prepared), of_kind(events, Prepared)
    assert (two.trainable_parameters, two.total_parameters) == (one.trainable_parameters, one.total_parameters)
    assert two.effective.get("quantization") == one.effective.get("quantization")
    sharding = two.effective["sharding"]
    assert strategy == "NO_SHARD" or sharding["local_elements"] <= 0.6 * sharding["total_elements"]


@pytest.mark.parametrize(
    ("algorithm", "count", "changes"),
    [
        pytest.param("dpo", 2, {"lora": QLORA}, id="qlora-dpo-sharded"),
        pytest.param("sft", 1, {"qat": INT8}, id="qat"),
        *in_full(pytest.param("sft", 1, {"lora": QLORA}, id="qlora-sft")),
    ],
)
def test_a_checkpoint_continues_bit_for_bit(
    ranks: Ranks, alone: Alone, tmp_path: Path, algorithm: str, count: int, changes: dict[str, Any]
) -> None:
    if count == 1:
        spec, whole = alone(algorithm, **changes)
    else:
        spec = spec_of(tmp_path, algorithm, count, save_steps=2, **changes)
        whole = trained(ranks, tmp_path / "first", spec)
    before = digests(spec)
    resumed = trained(ranks, tmp_path / "second", spec, spec.checkpoint_dir / "checkpoint-4")
    assert losses(resumed) == losses(whole)[4:]
    assert digests(spec) == before


# --- the libraries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "changes"),
    [
        ("bitsandbytes", {"lora": QLORA}),
        ("torchao.quantization", {"qat": INT8}),
        ("torchao.float8", {"compile_blocks": "always", "float8": "always"}),
    ],
)
def test_a_missing_library_fails_the_job_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    status, events = run(tmp_path, job_spec(tmp_path, tiny_model(), **changes))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_request)
    assert "llama_stack_provider_trl[quantization]" in failed.message


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, []),
        ({"lora": QLORA}, ["bitsandbytes"]),
        ({"qat": INT8}, ["torchao"]),
        ({"float8": "always"}, ["torchao"]),
    ],
)
def test_a_job_that_does_not_quantize_does_not_wait_for_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], there: list[str]
) -> None:
    seen: list[str] = []
    libraries = ("bitsandbytes", "torchao")

    def observe(*args: Any) -> None:
        seen.extend(name for name in libraries if importlib.util.find_spec(name))
        # TRL's activation offloading looks for the key, whatever its value, and is slower with it.
        assert not [name for name in libraries if name in sys.modules]

    for name in libraries:
        monkeypatch.setitem(sys.modules, name, None)  # so that monkeypatch puts back what is there now
        del sys.modules[name]
    session = ModuleType("session")
    session.train_attempt = observe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_stack_provider_trl.recipes.session", session)
    monkeypatch.setattr("llama_stack_provider_trl.recipes.session", session)
    run(tmp_path, job_spec(tmp_path, tiny_model(), **changes))
    assert seen == there
