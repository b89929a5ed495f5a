"""Packed rows: whole, in few sequences, blind to each other, and with the loss of rows that are padded.

Several ranks: tests/process/test_ranks.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.lengths import num_rows
from llama_stack_provider_trl.recipes.data.packing import best_fit, pack
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.model.packing_check import check_isolation
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Prepared, Progress, Reason
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from tests.tiny import VOCABULARY, tiny_model
from tests.training import SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LIMIT = 96


def packed(root: Path, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"packed": True, "max_seq_length": LIMIT, "batch_size": 1, **changes}
    return job_spec(root, tiny_model(), **fields)


# --- which rows go where ----------------------------------------------------------------------------------------------


def test_every_row_is_in_one_bin_that_has_room_for_it() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 200) for _ in range(2000)]
    bins = best_fit(lengths, 200)
    assert sorted(row for members in bins for row in members) == list(range(2000))
    assert all(sum(lengths[row] for row in members) <= 200 for members in bins)
    assert len(bins) <= 1.01 * sum(lengths) / 200 + 1  # nearly nothing is lost


def test_a_row_goes_into_the_fullest_bin_with_space_for_it() -> None:
    assert best_fit([6, 7, 3, 4, 10], 10) == [[4], [1, 2], [0, 3]]


def test_a_sequence_holds_whole_rows_and_no_row_predicts_the_next() -> None:
    rows = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    joined = pack(dataset, 5)
    assert joined["input_ids"][:] == [[1, 2, 3, 9, 10], [4, 5, 6, 7, 8]]
    assert joined["seq_lengths"][:] == [[3, 2], [4, 1]]
    assert joined["labels"][:] == [[IGNORED, 2, 3, IGNORED, 10], [IGNORED, 5, 6, 7, IGNORED]]
    assert num_rows(joined) == 4


# --- on which models --------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
APART: list[PreTrainedConfig] = [
    LlamaConfig(**SIZES),
    MistralConfig(**SIZES, sliding_window=5),
    GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64),
]
MIXED: list[PreTrainedConfig] = [
    OPTConfig(vocab_size=128, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2),
    BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=2),
    Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
]


def built(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", APART, ids=lambda config: config.model_type)
def test_packed_rows_have_the_logits_of_single_rows(config: PreTrainedConfig, attention: str) -> None:
    model = built(config)
    model.set_attn_implementation(attention)
    check_isolation(model)
    rows = [torch.arange(3, 3 + length) * 37 % 128 for length in (7, 12, 1, 9)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    with torch.no_grad():
        together = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", MIXED, ids=lambda config: config.model_type)
def test_a_model_whose_rows_see_each_other_is_refused(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    with pytest.raises(JobFailure, match=r"packed is true, and .* a row sees the one before it") as refused:
        check_isolation(built(config, dtype))
    assert refused.value.reason == Reason.invalid_request


def test_bf16_models_are_not_refused_for_their_rounding() -> None:
    for config in APART:
        check_isolation(built(config, torch.bfloat16))


def test_a_model_that_counts_positions_through_is_refused() -> None:
    model = built(APART[0])
    model.model.rotary_emb = Counting(model.model.rotary_emb)
    with pytest.raises(JobFailure, match="a row's place in the sequence changes its logits"):
        check_isolation(model)


class Counting(torch.nn.Module):
    """Positions that stretch with the sequence's length, as dynamic scaling by it would."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x, position_ids * x.shape[1])


def test_a_job_with_such_a_model_fails_before_it_trains(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = tmp_path / "opt"
    sizes = {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048}
    config = OPTConfig(vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(model)
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, packed=True))
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason == Reason.invalid_request
    assert "OPTForCausalLM" in failed.message
    assert not of_kind(events, Prepared)


# --- what a job makes of it -------------------------------------------------------------------------------------------


def test_one_step_over_all_rows_is_the_same_packed_or_padded(tmp_path: Path) -> None:
    # One optimizer step per epoch sees every row, so loss and gradient are those of the padded rows.
    common: dict[str, Any] = {"n_epochs": 3, "shuffle": False, "validation_rows": SFT_ROWS[:5], "save_steps": 1}
    _, padded = run(tmp_path / "a", job_spec(tmp_path / "a", tiny_model(), batch_size=12, **common))
    _, together = run(tmp_path / "b", packed(tmp_path / "b", batch_size=8, **common))
    (prepared,) = of_kind(together, Prepared)
    assert prepared.num_rows == 12
    packing = prepared.effective["packing"]
    assert packing["rows"] == 12
    assert 1 < packing["sequences"] < 8
    assert prepared.total_steps == 3
    measured: dict[Any, tuple[str, ...]] = {
        Progress: ("loss", "grad_norm", "num_tokens", "mean_token_accuracy"),
        Evaluated: ("eval_loss",),
    }
    for kind, names in measured.items():
        for one, other in zip(of_kind(together, kind), of_kind(padded, kind), strict=True):
            assert {name: one.metrics[name] for name in names} == pytest.approx(
                {name: other.metrics[name] for name in names}, rel=2e-5
            )


def test_steps_count_sequences_and_a_limit_of_the_evaluation_counts_rows_as_without_packing(tmp_path: Path) -> None:
    limited: dict[str, Any] = {"validation_rows": SFT_ROWS, "max_validation_steps": 3}
    limited["optimizer"] = OptimizerSpec(learning_rate=1e-9)  # nearly the same model at the end
    _, events = run(tmp_path / "a", packed(tmp_path / "a", batch_size=2, **limited))
    (prepared,) = of_kind(events, Prepared)
    assert prepared.total_steps == -(-prepared.effective["packing"]["sequences"] // 2)
    _, padded = run(tmp_path / "b", job_spec(tmp_path / "b", tiny_model(), batch_size=2, **limited))
    (one,), (other,) = of_kind(events, Evaluated), of_kind(padded, Evaluated)
    assert one.metrics["eval_loss"] == pytest.approx(other.metrics["eval_loss"], rel=1e-5)


def test_a_row_that_is_too_long_is_cut_and_counted_as_without_packing(tmp_path: Path) -> None:
    rows = [*SFT_ROWS, {"prompt": "Count.", "completion": "one two three " * 60}]
    _, events = run(tmp_path, packed(tmp_path, rows=rows))
    (prepared,) = of_kind(events, Prepared)
    assert prepared.num_rows == 13
    assert prepared.effective["data"]["truncated"] == 1
