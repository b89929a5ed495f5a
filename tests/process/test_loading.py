"""A rank of a sharded job never holds a copy of the whole model, and trains the numbers that it trained with one."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import build
from llama_stack_provider_trl.recipes.model import deferred, files, loading, merging, quantization
from llama_stack_provider_trl.recipes.model.deferred import DeferredWeights
from llama_stack_provider_trl.recipes.model.files import stored_dtype
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, load_config, loading_dtype
from llama_stack_provider_trl.recipes.model.packing_check import check_isolation
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from tests.loading_peak import loading_peaks
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import save_llama, tiny_model, tiny_tokenizer
from tests.training import LORA, job_spec, of_kind, reference_to

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
QLORA = LORA.model_copy(update={"quantize_base": True})
DORA = LORA.model_copy(update={"use_dora": True})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in files of either dtype."""
    root = tmp_path_factory.mktemp("models")
    return {dtype: stored(root / dtype, [torch.bfloat16, getattr(torch, dtype)]) for dtype in ("bfloat16", "float32")}


def stored(path: Path, dtypes: list[torch.dtype]) -> Path:
    """The tiny model, its weights cast to each dtype in turn."""
    shutil.copytree(tiny_model(tied=False), path)
    model = AutoModelForCausalLM.from_pretrained(path)
    for dtype in dtypes:
        model = model.to(dtype)
    model.config.dtype = dtypes[-1]
    model.save_pretrained(path)
    return path


def sharded(root: Path, model: Path, algorithm: str = "sft", **changes: Any) -> JobSpec:
    more = {"optimizer": OptimizerSpec(learning_rate=5e-3), "sharding": ShardingSpec(), **changes}
    return job_spec(root, model, algorithm, ranks=2, batch_size=2, max_steps_per_epoch=2, **more)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_ranks_of_a_job_load_little_more_than_their_shards(tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16}
    save_llama(model, tiny_tokenizer(), vocab_size=8192, tie_word_embeddings=False, **sizes)
    weights = {name: weight.bfloat16() for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    jobs = []
    for name, lora in (("full", None), ("qlora", QLORA)):
        path = tmp_path / f"{name}.json"
        path.write_text(sharded(tmp_path, model, lora=lora, preflight="off").model_dump_json())
        jobs += [str(path), f"whole:{path}"]
    deferred, whole, quantized, whole_quantized = loading_peaks(jobs)
    in_fp32 = 2 * (model / "model.safetensors").stat().st_size
    assert in_fp32 > 150e6
    assert whole["private"] > 2 * in_fp32
    assert deferred["private"] < 1.25 * in_fp32  # the shards, which together are one model
    assert deferred["private"] <= 0.6 * whole["private"]
    assert quantized["private"] <= 0.6 * whole_quantized["private"]


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        pytest.param("dpo", {"dtype": "bf16"}, id="reference"),
        pytest.param("sft", {"lora": LORA, "dtype": "bf16"}, id="lora-bf16"),
        *in_full(pytest.param("sft", {"lora": LORA}, id="lora-fp32")),
    ],
)
def test_the_dtype_of_the_files_changes_no_bit(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, algorithm: str, changes: dict[str, Any]
) -> None:
    """One of the two is stored as it is trained: its weights are never cast."""
    found = []
    for dtype, model in models.items():
        spec = sharded(tmp_path / dtype, model, algorithm, **changes)
        codes, events = ranks.run(tmp_path / dtype / "run", spec)
        assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
        losses = [point.metrics["loss"] for point in of_kind(events, Progress) if "loss" in point.metrics]
        found.append((losses, load_file(next((spec.checkpoint_dir / "final").glob("*model.safetensors")))))
    (losses, weights), (other_losses, other_weights) = found
    assert losses == other_losses
    assert len(losses) == 2
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def mixed(model: Path, path: Path) -> Path:
    """The same numbers in files of two dtypes, which are cast while they are loaded."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    save_file({**weights, name: weights[name].float()}, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_base_that_is_quantized_when_it_is_sharded_changes_no_bit(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    """Files of two dtypes are quantized while they are loaded, as all were once; so is the reference of DPO."""
    pytest.importorskip("bitsandbytes")
    found = []
    for model in (models["bfloat16"], mixed(models["bfloat16"], tmp_path / "mixed")):
        root, dpo = tmp_path / f"of-{model.name}", DpoSpec(reference=reference_to(str(model)))
        spec = sharded(root, model, "dpo", lora=QLORA, method=dpo)
        codes, events = ranks.run(root / "run", spec)
        assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
        losses = [point.metrics["loss"] for point in of_kind(events, Progress) if "loss" in point.metrics]
        (prepared,) = of_kind(events, Prepared)
        adapter = load_file(spec.checkpoint_dir / "final" / "adapter_model.safetensors")
        found.append((losses, prepared.effective["quantization"], adapter))
    (losses, quantized, adapter), (other_losses, quantized_while_loading, other_adapter) = found
    assert losses == other_losses
    assert len(losses) == 2
    assert quantized == quantized_while_loading
    assert adapter.keys() == other_adapter.keys()
    assert all(torch.equal(adapter[name], other_adapter[name]) for name in adapter)


@pytest.mark.parametrize(
    ("files", "dtype"),
    [("float32", "bf16"), ("bfloat16", "fp32"), *in_full(("float32", "fp32"), ("bfloat16", "bf16"))],
)
def test_units_are_quantized_one_after_the_other_to_the_numbers_of_transformers(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, dtype: str
) -> None:
    pytest.importorskip("bitsandbytes")
    cpu, spec = torch.device("cpu"), sharded(tmp_path, models[files], lora=QLORA, dtype=dtype)
    storage = WeightStorage.of(spec)
    theirs = loading.load_model(spec.source, replace(storage, is_deferred=False), cpu)
    ours = loading.load_model(spec.source, storage, cpu)
    of_4_bits = {id(weight) for weight in ours.parameters() if quantization.is_packed(weight)}
    assert all(weight.untyped_storage().nbytes() == 2 for weight in ours.parameters() if id(weight) in of_4_bits)
    monkeypatch.setattr(deferred, "fully_shard", lambda unit, **_: unit)
    weights, waiting = DeferredWeights(ours, storage.dtype, cpu), []
    assert ours.get_memory_footprint() == theirs.get_memory_footprint()
    for unit in [*ours.model.layers, ours]:
        waiting.append(sum(quantization.is_in_files(weight) for weight in ours.parameters()))
        weights.fully_shard(unit)
    assert waiting == [14, 7, 0]
    packed = {name: value for name, value in theirs.state_dict().items() if "_proj." in name}
    found = ours.state_dict()
    assert len(packed) == len(of_4_bits) * 6  # the weight, and what its constants consist of
    # As bytes: packed numbers, seen as bf16, may be NaN.
    assert all(torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) for name, value in packed.items())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in files of bf16."""
    path, tokenizer = tmp_path_factory.mktemp("mixture") / "model", tiny_tokenizer()
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_experts_are_merged_one_block_after_the_other_as_transformers_does(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, spec = torch.device("cpu"), sharded(tmp_path, mixture)
    storage = WeightStorage.of(spec)
    theirs = loading.load_model(spec.source, replace(storage, is_deferred=False), cpu)
    ours = loading.load_model(spec.source, storage, cpu)
    merged = [weight for weight in ours.parameters() if merging.is_merged_later(weight)]
    assert len(merged) == 4  # gate and up as one, and down, of two blocks
    assert all(weight.untyped_storage().nbytes() == 2 for weight in merged)
    assert deferred.has_placeholders(ours)
    monkeypatch.setattr(deferred, "fully_shard", lambda unit, **_: unit)
    weights, of_blocks = DeferredWeights(ours, storage.dtype, cpu), []
    for unit in [*ours.model.layers, ours]:
        of_blocks.append(sum(weight.isnan().any().item() for weight in ours.parameters() if weight.dim() == 3))
        weights.fully_shard(unit)
    assert of_blocks == [4, 2, 0]
    assert not deferred.has_placeholders(ours)
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(weight.float(), expected[name]) for name, weight in ours.named_parameters())


def test_experts_that_are_merged_when_they_are_sharded_change_no_bit(
    ranks: Ranks, mixture: Path, tmp_path: Path
) -> None:
    found = []
    for model in (mixture, mixed(mixture, tmp_path / "mixed")):
        root = tmp_path / f"of-{model.name}"
        spec = sharded(root, model, preflight="off")
        codes, events = ranks.run(root / "run", spec)
        assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
        losses = [point.metrics["loss"] for point in of_kind(events, Progress) if "loss" in point.metrics]
        found.append((losses, load_file(spec.checkpoint_dir / "final" / "model.safetensors")))
    (losses, weights), (other_losses, other_weights) = found
    assert losses == other_losses
    assert len(losses) == 2
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_only_what_is_merged_and_not_quantized_waits() -> None:
    def found(operation: ConversionOps, quantization: Any = None) -> Any:
        converter = WeightConverter(["up", "gate"], ["both"], operations=[operation])
        converter.collected_tensors = {"up": [torch.ones(2, 2)], "gate": [torch.zeros(2, 2)]}
        converter.quantization_operation = quantization
        with merging.merged_later():
            return converter.convert("layer.both", model=None, config=None, hf_quantizer=quantization)["layer.both"]

    waiting = found(Concatenate(dim=0))
    assert merging.is_merged_later(waiting)
    assert waiting.isnan().all()
    merge = merging.take_merge(waiting)
    assert merge is not None
    assert torch.equal(merge(torch.device("cpu")), torch.tensor([[1.0, 1], [1, 1], [0, 0], [0, 0]]))
    assert not merging.is_merged_later(waiting)

    class Other(Concatenate):
        """An operation that is not known to merge only."""

    class Quantize(ConversionOps):
        def convert(self, input_dict: Any, **_: Any) -> Any:
            return {name: value.to(torch.int8) for name, value in input_dict.items()}

    assert torch.equal(found(Other(dim=0)), merge(torch.device("cpu")))
    assert found(Concatenate(dim=0), Quantize()).dtype == torch.int8


def test_weights_that_transformers_makes_of_several_are_quantized_while_they_are_loaded() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_storage=torch.bfloat16)
    layer.source_cls = Linear
    model = torch.nn.ModuleDict({"layer": layer})
    model.get_parameter_or_buffer = model.get_parameter
    tensors = {"layer.weight": torch.ones(64, 64)}
    with quantization.in_files():
        convert = Bnb4bitQuantize(None).convert
        merged = convert(tensors, full_layer_name="layer.weight", model=model, target_patterns=["layer"])
        renamed = convert(tensors, full_layer_name="layer.weight", model=model, target_patterns=["layer.weight"])
    assert not quantization.is_in_files(merged["layer.weight"])
    assert merged["layer.weight"].quant_state is not None
    assert quantization.is_in_files(renamed["layer.weight"])
    assert renamed["layer.weight"].shape == merged["layer.weight"].shape == (1024, 1)


@pytest.mark.parametrize("name", ["llama in 4 bits", "mixture of experts"])
def test_the_isolation_of_a_model_with_weights_in_its_files_is_checked_on_two_blocks(
    models: dict[str, Path], mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("bitsandbytes")
    checked: list[Any] = []
    monkeypatch.setattr(build, "check_isolation", lambda model, sequences: checked.append((model, sequences)))
    model, lora = (models["bfloat16"], QLORA) if "4 bits" in name else (mixture, None)
    spec = sharded(tmp_path, model, lora=lora, packed=True, padding_free=False)
    policy = build.load_policy(spec, torch.device("cpu"))
    ((shallow, sequences),) = checked
    assert shallow is not policy.model
    assert sequences == 2
    check_isolation(shallow)


def dtype_of(spec: JobSpec) -> torch.dtype:
    stored = stored_dtype(spec.source.model, None, fetch=True)
    return loading_dtype(spec.source, WeightStorage.of(spec), load_config(spec.source), stored)


def test_a_model_that_is_sharded_is_loaded_in_the_dtype_of_its_files(models: dict[str, Path], tmp_path: Path) -> None:
    assert dtype_of(sharded(tmp_path, models["bfloat16"])) == torch.bfloat16
    assert dtype_of(sharded(tmp_path, models["float32"], lora=LORA, dtype="bf16")) == torch.float32
    # Adapters whose start depends on the weights, and models that are not sharded.
    assert dtype_of(sharded(tmp_path, models["bfloat16"], lora=DORA)) == torch.float32
    assert dtype_of(sharded(tmp_path, models["bfloat16"], sharding=ShardingSpec(strategy="NO_SHARD"))) == torch.float32
    assert dtype_of(job_spec(tmp_path, models["bfloat16"])) == torch.float32


def test_files_that_do_not_hold_one_dtype_are_cast_while_they_are_loaded(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model = mixed(models["bfloat16"], tmp_path / "mixed")
    assert stored_dtype(str(model), None, torch.bfloat16) is None
    assert dtype_of(sharded(tmp_path, model)) == torch.float32
    qlora = sharded(tmp_path, model, lora=QLORA)
    base = loading.load_model(qlora.source, WeightStorage.of(qlora), torch.device("cpu"))
    assert sum(quantization.is_packed(weight) for weight in base.parameters()) == 14
    assert not any(quantization.is_in_files(weight) for weight in base.parameters())
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert stored_dtype(str(model), None, torch.bfloat16) is None
    (model / "pytorch_model.bin").unlink()
    assert stored_dtype(str(model), None, torch.bfloat16) == torch.bfloat16  # not here yet: what the estimate expects


def test_files_that_are_not_here_yet_are_fetched_before_their_dtype_decides(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration names bf16, the files hold fp32: weights loaded in bf16 would be rounded."""
    cache = shutil.copytree(models["float32"], tmp_path / "cache")
    (cache / "config.json").write_text((cache / "config.json").read_text().replace('"float32"', '"bfloat16"'))
    hidden = cache / "model.safetensors"
    fetched: list[str] = []

    def cached_file(model: str, name: str, *, local_files_only: bool = False, **_: Any) -> str | None:
        if name == hidden.name:
            if local_files_only:
                return None
            fetched.append(name)
        return str(cache / name) if (cache / name).exists() else None

    monkeypatch.setattr(files, "cached_file", cached_file)
    assert dtype_of(sharded(tmp_path, cache, lora=LORA, dtype="bf16")) == torch.float32
    assert fetched
    assert stored_dtype(str(cache), None, torch.bfloat16) == torch.bfloat16


def test_a_model_that_keeps_weights_in_fp32_is_cast_while_it_is_loaded(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", {"norm"})
    assert dtype_of(sharded(tmp_path, models["bfloat16"])) == torch.float32


def small() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=16, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


def test_deferred_weights_take_no_memory_and_cannot_be_mistaken_for_weights() -> None:
    model = small()
    packed = torch.nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    model.model.register_parameter("packed", packed)
    DeferredWeights(model, torch.float32, torch.device("cpu"))
    weights = dict(model.named_parameters())
    assert weights.pop("model.packed").sum() == 2
    assert {weight.dtype for weight in weights.values()} == {model.dtype} == {model.config.dtype} == {torch.float32}
    assert all(weight.untyped_storage().nbytes() == 4 for weight in weights.values())
    assert len({weight.data_ptr() for weight in weights.values()}) == len(weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[1, 2]])).logits.isnan().all()


def test_a_model_that_was_not_sharded_is_not_trained_on_placeholders() -> None:
    weights = DeferredWeights(small(), torch.float32, torch.device("cpu"))
    with pytest.raises(AssertionError, match="its weights are placeholders"), weights.returned_to_accelerate():
        pass


def test_a_base_in_4_bits_that_is_sharded_is_loaded_into_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []

    def load(*_: Any, device_map: dict[str, Any], **__: Any) -> Any:
        placed.append(device_map)
        raise OSError("far enough")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    gpu = torch.device("cuda", 1)
    for spec in (sharded(tmp_path, tiny_model(), lora=QLORA), job_spec(tmp_path, tiny_model(), lora=QLORA)):
        with pytest.raises(loading.JobFailure, match="far enough"):
            loading.load_model(spec.source, WeightStorage.of(spec), gpu)
    assert placed == [{"": "cpu"}, {"": gpu}]


def test_quantization_constants_follow_the_shards_to_their_device() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True)
    model = torch.nn.ModuleList([layer.to("cpu"), Linear(2, 2)])
    # FSDP2 replaces the weight by a plain one: the module alone knows the constants.
    layer.weight = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    quantization.move_constants(model, torch.device("meta"))
    constants = layer.quant_state
    found = (constants.absmax, constants.code, constants.offset, constants.state2.absmax, constants.state2.code)
    assert {tensor.device.type for tensor in found} == {"meta"}


def test_a_base_in_4_bits_is_quantized_on_the_device_that_it_is_used_on(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    packed: list[tuple[torch.dtype, torch.device]] = []
    monkeypatch.setattr(deferred, "pack", lambda _, dtype, device: packed.append((dtype, device)))
    monkeypatch.setattr(deferred, "fully_shard", lambda unit, **_: unit)
    gpu = torch.device("cuda", 1)
    policy = build.load_policy(sharded(tmp_path, models["float32"], lora=QLORA, dtype="bf16"), gpu)
    assert policy.deferred is not None
    policy.deferred.fully_shard(policy.model)
    assert packed == [(torch.bfloat16, gpu)] * 14


def test_a_reward_model_is_no_causal_language_model_although_no_weight_is_missing(tmp_path: Path) -> None:
    trained = AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)
    trained.save_pretrained(tmp_path)
    storage = WeightStorage(
        dtype=torch.float32, compute_dtype="fp32", in_4_bits=False, is_quantized=False, is_sharded=False
    )
    with pytest.raises(JobFailure, match="is a LlamaForSequenceClassification, such as a reward model"):
        loading.load_model(ModelSource(model=str(tmp_path)), storage, torch.device("cpu"))
