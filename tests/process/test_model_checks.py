"""Files of models that are damaged, or do not fit their configuration: a sentence before a row is read."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, ShiraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, core_model_loading
from transformers.core_model_loading import WeightConverter

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import build_trainer
from llama_stack_provider_trl.recipes.checkpoint.merge import merge
from llama_stack_provider_trl.recipes.model import shapes
from llama_stack_provider_trl.recipes.model.adapters import check_adapter, load_to_infer
from llama_stack_provider_trl.recipes.model.checked import check_models
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, check_weights, load_model, load_tokenizer
from llama_stack_provider_trl.specs.adapters import LoraSpec
from llama_stack_provider_trl.specs.events import Failed, Reason
from llama_stack_provider_trl.specs.job import DpoSpec
from llama_stack_provider_trl.specs.merge import MergeSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec, ModelSource
from llama_stack_provider_trl.specs.preflight import PreflightSpec
from llama_stack_provider_trl.system.model_damage import DISPENSABLE_FILES
from tests.process.architectures import ARCHITECTURES
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import LORA, SFT_ROWS, job_spec, of_kind, reference_to, run

pytestmark = pytest.mark.process
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 16060617592\n"
PAGE = "<!doctype html><html><title>403 Forbidden</title></html>"
STORAGE = WeightStorage(torch.float32, "fp32", False, False, False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(tied=False), tmp_path / "model"))


def source_of(model: Path) -> ModelSource:
    return ModelSource(model=str(model))


def configured(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return model


def in_shards(model: Path) -> list[str]:
    """Save the weights again, in several files; returns their names."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(model, max_shard_size="200KB")
    (model / "model.safetensors").unlink()
    return sorted(path.name for path in model.glob("*.safetensors"))


def refusal(call: Callable[[], object], model: Path) -> str:
    with pytest.raises(JobFailure) as caught:
        call()
    assert caught.value.reason == Reason.invalid_model
    assert str(model) in caught.value.message
    return str(caught.value.message)


def _no_rows(*_: Any, **__: Any) -> None:
    pytest.fail("rows were read")


def load(model: Path) -> object:
    return load_model(source_of(model), STORAGE, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (
            {"vocab_size": 1030},
            (
                "is [1024, 64] in model.safetensors, and [1030, 64] by config.json (1 more differ)",
                "config.json has vocab_size 1030, the file has 1024 embeddings: write vocab_size 1024 into config.json",
            ),
        ),
        ({"vocab_size": 1000, "tie_word_embeddings": True}, ("write vocab_size 1024 into config.json",)),
        (
            {"intermediate_size": 96},
            ("mlp.down_proj.weight is [64, 128]", "[64, 96] by", "another model: use the one that"),
        ),
        ({"hidden_size": 32}, ("is [1024, 64] in", "[1024, 32] by", "describes another model")),
        ({"num_key_value_heads": 4}, ("k_proj.weight is [32, 64]", "[64, 64]", "config.json describes another model")),
    ],
)
def test_a_weight_of_another_shape_than_by_its_configuration_is_named_with_both(
    model: Path, changes: dict[str, Any], sentences: tuple[str, ...]
) -> None:
    configured(model, **changes)
    for call in (lambda: check_weights(source_of(model)), lambda: load(model)):
        message = refusal(call, model)
        assert all(sentence in message for sentence in sentences), message


@pytest.mark.parametrize("is_preflight", [False, True])
def test_a_job_and_its_preflight_end_with_it_before_a_row_is_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, is_preflight: bool
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.recipes.data.mixed.Preparation", _no_rows)
    configured(model, vocab_size=1100)
    more: dict[str, Any] = {"preflight": PreflightSpec(device="cpu")} if is_preflight else {}
    status, events = run(tmp_path / "run", job_spec(tmp_path, model), **more)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_model)
    assert "write vocab_size 1024 into config.json" in failed.message


@pytest.mark.parametrize("architecture", sorted({"gpt2", "qwen3_moe", "mamba", *in_full(*ARCHITECTURES)}))
def test_what_save_pretrained_writes_fits_in_every_architecture_and_a_wrong_vocabulary_does_not(
    tmp_path: Path, architecture: str
) -> None:
    sizes = ARCHITECTURES.get(architecture) or {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    bare = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    bare.save_pretrained(tmp_path, max_shard_size="50KB")
    check_weights(source_of(tmp_path), warn=pytest.fail)
    configured(tmp_path, vocab_size=sizes["vocab_size"] + 6)
    message = refusal(lambda: check_weights(source_of(tmp_path)), tmp_path)
    assert f"write vocab_size {sizes['vocab_size']} into config.json" in message


def test_names_without_the_models_prefix_and_further_weights_are_no_fault(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    bare = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file({**bare, "rotary.inv_freq": torch.ones(3)}, model / "model.safetensors", {"format": "pt"})
    check_weights(source_of(model))
    load(model)
    configured(model, intermediate_size=96)
    assert "layers.0.mlp.down_proj.weight is [64, 128]" in refusal(lambda: check_weights(source_of(model)), model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(("text", "found"), [(POINTER, "Git LFS pointer"), (PAGE, "web page"), ("", "is empty")])
def test_a_file_of_the_tokenizer_that_is_another_one_is_named(model: Path, name: str, text: str, found: str) -> None:
    (model / name).write_text(text)
    if name in DISPENSABLE_FILES and not text:
        load_tokenizer(source_of(model))
        return
    message = refusal(lambda: load_tokenizer(source_of(model)), model)
    assert name in message
    assert found in message


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_a_file_of_added_tokens_that_transformers_does_not_read_may_be_another_one(model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    assert f"{name} is a Git LFS pointer" in refusal(lambda: load_tokenizer(source_of(model)), model)
    path = model / "tokenizer_config.json"
    added = {"0": {"content": load_tokenizer(source_of(tiny_model())).convert_ids_to_tokens(0), "special": True}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": added}))
    load_tokenizer(source_of(model))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize(("text", "found"), [(POINTER, "git lfs pull"), (PAGE, "web page"), ("", "is empty")])
def test_a_file_of_the_model_that_is_another_one_is_named(model: Path, name: str, text: str, found: str) -> None:
    (model / name).write_text(text)
    if name in DISPENSABLE_FILES and not text:
        load(model)
        return
    for call in (lambda: check_weights(source_of(model)), lambda: load(model)):
        message = refusal(call, model)
        assert name in message
        assert found in message


def test_of_weights_in_several_files_the_damaged_and_the_missing_one_are_named(model: Path) -> None:
    first, second, *_ = in_shards(model)
    check_weights(source_of(model))
    content = (model / first).read_bytes()
    for damaged, found in ((content[:-9], "is cut off, it has"), (POINTER.encode(), "LFS"), (b"Not Found", "begins")):
        (model / first).write_bytes(damaged)
        message = refusal(lambda: check_weights(source_of(model)), model)
        assert first in message
        assert found in message
    (model / first).write_bytes(content)
    (model / second).unlink()
    message = refusal(lambda: load(model), model)
    assert f"{second} is missing, which model.safetensors.index.json names" in message


def test_pickled_weights_are_checked_where_they_are_read(model: Path) -> None:
    (model / "pytorch_model.bin").write_text(POINTER)
    check_weights(source_of(model))  # beside safetensors it is not read
    (model / "model.safetensors").unlink()
    assert "pytorch_model.bin is a Git LFS pointer" in refusal(lambda: check_weights(source_of(model)), model)
    (model / "pytorch_model.bin").unlink()
    message = refusal(lambda: check_weights(source_of(model)), model)
    assert "it has no file of weights, expected one of model.safetensors, model.safetensors.index.json" in message


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("other.safetensors", "other.safetensors is missing, which config.json names"),
        ("other.bin", "config.json has transformers_weights 'other.bin', expected a safetensors file or its index"),
        (5, "config.json has transformers_weights '5', expected a safetensors file or its index"),
    ],
)
def test_weights_that_the_configuration_names_are_what_is_checked(model: Path, named: Any, sentence: str) -> None:
    configured(model, transformers_weights=named)
    assert sentence in refusal(lambda: check_weights(source_of(model)), model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    configured(model, transformers_weights="other.safetensors")
    check_weights(source_of(model))
    configured(model, vocab_size=1030)
    assert "in other.safetensors, and [1030, 64] by" in refusal(lambda: check_weights(source_of(model)), model)


def test_an_adapter_beside_a_model_is_not_loaded_into_it(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    message = refusal(lambda: check_weights(source_of(model)), model)
    assert "adapter_config.json lies beside its config.json, so that transformers would load the adapter" in message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float99"}, "its config.json cannot be read: module 'torch' has no attribute 'float99'"),
        ({"tie_word_embeddings": "no"}, "its config.json cannot be read: Validation error for field 'tie_word_emb"),
        ({"hidden_act": "nonesuch"}, "it cannot be loaded as a causal language model: KeyError 'nonesuch'"),
        ({"vocab_size": 0}, "it cannot be loaded as a causal language model: index 0 is out of bounds"),
        ({"pad_token_id": -9999}, "config.json has pad_token_id -9999, and the model has 1024 embeddings. Set it to"),
        ({"model_type": "gpt2"}, "parameters of GPT2LMHeadModel, such as transformer.h.0.attn.c_attn.bias"),
        ({"architectures": [5, "LlamaForCausalLM"]}, ""),
    ],
    ids=lambda changes: next(iter(changes), "") if isinstance(changes, dict) else "",
)
def test_a_configuration_of_which_no_model_is_built_is_named_as_the_cause(
    model: Path, changes: dict[str, Any], sentence: str
) -> None:
    configured(model, **changes)

    def check() -> None:
        load_tokenizer(source_of(model))
        check_weights(source_of(model))

    if sentence:
        assert sentence in refusal(check, model)
    else:
        check()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("ViT", "it cannot be loaded as a causal language model"),
        ("Bert", "It is no causal language model, or a file is missing"),
    ],
)
def test_a_model_that_writes_no_text_is_named_as_the_cause(model: Path, kind: str, sentence: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"ViT": {"image_size": 32, "patch_size": 16}, "Bert": {"vocab_size": 1024}}[kind]
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(model)
    assert sentence in refusal(lambda: check_weights(source_of(model)), model)


def test_a_tokenizer_that_cannot_tokenize_is_the_fault_of_the_model(tmp_path: Path, model: Path) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "BertTokenizer"}))
    with pytest.raises(JobFailure, match=r"the tokenizer of .* cannot tokenize a text: WordPiece error") as caught:
        build_trainer(job_spec(tmp_path, model, rows=SFT_ROWS[:2]), torch.device("cpu"))
    assert caught.value.reason == Reason.invalid_model


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "of torch before 1.6"])
def test_pickled_weights_are_compared_with_the_configuration_without_their_values(
    model: Path, is_archive: bool
) -> None:
    pickled, check = model / "pytorch_model.bin", lambda: check_weights(source_of(model))
    torch.save(load_file(model / "model.safetensors"), pickled, _use_new_zipfile_serialization=is_archive)
    (model / "model.safetensors").unlink()
    check()
    load(model)
    configured(model, vocab_size=1030)
    assert "is [1024, 64] in pytorch_model.bin, and [1030, 64] by config.json" in refusal(check, model)
    configured(model, vocab_size=1024)
    content = pickled.read_bytes()
    pickled.write_bytes(content[: len(content) // 2])
    message = refusal(check, model)
    assert "pytorch_model.bin" in message
    assert "download it again" in message or "its weights in pytorch_model.bin cannot be read" in message


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "of torch before 1.6"])
def test_pickled_weights_that_are_tied_or_views_of_one_another_are_whole(tmp_path: Path, is_archive: bool) -> None:
    model, adapter = Path(shutil.copytree(tiny_model(tied=True), tmp_path / "model")), tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model)
    weights, layer = base.state_dict(), "model.layers.0.self_attn"
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    joined = torch.cat([weights[f"{layer}.{name}_proj.weight"] for name in "kv"])
    weights[f"{layer}.k_proj.weight"], weights[f"{layer}.v_proj.weight"] = joined.chunk(2)
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    check_weights(source_of(model))
    load(model)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    config.ensure_weight_tying = True
    adapted = get_peft_model(base, config)
    adapted.save_pretrained(adapter)
    saved = get_peft_model_state_dict(adapted)
    assert len({weight.data_ptr() for weight in saved.values()}) < len(saved)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(saved, adapter / "adapter_model.bin", _use_new_zipfile_serialization=is_archive)
    check_adapter(adapter, source_of(model))


def test_an_index_beside_the_only_file_of_weights_is_not_read(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{")
    warnings: list[str] = []
    check_weights(source_of(model), warn=warnings.append)
    load(model)
    (warning,) = warnings
    assert warning.startswith("model.safetensors.index.json of")
    assert "is not read: model.safetensors has the weights" in warning


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2_moe", *in_full("llama", "mamba")])
def test_layers_that_the_files_lack_are_refused_and_those_that_the_configuration_lacks_are_warned_of(
    tmp_path: Path, architecture: str
) -> None:
    sizes = {**(ARCHITECTURES.get(architecture) or ARCHITECTURES["qwen2"]), "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).save_pretrained(tmp_path)
    count = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    warnings: list[str] = []
    check_weights(source_of(configured(tmp_path, **{count: 2})), warn=warnings.append)
    assert not warnings
    plain = {} if architecture == "mamba" else {"layer_types": None}
    configured(tmp_path, **{count: 4}, **plain)
    message = refusal(lambda: check_weights(source_of(tmp_path)), tmp_path)
    assert "config.json describes 4 layers, and its files have 2: use the config.json that was saved" in message
    configured(tmp_path, **{count: 1}, **plain)
    check_weights(source_of(tmp_path), warn=warnings.append)
    (warning,) = warnings
    assert "have weights of 2 layers, and its config.json describes 1: the others are neither trained" in warning


@pytest.mark.parametrize(
    ("saved_as", "named", "count", "example"),
    [
        ("qwen2", "llama", 6, "model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "llama", 4, "model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_weights_that_the_configuration_of_another_kind_of_model_leaves_out_are_warned_of(
    tmp_path: Path, saved_as: str, named: str, count: int, example: str
) -> None:
    sizes = {**ARCHITECTURES[saved_as], "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(saved_as, **sizes)).save_pretrained(tmp_path)
    check_weights(source_of(tmp_path), warn=pytest.fail)
    AutoConfig.for_model(named, **sizes).save_pretrained(tmp_path)
    warnings: list[str] = []
    check_weights(source_of(tmp_path), warn=warnings.append)
    (warning,) = warnings
    assert f"have {count} weights that its config.json leaves out, such as {example}" in warning


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("generation_config.json", {"eos_token_id": [2, 99999]}, "has eos_token_id 99999, and its vocabulary has 1024"),
        (
            "config.json",
            {"architectures": ["LlamaForCausalLMM"]},
            "LlamaForCausalLMM, which transformers lacks",
        ),
    ],
)
def test_ends_and_architectures_that_there_are_not_are_warned_of(
    model: Path, name: str, change: dict[str, Any], sentence: str
) -> None:
    check_weights(source_of(model), warn=pytest.fail)
    (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **change}))
    warnings: list[str] = []
    check_weights(source_of(model), warn=warnings.append)
    (warning,) = warnings
    assert sentence in warning


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale", "self_attn.v_proj.v_scale")),
        ("gpt2", ("attn.bias", "attn.masked_bias")),
        ("gpt_neox", ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")),
    ],
)
def test_constants_and_other_heads_that_files_have_beside_weights_are_not_warned_of(
    tmp_path: Path, architecture: str, names: tuple[str, ...]
) -> None:
    sizes = ARCHITECTURES.get(architecture) or ARCHITECTURES["qwen3"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    model.save_pretrained(tmp_path)
    block = next(name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules)
    further = [
        *(f"{block}.{name}" for name in names),
        "classifier.weight",
        "v_head.summary.bias",
        "vision.layers.0.weight",
    ]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    replaced(tmp_path, {**weights, **{name: torch.ones(2) for name in further}})
    check_weights(source_of(tmp_path), warn=pytest.fail)
    check_weights(source_of(tmp_path), is_reward=True, warn=pytest.fail)


def test_weights_that_are_missing_are_refused_but_those_that_are_tied_or_the_new_head_of_a_reward_model(
    tmp_path: Path, model: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    save_file({name: w for name, w in weights.items() if name != "lm_head.weight"}, model / "model.safetensors")
    message = refusal(lambda: check_weights(source_of(model)), model)
    assert "has no weights for 1 parameters of LlamaForCausalLM, such as lm_head.weight" in message
    check_weights(source_of(model), is_reward=True)
    message = refusal(lambda: check_weights(source_of(model), is_reward=True, has_head=True), model)
    assert "1 parameters of LlamaForSequenceClassification, such as score.weight" in message
    assert "It is no reward model" in message
    check_weights(source_of(configured(model, tie_word_embeddings=True)))


def test_a_classifier_of_two_labels_is_refused_as_a_reward_model_by_its_head(tmp_path: Path, model: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).save_pretrained(model)
    message = refusal(lambda: check_weights(source_of(model), is_reward=True), model)
    assert "score.weight is [2, 64] in model.safetensors, and [1, 64] in a reward model: it gives 2 values" in message
    assert "config.json describes" not in message
    assert "is a LlamaForSequenceClassification, such as a reward model" in refusal(
        lambda: check_weights(source_of(model)), model
    )


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 4}, "is quantized, by quantization_config (gptq) in its config.json"),
        ({"quant_method": "awq"}, "is quantized, by quantization_config (awq) in its config.json"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "are quantized already (bitsandbytes)"),
    ],
)
def test_weights_that_no_installed_library_reads_are_refused_with_the_method(
    tmp_path: Path, model: Path, stored: dict[str, Any], sentence: str
) -> None:
    configured(model, quantization_config=stored)
    assert sentence in refusal(lambda: check_models(job_spec(tmp_path, model)), model)


def test_a_quantization_that_the_configuration_of_the_text_part_has_is_seen(tmp_path: Path) -> None:
    text = {**ARCHITECTURES["gemma3_text"], "hidden_size": 128, "head_dim": 32}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"text_config": text, "vision_config": {**vision, "image_size": 28, "patch_size": 14}}
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **sizes)).save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    scale = torch.ones(*(math.ceil(size / 128) for size in weights[name].shape))
    quantized = {**weights, name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(quantized, model / "model.safetensors", {"format": "pt"})
    saved = json.loads((model / "config.json").read_text())["text_config"]
    assert "no quantization_config" in refusal(lambda: check_weights(source_of(model)), model)
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    configured(model, text_config={**saved, "quantization_config": stored})
    check_weights(source_of(model))
    configured(model, text_config={**saved, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "is quantized, by quantization_config (gptq)" in refusal(
        lambda: check_models(job_spec(tmp_path, model)), model
    )
    configured(model, text_config={**saved, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert "are quantized already (bitsandbytes)" in refusal(lambda: load(model), model)
    spec = MergeSpec.model_validate(
        {"method": "linear", "inputs": [{"model": str(model), "weight": 0.5}] * 2, "output": tmp_path / "merged"}
    )
    assert "it is quantized; merge models in fp32" in refusal(lambda: merge(spec), model)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes of models whose weights were compared."""
    made: list[str] = []
    compared = shapes._load_shapes

    def counted(bare: Any, headers: Any) -> Any:
        made.append(type(bare).__name__)
        return compared(bare, headers)

    monkeypatch.setattr(shapes, "_load_shapes", counted)
    return made


def test_weights_are_compared_once_in_a_process_while_files_and_configuration_stay(
    tmp_path: Path, model: Path, comparisons: list[str]
) -> None:
    save_file(
        {**load_file(model / "model.safetensors"), "model.layers.2.mlp.up_proj.weight": torch.ones(1)},
        model / "model.safetensors",
        {"format": "pt"},
    )
    warnings: list[str] = []
    for _ in range(3):
        check_weights(source_of(model), warn=warnings.append)
    load(model)
    check_models(job_spec(tmp_path, model), warnings.append)
    assert comparisons == ["LlamaForCausalLM"]
    assert len(warnings) == 4
    assert len(set(warnings)) == 1
    check_weights(source_of(model), is_reward=True)
    with pytest.raises(JobFailure):
        check_weights(source_of(model), is_reward=True, has_head=True)
    assert comparisons == ["LlamaForCausalLM", *["LlamaForSequenceClassification"] * 2]
    check_weights(source_of(configured(model, rms_norm_eps=1e-3)))
    save_file(load_file(model / "model.safetensors"), model / "model.safetensors", {"format": "pt"})
    check_weights(source_of(model))
    assert len(comparisons) == 5
    configured(model, vocab_size=1030)
    for _ in range(2):
        assert "write vocab_size 1024" in refusal(lambda: check_weights(source_of(model)), model)


def test_converters_are_copied_for_each_weight_of_the_model_and_not_for_each_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    copied: list[object] = []

    def counted(value: Any, memo: Any = None) -> Any:
        found = copy.deepcopy(value, memo)
        if isinstance(value, WeightConverter):
            copied.append(found)
        return found

    monkeypatch.setattr(core_model_loading, "deepcopy", counted)
    check_weights(source_of(tmp_path))
    experts = [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    assert len(copied) == len(experts) == 24
    assert len(set(map(id, copied))) <= 6  # two for each of two layers, and an unused one of each


def replaced(model: Path, weights: dict[str, torch.Tensor], *, pickled: bool = False) -> None:
    if pickled:
        (model / "model.safetensors").unlink()
        torch.save(weights, model / "pytorch_model.bin")
    else:
        save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scale", "found"),
    [
        (torch.float8_e4m3fn, "_scale_inv", {False: "F8_E4M3", True: "torch.float8_e4m3fn"}),
        (torch.float8_e5m2, "_scale", {False: "F8_E5M2", True: "torch.float8_e5m2"}),
        (torch.int8, "", {False: "I8", True: "torch.int8"}),
    ],
)
def test_quantized_weights_without_their_configuration_are_refused(
    model: Path, dtype: torch.dtype, scale: str, found: dict[bool, str], pickled: bool
) -> None:
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].to(dtype)
    if scale:
        weights[f"{name}{scale}"] = torch.ones(1)
    replaced(model, weights, pickled=pickled)
    message = refusal(lambda: check_weights(source_of(model)), model)
    assert f"{name} is in {found[pickled]} in {'pytorch_model.bin' if pickled else 'model.safetensors'}" in message
    assert "config.json has no quantization_config" in message


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_that_were_merely_cast_to_8_bits_are_loaded(model: Path, dtype: torch.dtype, pickled: bool) -> None:
    weights = load_file(model / "model.safetensors")
    weights = {name: weight.to(dtype) if weight.dim() == 2 else weight for name, weight in weights.items()}
    kv_scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}
    replaced(model, {**weights, **kv_scale}, pickled=pickled)
    check_weights(source_of(model))
    loaded: Any = load(model)
    assert all(torch.equal(loaded.state_dict()[name], weight.float()) for name, weight in weights.items())


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float8_e4m3fn, "_scale_inv"), (torch.int8, "")])
def test_quantized_weights_of_experts_without_their_configuration_are_refused(
    tmp_path: Path, dtype: torch.dtype, scale: str
) -> None:
    config = AutoConfig.for_model("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    experts = {name: weight.to(dtype) for name, weight in weights.items() if ".experts." in name}
    scales = {f"{name}{scale}": torch.ones(1) for name in experts} if scale else {}
    replaced(tmp_path, {**weights, **experts, **scales})
    assert ".experts.0.down_proj.weight is in" in refusal(lambda: check_weights(source_of(tmp_path)), tmp_path)


@pytest.mark.parametrize("configured_too", [True, False])
def test_an_empty_chat_template_is_replaced_by_the_one_of_the_configuration(model: Path, configured_too: bool) -> None:
    template = (model / "chat_template.jinja").read_text()
    if configured_too:
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    (model / "chat_template.jinja").write_text("\n")
    warnings: list[str] = []
    tokenizer = load_tokenizer(source_of(model), warn=warnings.append)
    assert tokenizer.chat_template == (template if configured_too else None)
    instead = (
        "the one in tokenizer_config.json is used" if configured_too else "it is trained as one without a template"
    )
    assert warnings == [f"the chat template of {str(model)!r} is empty: {instead}"]


ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (lambda path: changed_adapter(path, r=2), "lora_A.weight is [4, 64], and [2, 64] in this model"),
    "modules": (
        lambda path: changed_adapter(path, target_modules=["k_proj"]),
        "weights are in only one of it and this",
    ),
    "no module": (lambda path: changed_adapter(path, target_modules=["none"]), "it does not fit"),
    "a rank of another type": (lambda path: changed_adapter(path, r="8"), "it does not fit"),
    "a module of another type": (lambda path: changed_adapter(path, target_modules=[5]), "it does not fit"),
    "a pattern that is none": (lambda path: changed_adapter(path, target_modules="(["), "it does not fit"),
    "layers that are not there": (lambda path: changed_adapter(path, layer_replication=[[0, 99]]), "it does not fit"),
    "type": (lambda path: changed_adapter(path, peft_type="NONE"), "its adapter_config.json cannot be read"),
    "configuration": (lambda path: (path / "adapter_config.json").unlink(), "its adapter_config.json cannot be read"),
    "weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "it has no adapter_model.safetensors"),
    "base": (lambda path: configured(path.parent / "model", hidden_size=32), "lora_A.weight is [4, 64], and [4, 32]"),
}


def changed_adapter(path: Path, **changes: Any) -> None:
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.mark.parametrize("damage", ADAPTERS)
def test_an_adapter_that_does_not_fit_its_base_model_is_refused_before_that_is_loaded(
    tmp_path: Path, model: Path, damage: str
) -> None:
    adapter = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])).save_pretrained(adapter)
    lora = LoraSpec(rank=4, alpha=8, target_modules=("q_proj",), mlp=False)
    check_adapter(adapter, source_of(model))
    check_adapter(adapter, source_of(model), lora=lora)
    spoil, sentence = ADAPTERS[damage]
    spoil(adapter)
    message = refusal(lambda: check_adapter(adapter, source_of(model)), adapter)
    assert sentence in message
    if damage == "rank":
        lora = lora.model_copy(update={"rank": 2})
        assert sentence in refusal(lambda: check_adapter(adapter, source_of(model), lora=lora), adapter)


def test_an_adapter_of_a_kind_that_needs_values_is_compared_and_named_when_it_is_loaded(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, ShiraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])).save_pretrained(adapter)
    caplog.set_level("INFO")
    check_adapter(adapter, source_of(model))
    assert f"adapter {adapter} is compared with {model} when it is loaded: SHIRA" in caplog.text
    spec = job_spec(tmp_path, model, adapter=AdapterSpec(model=str(adapter), use="continue"), lora=LORA)
    load_to_infer(spec, torch.device("cpu"))
    changed_adapter(adapter, r=2)
    check_adapter(adapter, source_of(model))
    message = refusal(lambda: load_to_infer(spec, torch.device("cpu")), adapter)
    assert "shira_indices is [2, 512], and [2, 256] in this model" in message
    changed_adapter(adapter, r=1000)
    assert "it does not fit" in refusal(lambda: load_to_infer(spec, torch.device("cpu")), adapter)


def test_a_reference_and_an_adapter_are_checked_with_the_job(tmp_path: Path, model: Path) -> None:
    base, adapter = tiny_model(), tmp_path / "adapter"
    check_models(job_spec(tmp_path, base))
    reference = reference_to(str(configured(model, vocab_size=1025)))
    spec = job_spec(tmp_path, base, "dpo", method=DpoSpec(reference=reference))
    assert "write vocab_size 1024" in refusal(lambda: check_models(spec), model)
    adapter.mkdir()
    lora: LoraSpec = LORA
    continued = job_spec(tmp_path, base, lora=lora, adapter=AdapterSpec(model=str(adapter), use="continue"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text(PAGE)
        assert f"{name} is a web page" in refusal(lambda: check_models(continued), adapter)
        (adapter / name).unlink()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "model.safetensors"])
def test_inputs_of_a_merge_are_checked(tmp_path: Path, model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    inputs = [{"model": str(tiny_model(tied=False)), "weight": 0.5}, {"model": str(model), "weight": 0.5}]
    spec = MergeSpec.model_validate({"method": "linear", "inputs": inputs, "output": tmp_path / "merged"})
    assert f"{name} is a Git LFS pointer" in refusal(lambda: merge(spec), model)
