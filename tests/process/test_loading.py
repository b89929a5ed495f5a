"""A rank of a sharded job never holds a copy of the whole model, and trains the numbers that it trained with one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llama_stack_provider_trl.recipes.model import files, loading, quantization
from llama_stack_provider_trl.recipes.model.deferred import DeferredWeights
from llama_stack_provider_trl.recipes.model.files import stored_dtype
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, load_config, loading_dtype
from llama_stack_provider_trl.specs.events import Failed, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.loading_peak import loading_peaks
from tests.ranks import Ranks, forked_ranks
from tests.tiny import save_llama, tiny_model, tiny_tokenizer
from tests.training import LORA, job_spec, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
QLORA = LORA.model_copy(update={"quantize_base": True})
DORA = LORA.model_copy(update={"use_dora": True})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with forked_ranks() as ranks:
        yield ranks


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
    path = tmp_path / "spec.json"
    path.write_text(sharded(tmp_path, model, preflight="off").model_dump_json())
    deferred, whole = loading_peaks([str(path), f"whole:{path}"])
    in_fp32 = 2 * (model / "model.safetensors").stat().st_size
    assert in_fp32 > 150e6
    assert whole["private"] > 2 * in_fp32
    assert deferred["private"] < 1.25 * in_fp32  # the shards, which together are one model
    assert deferred["private"] <= 0.6 * whole["private"]


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        pytest.param("dpo", {"dtype": "bf16"}, id="reference"),
        pytest.param("sft", {"lora": LORA, "dtype": "bf16"}, id="lora-bf16"),
        pytest.param("sft", {"lora": LORA}, id="lora-fp32"),
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


def dtype_of(spec: JobSpec) -> torch.dtype:
    stored = stored_dtype(spec.model, None, fetch=True)
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
    model = shutil.copytree(models["bfloat16"], tmp_path / "mixed")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    save_file({**weights, name: weights[name].float()}, model / "model.safetensors", {"format": "pt"})
    assert stored_dtype(str(model), None, torch.bfloat16) is None
    assert dtype_of(sharded(tmp_path, model)) == torch.float32
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
    DeferredWeights(model, torch.float32)
    weights = dict(model.named_parameters())
    assert weights.pop("model.packed").sum() == 2
    assert {weight.dtype for weight in weights.values()} == {model.dtype} == {model.config.dtype} == {torch.float32}
    assert all(weight.untyped_storage().nbytes() == 4 for weight in weights.values())
    assert len({weight.data_ptr() for weight in weights.values()}) == len(weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[1, 2]])).logits.isnan().all()


def test_a_model_that_was_not_sharded_is_not_trained_on_placeholders() -> None:
    deferred = DeferredWeights(small(), torch.float32)
    with pytest.raises(AssertionError, match="its weights are placeholders"), deferred.returned_to_accelerate():
        pass


def test_a_base_in_4_bits_that_is_sharded_is_quantized_in_cpu_memory(
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
