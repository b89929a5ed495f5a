"""Damage of a model's file that its first bytes, its size or its header show."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.submission import resolved
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.system import model_damage
from llama_stack_provider_trl.system.model_damage import damage_of

NAMES = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "chat_template.jinja",
    "pytorch_model.bin",
    "tokenizer.json",
)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 16060617592\n"
PAGES = (
    b"<!DOCTYPE html>\n<html><head><title>401 Unauthorized</title></head></html>",
    b'\n  <html lang="en">\n<body>Sign in</body>',
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>',
)


def found(path: Path, name: str, content: bytes, **more: Any) -> str | None:
    file = path / name
    file.write_bytes(content)
    with file.open("rb") as opened:
        return damage_of(name, opened, **more)


def tensors(*ends: int, data: int | None = None) -> bytes:
    header = json.dumps({str(end): {"dtype": "U8", "shape": [end], "data_offsets": [0, end]} for end in ends}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(max(ends, default=0) if data is None else data)


WHOLE = len(tensors(8, 40))


@pytest.mark.parametrize("name", NAMES)
def test_a_pointer_a_page_and_an_empty_file_are_named_as_such(tmp_path: Path, name: str) -> None:
    assert "is a Git LFS pointer and not the file itself: run `git lfs pull`" in str(found(tmp_path, name, POINTER))
    for page in PAGES:
        assert "is a web page, such as the error page of a download: download it" in str(found(tmp_path, name, page))
    is_ignored = name in model_damage.DISPENSABLE_FILES
    assert found(tmp_path, name, b"") == (None if is_ignored else "is empty: download it again")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (tensors(8, 40)[:-1], f"is cut off, it has {WHOLE - 1} bytes, expected {WHOLE} by its header"),
        (tensors(8, 40, data=7), f"is cut off, it has {WHOLE - 33} bytes, expected {WHOLE} by its header"),
        (tensors(8, 40)[:20], f"is cut off, it has 20 bytes, expected at least {WHOLE - 40} by its first 8"),
        (struct.pack("<Q", 900), "is cut off, it has 8 bytes, expected at least 908 by its first 8"),
        (b"\1\0", "is cut off, it has 2 bytes, expected at least 8"),
        (b"Entry not found", "is no safetensors file, it begins with b'Entry not found'"),
        (bytes(64), "is no safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{", "is no safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": 17}', "has a header that cannot be read (TypeError"),
    ],
)
def test_a_safetensors_file_that_is_cut_off_or_another_one(tmp_path: Path, content: bytes, sentence: str) -> None:
    assert sentence in str(found(tmp_path, "model.safetensors", content))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"a": 1', "cannot be read, it is no JSON (JSONDecodeError"),
        (b"[]", "cannot be read, it is no JSON object"),
        (b"\xff\xfe{}", "cannot be read, it is UTF-16 text, expected UTF-8: save it as UTF-8"),
        ('{"model_type": "llama"}'.encode("utf-16-le"), "cannot be read, it is UTF-16 text without a byte order mark"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark, which transformers does not read: save it as UTF-8 with"),
        (b"[" * 100_000, "cannot be read, it is no JSON (RecursionError"),
        (b'"text"', "cannot be read, it is no JSON object"),
    ],
)
def test_json_that_is_none_or_no_object(tmp_path: Path, content: bytes, sentence: str) -> None:
    assert sentence in str(found(tmp_path, "config.json", content))


@pytest.mark.parametrize("content", [b"", b" \n", b"\xef\xbb\xbf", b"[]", b"null", b'""'])
def test_a_generation_configuration_that_holds_nothing_is_ignored_and_one_that_is_cut_off_is_not(
    tmp_path: Path, content: bytes
) -> None:
    assert found(tmp_path, "generation_config.json", content) is None
    assert found(tmp_path, "config.json", content) is not None
    for damaged in (b'{"eos_token_id": [2', b"[1]"):
        assert "cannot be read, it is no JSON" in str(found(tmp_path, "generation_config.json", damaged))


def pickled(size: int = 64) -> bytes:
    """An archive such as torch.save writes."""
    with BytesIO() as content:
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02}.")
            archive.writestr("archive/data/0", bytes(size))
        return content.getvalue()


@pytest.mark.parametrize("content", [pickled()[:-1], pickled()[:60], b"PK\x03\x04"], ids=["end", "middle", "start"])
def test_pickled_weights_that_are_cut_off(tmp_path: Path, content: bytes) -> None:
    sentence = f"is cut off, it has {len(content)} bytes and no directory of its parts at its end: download it"
    assert sentence in str(found(tmp_path, "pytorch_model.bin", content))
    assert "is no file of weights, it begins with b'Not Found'" in str(
        found(tmp_path, "pytorch_model.bin", b"Not Found")
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{{ messages }}".encode("utf-16"), "cannot be read, it is UTF-16 text"),
        ("{{ 'é' }}".encode("latin-1"), "cannot be read, it is not UTF-8 text (invalid continuation byte at byte 4)"),
        ("\ufeff{{ 'é' }}".encode(), None),
    ],
)
def test_a_template_that_is_no_utf_8(tmp_path: Path, content: bytes, sentence: str | None) -> None:
    damage = found(tmp_path, "chat_template.jinja", content)
    assert damage is None if sentence is None else sentence in str(damage)


@pytest.mark.parametrize("start", ["<html>", "\n<?xml version='1.0'?>", "<!DOCTYPE html>"])
def test_a_template_that_begins_as_a_page_is_none(tmp_path: Path, start: str) -> None:
    for part in ("{{ messages }}", "{%- for message in messages %}"):
        content = f"{start}{' ' * 600}{part}".encode()
        assert found(tmp_path, "chat_template.jinja", content) is None
        assert "is a web page" in str(found(tmp_path, "tokenizer.json", content))
    assert "it is not UTF-8" in str(found(tmp_path, "chat_template.jinja", f"{start}{{{{ é }}}}".encode("latin-1")))


def test_of_a_large_file_both_ends_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_damage, "SMALL", 1000)
    large = json.dumps({"a": "x" * 2000}).encode()
    assert found(tmp_path, "tokenizer.json", large + b"\n") is None
    assert "is cut off, it has 2000 bytes" in str(found(tmp_path, "tokenizer.json", large[:2000]))
    assert "it is no JSON object" in str(found(tmp_path, "tokenizer.json", b"[" + large + b"]"))


def test_whole_files_have_no_damage(tmp_path: Path) -> None:
    assert found(tmp_path, "config.json", b'{"model_type": "llama"}\n') is None
    assert found(tmp_path, "model.safetensors", tensors(8, 40)) is None
    assert found(tmp_path, "model.safetensors", tensors()) is None
    assert found(tmp_path, "chat_template.jinja", b"<html_block>{{ messages }}") is None
    assert found(tmp_path, "pytorch_model.bin", pickled()) is None
    assert found(tmp_path, "pytorch_model.bin", b"\x80\x02\x8a\nl\xfc\x9cF") is None  # of torch before 1.6
    assert found(tmp_path, "model.safetensors", tensors(100, data=0), most_header=10) is None  # not parsed


async def rows(*_: Any) -> tuple[DatasetRef, list[str]]:
    return DatasetRef(dataset_id="rows", path=Path("/rows"), sha256="0" * 64, num_rows=8), []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(tensors(8, 40))
    (path / "tokenizer.model").write_bytes(b"pieces")
    return path


def refusal(model: Path, adapter: str | None = None, lora: dict[str, Any] | None = None) -> str:
    """The hint of the refusal of a request for a model; empty: it is accepted."""
    settings = Settings(data_dir=model.parent / "data", devices=("cpu",))
    data = {"dataset_id": "rows", "batch_size": 2}
    body = {"job_uuid": "job", "model": str(model), "training_config": {"n_epochs": 1, "data_config": data}}
    body |= {} if lora is None else {"algorithm_config": lora}
    request = SupervisedFineTuneRequest.model_validate(body)
    options = ProviderOptions.model_validate({"adapter": adapter} if adapter else {})
    try:
        asyncio.run(resolved(request, options, settings, rows, None))
    except InvalidRequest as error:
        return error.hint if error.field == "model" else str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.safetensors", POINTER, "model.safetensors in that directory is a Git LFS pointer"),
        ("chat_template.jinja", PAGES[0], "chat_template.jinja in that directory is a web page"),
        ("tokenizer_config.json", b"", "tokenizer_config.json in that directory is empty"),
        ("tokenizer.json", POINTER, "tokenizer.json in that directory is a Git LFS pointer"),
        ("config.json", b"{", "config.json in that directory cannot be read, it is no JSON"),
        ("config.json", POINTER, "config.json in that directory is a Git LFS pointer"),
        ("generation_config.json", b"{", "generation_config.json in that directory cannot be read, it is no JSON"),
        ("generation_config.json", b"[]", ""),
        ("chat_template.jinja", b"", ""),
        ("model.safetensors.index.json", b"{", ""),  # is not read beside the only file of weights
        ("pytorch_model.bin", POINTER, ""),
    ],
)
def test_a_request_for_a_directory_with_such_a_file_is_refused_by_name(
    model: Path, name: str, content: bytes, sentence: str
) -> None:
    os.mkfifo(model / "vocab.json")  # is not waited for
    assert refusal(model) == ""
    (model / name).write_bytes(content)
    hint = refusal(model)
    assert hint.startswith(sentence)
    assert bool(hint) == bool(sentence)


def test_a_model_without_a_file_of_a_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.model").rename(model / "sentencepiece.bpe.model")
    assert refusal(model) == ""
    (model / "sentencepiece.bpe.model").unlink()
    assert refusal(model).startswith("it has no file of a tokenizer, such as tokenizer.json: download it")


def with_tensors(names: list[str]) -> bytes:
    """A file of weights."""
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for name in names}).encode()
    return struct.pack("<Q", len(header)) + header + b"0"


def lora_on(module: str) -> dict[str, Any]:
    lora = {"type": "LoRA", "lora_attn_modules": [module], "rank": 4, "alpha": 8}
    return {**lora, "apply_lora_to_mlp": False, "apply_lora_to_output": False}


def adapter_of(root: Path, model: Path, module: str) -> Path:
    """A directory with PEFT's configuration of an adapter."""
    sizes = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": [module]}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), **sizes}
    (adapter := root / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


SELF_ATTENTION = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]


@pytest.mark.parametrize(
    ("names", "module", "hint"),
    [
        (SELF_ATTENTION, "q_prj", "have no module of this name, but k_proj, o_proj, q_proj, v_proj; the nearest is 'q"),
        (SELF_ATTENTION, "self_attn.q", "have no module of this name, but k_proj, o_proj, q_proj, v_proj"),
        (SELF_ATTENTION, "layers.0.self_attn.q_proj", ""),
        (SELF_ATTENTION, "output_proj", ""),
        (["model.layers.0.attn.wq_du.weight"], "q_proj", ""),  # transformers renames such modules
    ],
)
@pytest.mark.parametrize("is_index", [False, True])
def test_a_module_for_adapters_that_the_names_in_the_files_lack_is_refused_with_the_nearest(
    model: Path, names: list[str], module: str, hint: str, is_index: bool
) -> None:
    if is_index:
        shard = (model / "model.safetensors").rename(model / "shard.safetensors").name
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    else:
        (model / "model.safetensors").write_bytes(with_tensors(names))
    found = refusal(model, lora=lora_on(module))
    assert (hint in found) if hint else not found, found


def test_the_modules_of_a_continued_adapter_are_not_compared_with_the_names_in_the_files(
    tmp_path: Path, model: Path
) -> None:
    """transformers renames those of a vision model when it loads them."""
    (model / "model.safetensors").write_bytes(with_tensors(SELF_ATTENTION))
    module = "model.language_model.layers.0.self_attn.q_proj"
    adapter = adapter_of(tmp_path, model, module)
    (adapter / "adapter_model.safetensors").write_bytes(tensors(8))
    assert refusal(adapter, "continue") == ""
    assert "have no module of this name" in refusal(model, lora=lora_on(module))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_files_of_added_tokens_that_the_tokenizers_configuration_replaces_are_not_read(model: Path, name: str) -> None:
    (model / name).write_bytes(b"")
    assert refusal(model) == f"{name} in that directory is empty: download it again"
    configuration = model / "tokenizer_config.json"
    configuration.write_text('{"eos_token": "</s>"}')
    assert refusal(model) == f"{name} in that directory is empty: download it again"
    configuration.write_text('{"added_tokens_decoder": {}}')
    assert refusal(model) == ""
    large = json.dumps({"extra": "x" * model_damage.SMALL, "added_tokens_decoder": {}})
    configuration.write_text(large)
    assert refusal(model) == ""


INDEX = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {},
            "it has no file of weights, expected one of model.safetensors, model.safetensors.index.json, pytorch_model",
        ),
        ({"pytorch_model.bin": pickled()}, ""),
        ({"pytorch_model.bin": pickled()[:-9]}, "pytorch_model.bin in that directory is cut off, it has"),
        ({"model.safetensors.index.json": b"{"}, "model.safetensors.index.json in that directory cannot be read"),
        ({"model.safetensors.index.json": b"{}"}, "model.safetensors.index.json in that directory is no index of"),
        (
            {"model.safetensors.index.json": INDEX, "one.safetensors": tensors(8)},
            "two.safetensors in that directory is missing, which model.safetensors.index.json names as one of 2 files",
        ),
        (
            {"model.safetensors.index.json": INDEX, "one.safetensors": tensors(8), "two.safetensors": tensors(8)[:-1]},
            "two.safetensors in that directory is cut off",
        ),
        ({"model.safetensors.index.json": INDEX, "one.safetensors": tensors(), "two.safetensors": tensors()}, ""),
        (
            {"pytorch_model.bin.index.json": INDEX, "one.safetensors": tensors()},
            "two.safetensors in that directory is missing, which pytorch_model.bin.index.json names",
        ),
    ],
)
def test_a_request_for_a_directory_without_all_its_weights_is_refused_by_name(
    model: Path, files: dict[str, bytes], sentence: str
) -> None:
    (model / "model.safetensors").unlink()
    for name, content in files.items():
        (model / name).write_bytes(content)
    hint = refusal(model)
    assert hint.startswith(sentence)
    assert bool(hint) == bool(sentence)
    (model / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    assert refusal(model) == "" or "no file of weights" not in sentence


@pytest.mark.parametrize(
    ("use", "files", "sentence"),
    [
        ("continue", {}, "the adapter's directory has no adapter_model.safetensors: name one that PEFT has saved"),
        ("continue", {"adapter_model.bin": pickled()}, "the adapter's directory has no adapter_model.safetensors:"),
        ("merge", {"adapter_model.bin": pickled()}, ""),
        ("merge", {}, "the adapter's directory has no adapter_model.safetensors or adapter_model.bin"),
        ("merge", {"adapter_model.safetensors": POINTER}, "adapter_model.safetensors in that directory is a Git LFS"),
        ("continue", {"adapter_model.safetensors": tensors(8)}, ""),
    ],
)
def test_a_request_for_an_adapter_without_its_weights_is_refused_by_name(
    tmp_path: Path, model: Path, use: str, files: dict[str, bytes], sentence: str
) -> None:
    adapter = adapter_of(tmp_path, model, "q_proj")
    for name, content in files.items():
        (adapter / name).write_bytes(content)
    hint = refusal(adapter, use)
    assert hint.startswith(sentence)
    assert bool(hint) == bool(sentence)


def test_an_adapter_without_its_configuration_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(tensors(8))
    assert "holds an adapter without its adapter_config.json" in refusal(tmp_path / "adapter", "continue")
