"""Files of models that are damaged, or do not fit their configuration: a sentence before a row is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.checkpoint.merge import merge
from llama_stack_provider_trl.recipes.model.checked import check_models
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, check_weights, load_model, load_tokenizer
from llama_stack_provider_trl.specs.adapters import LoraSpec
from llama_stack_provider_trl.specs.beginnings import AdapterSpec
from llama_stack_provider_trl.specs.events import Failed, Reason
from llama_stack_provider_trl.specs.job import DpoSpec
from llama_stack_provider_trl.specs.merge import MergeSpec
from llama_stack_provider_trl.specs.model_source import ModelSource, ReferenceSpec
from llama_stack_provider_trl.specs.preflight import PreflightSpec
from tests.process.test_export import ARCHITECTURES
from tests.tiny import tiny_model
from tests.training import LORA, job_spec, of_kind, run

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
    for module in ("build", "preflight"):
        monkeypatch.setattr(f"llama_stack_provider_trl.recipes.{module}.Preparation", _no_rows)
    configured(model, vocab_size=1100)
    more: dict[str, Any] = {"preflight": PreflightSpec(device="cpu")} if is_preflight else {}
    status, events = run(tmp_path / "run", job_spec(tmp_path, model), **more)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_model)
    assert "write vocab_size 1024 into config.json" in failed.message


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mamba"])
def test_what_save_pretrained_writes_fits_in_every_architecture_and_a_wrong_vocabulary_does_not(
    tmp_path: Path, architecture: str
) -> None:
    sizes = ARCHITECTURES.get(architecture) or {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    bare = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    bare.save_pretrained(tmp_path, max_shard_size="50KB")
    check_weights(source_of(tmp_path))
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
    message = refusal(lambda: load_tokenizer(source_of(model)), model)
    assert name in message
    assert found in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize(("text", "found"), [(POINTER, "git lfs pull"), (PAGE, "web page"), ("", "is empty")])
def test_a_file_of_the_model_that_is_another_one_is_named(model: Path, name: str, text: str, found: str) -> None:
    (model / name).write_text(text)
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


def test_a_reference_and_an_adapter_are_checked_with_the_job(tmp_path: Path, model: Path) -> None:
    base, adapter = tiny_model(), tmp_path / "adapter"
    check_models(job_spec(tmp_path, base))
    reference = ReferenceSpec(model=str(configured(model, vocab_size=1025)))
    spec = job_spec(tmp_path, base, "dpo", dpo=DpoSpec(reference=reference))
    assert "write vocab_size 1024" in refusal(lambda: check_models(spec), model)
    adapter.mkdir()
    lora: LoraSpec = LORA
    continued = job_spec(tmp_path, base, lora=lora, adapter=AdapterSpec(path=adapter, use="continue"))
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
