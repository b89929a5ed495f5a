"""What saves GPU memory does, and changes no number; empty shards. Skipped where there is no NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec, of_kind, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch finds no CUDA device"),
]
LONG = " and again" * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough that activations outweigh the weights: 8 layers of the tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("deep")
    config = AutoConfig.from_pretrained(tiny_model())
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.layer_types = 8, 256, 1024, None
    config.head_dim = 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(path)
    return path


def measured(root: Path, model: Path, algorithm: str = "sft", **changes: Any) -> tuple[list[float], int]:
    """Losses, and the peak of memory beyond what the job began with."""
    rows = [{name: text + LONG for name, text in row.items()} for row in (SFT_ROWS if algorithm == "sft" else DPO_ROWS)]
    fields: dict[str, Any] = {"device": "cuda", "rows": rows, "batch_size": 6, **changes}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    status, events = run(root, job_spec(root, model, algorithm, **fields), estimates=True)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    assert of_kind(events, Prepared)
    points = of_kind(events, Progress)
    return [point.metrics["loss"] for point in points], points[-1].peak_memory_bytes - before


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_what_saves_memory_saves_it_in_its_order_and_changes_no_loss(
    tmp_path: Path, model: Path, algorithm: str
) -> None:
    plain, most = measured(tmp_path / "plain", model, algorithm)
    savers: dict[str, dict[str, Any]] = {
        "offloading": {"activation_offloading": True},
        "selective": {"gradient_checkpointing": True, "checkpoint_every": 2},
        "full": {"gradient_checkpointing": True},
        "both": {"gradient_checkpointing": True, "activation_offloading": True},
    }
    peaks = {}
    for name, changes in savers.items():
        losses, peaks[name] = measured(tmp_path / name, model, algorithm, **changes)
        assert losses == pytest.approx(plain, rel=1e-3), name
    assert peaks["offloading"] < 0.8 * most
    assert peaks["full"] < peaks["selective"] < most


def test_fp16_trains_with_loss_scaling(tmp_path: Path, model: Path) -> None:
    single, _ = measured(tmp_path / "fp32", model, n_epochs=8)
    half, _ = measured(tmp_path / "fp16", model, n_epochs=8, dtype="fp16")
    assert half[0] == pytest.approx(single[0], rel=1e-2)
    assert half[-1] < half[0]


def test_a_rank_without_a_row_of_an_adapter_clips_and_steps_as_the_others() -> None:
    """Of 16 ranks that shard an adapter of rank 8, half have empty parts of it."""
    held = [torch.nn.Parameter(torch.ones(size, 4, device="cuda")) for size in (0, 2, 0)]
    for weight in held:
        weight.grad = torch.full_like(weight, 3.0)
    norm = torch.nn.utils.clip_grad_norm_(held, 1.0, foreach=True)
    torch.optim.AdamW(held, lr=0.1, weight_decay=0.0, fused=True).step()
    assert float(norm) == pytest.approx(3.0 * 8**0.5)
    assert [weight.tolist() for weight in held] == [[], [pytest.approx([0.9] * 4)] * 2, []]
