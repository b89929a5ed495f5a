"""Files of a model that are damaged, or describe more than there is: a sentence, and nothing is built of it."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import InvalidRequest, JobFailure
from llama_stack_provider_trl.recipes.checkpoint.merge import _Weights
from llama_stack_provider_trl.recipes.model.configs import read_config
from llama_stack_provider_trl.recipes.model.loading import WeightStorage, load_config, load_model, load_tokenizer
from llama_stack_provider_trl.specs.events import Failed, Reason
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl_remote.cli.advise import parameters_of
from tests.contract.payloads import QUESTIONS
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
TENSOR: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
CPU = torch.device("cpu")


def weights(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _twice() -> bytes:
    one = json.dumps(TENSOR).encode()
    return weights(b'{"a":' + one + b',"a":' + one + b"}", bytes(8))


WEIGHTS = {
    "length": weights(b"{}", length=2**63),
    "longest": weights(b"{}", length=2**64 - 1),
    "overlapping": weights({"a": TENSOR, "b": {**TENSOR, "data_offsets": [4, 12]}}, bytes(12)),
    "negative": weights({"a": {**TENSOR, "shape": [-2]}}, bytes(8)),
    "overflowing": weights({"a": {**TENSOR, "shape": [2**62, 2**62]}}, bytes(8)),
    "large": weights(b'{"__metadata__":{"a":"' + b"x" * (101 << 20) + b'"}}'),
    "twice": _twice(),
    "dtype": weights({"a": {**TENSOR, "dtype": "F99"}}, bytes(8)),
    "empty": b"",
    "binary": weights(b"\xff" * 100),
    "deep": weights(b"[" * 100_000),
    "list": weights(b"[]"),
    "beyond": weights({"a": {**TENSOR, "data_offsets": [0, 2**60]}}),
    "zeros": bytes(5000),
}
CONFIGS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a number of parts up to 10000"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts is 1000000000"),
    "nested": ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected numbers up to"),
    "width": ({"hidden_size": 2**70}, "hidden_size is 1180591620717411303424"),
    "positions": ({"max_position_embeddings": 10**15}, "max_position_embeddings is 1000000000000000"),
    "text": ({"num_hidden_layers": "a"}, "num_hidden_layers"),
    "null": ({"vocab_size": None}, "vocab_size"),
    "heads": ({"num_attention_heads": 10**9}, "config.json cannot be read"),
    "type": ({"model_type": "../../x"}, "config.json cannot be read"),
    "list of types": ({"model_type": ["a"]}, "config.json cannot be read"),
    "values": ({"layer_types": ["full_attention"] * 200_000}, "more than 100000 values"),
    "bytes": ('{"a": "' + "x" * (9 << 20) + '"}', "it has 9 MiB, at most 8"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "config.json cannot be read"),
    "deep": ("[" * 200_000, "config.json cannot be read"),
    "list": ("[]", "config.json cannot be read"),
    "binary": ("\0", "config.json cannot be read"),
}
TOKENIZERS = {
    "list": "[]",
    "deep": "[" * 200_000,
    "binary": "\0\0",
    "model": '{"version": "1.0", "model": {"type": "Unknown"}}',
    "merges": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}',
    "negative": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "numbers": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1' + "0" * 30 + '}, "merges": []}}',
    "pattern": json.dumps(
        {
            "version": "1.0",
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(" * 500},
                "behavior": "Isolated",
                "invert": False,
            },
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        }
    ),
}


@pytest.mark.parametrize(
    ("key", "is_count"),
    [
        *((name, True) for name in ("num_hidden_layers", "n_layer", "encoder_layers", "n_routed_experts", "depths")),
        *(
            (name, False)
            for name in ("shared_expert_intermediate_size", "block_size", "expert_capacity", "n_positions")
        ),
    ],
)
def test_a_size_of_a_part_is_no_number_of_parts(model: Path, key: str, is_count: bool) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: 20_480}))
    if is_count:
        with pytest.raises(JobFailure, match=f"{key} is 20480, expected a number of parts up to 10000"):
            read_config(source_of(model), {})
    else:
        read_config(source_of(model), {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def source_of(model: Path) -> ModelSource:
    return ModelSource(model=str(model))


@pytest.mark.parametrize("damage", WEIGHTS)
def test_damaged_weights_are_a_sentence(model: Path, damage: str) -> None:
    (model / "model.safetensors").write_bytes(WEIGHTS[damage])
    storage = WeightStorage(torch.float32, "fp32", False, False, False)
    sentences = r"weights in model\.safetensors cannot be read|has no weights for|model\.safetensors (is|has) "
    with pytest.raises(JobFailure, match=sentences) as caught:
        load_model(source_of(model), storage, CPU)
    assert caught.value.reason == Reason.invalid_model
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_configuration_that_describes_no_model_is_refused_before_anything_is_built(
    model: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = CONFIGS[damage]
    config = model / "config.json"
    text = changes if isinstance(changes, str) else json.dumps({**json.loads(config.read_text()), **changes})
    config.write_text(text)
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # nothing can be built
    with pytest.raises(JobFailure) as caught:
        load_config(source_of(model))
    assert sentence in caught.value.message
    assert str(model) in caught.value.message
    assert (caught.value.reason, len(caught.value.message) < 1000) == (Reason.invalid_model, True)


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_damaged_tokenizer_is_a_sentence(model: Path, damage: str) -> None:
    (model / "tokenizer.json").write_text(TOKENIZERS[damage])
    with pytest.raises(JobFailure, match=r"tokenizer cannot be loaded|no eos_token|json cannot be read") as caught:
        load_tokenizer(source_of(model))
    assert (caught.value.reason, len(caught.value.message) < 1000) == (Reason.invalid_model, True)


INDEXES = {
    "list": "[]",
    "deep": "[" * 200_000,
    "digits": '{"weight_map": ' + "9" * 5000 + "}",
    "map": '{"weight_map": []}',
    "values": '{"weight_map": {"a": {}}}',
    "numbers": '{"weight_map": {"a": 1}}',
    "missing": '{"weight_map": {"a": "model-7.safetensors"}}',
    "outside": '{"weight_map": {"a": "../x.safetensors"}}',
    "binary": "\0",
}


@pytest.mark.parametrize("damage", INDEXES)
def test_a_damaged_index_of_weights_is_a_sentence(model: Path, damage: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(INDEXES[damage])
    storage = WeightStorage(torch.float32, "fp32", False, False, False)
    with pytest.raises(JobFailure) as caught:
        load_model(source_of(model), storage, CPU)
    with ExitStack() as stack, pytest.raises(JobFailure) as merged:
        _Weights(source_of(model), stack)
    for failure in (caught.value, merged.value):
        assert str(model) in failure.message
        assert len(failure.message) < 6500


@pytest.mark.parametrize("damage", sorted({*WEIGHTS} - {"twice"}))  # its last tensor counts
def test_damaged_weights_of_a_merge_are_a_sentence(model: Path, damage: str) -> None:
    (model / "model.safetensors").write_bytes(WEIGHTS[damage])
    with ExitStack() as stack, pytest.raises(JobFailure, match=r"model\.safetensors (cannot be read|is|has) "):
        _Weights(source_of(model), stack)


@pytest.mark.parametrize("damage", ["length", "empty", "binary", "deep", "list", "zeros"])
def test_advice_about_weights_without_a_header_is_a_sentence(model: Path, damage: str) -> None:
    (model / "model.safetensors").write_bytes(WEIGHTS[damage])
    with pytest.raises(InvalidRequest, match="it is no safetensors file"):
        parameters_of(str(model))


def test_a_training_of_a_billion_layers_ends_before_it_builds_one(tmp_path: Path, model: Path) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 10**9}))
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, rows=QUESTIONS))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_model)
    assert "num_hidden_layers is 1000000000" in failed.message
