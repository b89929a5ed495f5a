"""adamw_8bit: AdamW with moments in 8 bits, in one process and on ranks that shard the model."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.checkpoint.optimizer_state import TENSORS
from llama_stack_provider_trl.recipes.checkpoint.step import step_bytes
from llama_stack_provider_trl.recipes.memory.estimate import disk_bytes, estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.memory.trace_cache import trace
from llama_stack_provider_trl.recipes.train import _unused_libraries, unused_libraries_hidden
from llama_stack_provider_trl.recipes.trainer.adamw_8bit import AdamW8Bit
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerName, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.specs.optimizer_state import has_8_bit_moments
from tests.ranks import Ranks
from tests.tiny import save_llama, tiny_tokenizer
from tests.training import LORA, job_spec, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one block whose rows are whole blocks of 8-bit moments: 0.7M parameters."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    save_llama(path, tiny_tokenizer(), vocab_size=1024, max_position_embeddings=1024, tie_word_embeddings=True, **sizes)
    return path


def spec_of(root: Path, model: Path, name: OptimizerName = "adamw_8bit", ranks: int = 1, **changes: Any) -> JobSpec:
    optimizer = OptimizerSpec(name=name, learning_rate=1e-3, weight_decay=0.01)
    sharding = ShardingSpec() if ranks > 1 else None
    size = {"ranks": ranks, "sharding": sharding, "batch_size": 4 // ranks, "n_epochs": 2}
    return job_spec(root, model, **{"optimizer": optimizer, "save_steps": 2, **size, **changes})


def trained(ranks: Ranks, run_dir: Path, spec: JobSpec, resume_from: Path | None = None) -> list[dict[str, float]]:
    codes, events = ranks.run(run_dir, spec, resume_from)
    assert codes == [0] * spec.ranks, [event.message + event.traceback for event in of_kind(events, Failed)]
    assert of_kind(events, Prepared)[0].start_step == (0 if resume_from is None else 4)
    names = ("loss", "grad_norm", "learning_rate")
    return [{name: event.metrics[name] for name in names} for event in of_kind(events, Progress)]


def digest(spec: JobSpec) -> str:
    return hashlib.sha256((spec.checkpoint_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def losses(found: list[dict[str, float]]) -> list[float]:
    return [point["loss"] for point in found]


def test_a_job_learns_as_with_adamw_and_resumes_with_the_same_bits(ranks: Ranks, tmp_path: Path, model: Path) -> None:
    plain = trained(ranks, tmp_path / "adamw", spec_of(tmp_path / "plain", model, "adamw"))
    spec = spec_of(tmp_path / "one", model)
    whole = trained(ranks, tmp_path / "whole", spec)
    assert losses(whole) != losses(plain)
    assert losses(whole) == pytest.approx(losses(plain), rel=0.02)
    assert losses(whole)[-1] < 0.8 * losses(whole)[0]
    first = digest(spec)
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    assert trained(ranks, tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-4") == whole[4:]
    assert digest(spec) == first
    moments = load_file(spec.checkpoint_dir / "checkpoint-4" / TENSORS)
    codes = moments["model.layers.0.self_attn.q_proj.weight/exp_avg"]
    assert (codes.dtype, len(codes.unique()) > 100) == (torch.uint8, True)
    assert moments["model.norm.weight/exp_avg"].dtype == torch.float32


def test_ranks_hold_their_rows_of_the_moments_and_other_ranks_resume_from_them(
    ranks: Ranks, tmp_path: Path, model: Path
) -> None:
    spec = spec_of(tmp_path / "two", model, ranks=2)
    whole = trained(ranks, tmp_path / "whole", spec)
    first = digest(spec)
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    checkpoint = spec.checkpoint_dir / "checkpoint-4"
    assert trained(ranks, tmp_path / "again", spec, checkpoint) == whole[4:]
    assert digest(spec) == first
    alone = spec_of(tmp_path / "two", model)
    found = trained(ranks, tmp_path / "alone", alone, checkpoint)
    assert losses(found) == pytest.approx(losses(whole[4:]), rel=1e-3)


def updated(weight: torch.Tensor, steps: int = 3) -> tuple[torch.Tensor, dict[str, Any]]:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = AdamW8Bit([parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(steps):
        parameter.grad = (weight * (step - 1.5)).sin()
        optimizer.step()
    return parameter.detach(), optimizer.state_dict()["state"][0]


def test_the_moments_of_some_rows_do_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(0))
    whole, state = updated(weight)
    part, of_part = updated(weight[16:])
    assert torch.equal(part, whole[16:])
    assert all(torch.equal(of_part[name], state[name][16:]) for name in state if name != "step")
    monkeypatch.setattr("llama_stack_provider_trl.recipes.trainer.adamw_8bit._CPU_CHUNK", 7 * 512)
    assert torch.equal(updated(weight)[0], whole)


@pytest.mark.parametrize(
    ("shape", "in_8_bits"), [((16, 256), True), ((15, 256), False), ((64, 192), False), ((65536,), False)]
)
def test_weights_whose_rows_are_no_whole_blocks_keep_moments_in_fp32(shape: tuple[int, ...], in_8_bits: bool) -> None:
    _, state = updated(torch.ones(shape))
    assert has_8_bit_moments(shape) is in_8_bits
    assert state["exp_avg"].dtype == (torch.uint8 if in_8_bits else torch.float32)


def test_a_state_that_is_not_that_of_the_weight_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(16, 512))
    _, state = updated(weight.detach())
    for name, value in (("exp_avg_scale", torch.zeros(16, 1)), ("exp_avg", torch.zeros(16, 512)), ("step", "1")):
        optimizer = AdamW8Bit([weight], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
        saved = {"state": {0: {**state, name: value}}, "param_groups": optimizer.state_dict()["param_groups"]}
        with pytest.raises(ValueError, match="the state of a weight is"):
            optimizer.load_state_dict(saved)


def test_the_estimate_counts_two_bytes_and_the_scales(tmp_path: Path, model: Path) -> None:
    batch, shapes = Batch(2, 16), [weight.shape for weight in AutoModelForCausalLM.from_pretrained(model).parameters()]
    in_8_bits = sum(shape.numel() for shape in shapes if len(shape) == 2)
    others = sum(shape.numel() for shape in shapes if len(shape) == 1)
    expected = 2 * in_8_bits + 2 * 4 * in_8_bits // 256 + 8 * others
    spec, plain = spec_of(tmp_path, model), spec_of(tmp_path, model, "adamw")
    assert estimate(spec, batch, "cuda").optimizer == expected
    assert estimate(plain, batch, "cuda").optimizer == 8 * (in_8_bits + others)
    assert estimate(spec_of(tmp_path, model, ranks=2), batch, "cuda").optimizer == expected // 2
    written = 4 * (in_8_bits + others) + expected
    assert disk_bytes(spec, trace(spec, batch, "cuda"))["step_checkpoint"] == written
    assert step_bytes(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), spec.train.optimizer) == written
    adapters = trace(spec_of(tmp_path, model, lora=LORA), batch, "cuda")
    assert 0 <= adapters.in_8_bits < adapters.trainable


def test_a_job_with_8_bit_moments_sees_bitsandbytes(tmp_path: Path, model: Path) -> None:
    cases: list[tuple[OptimizerName, bool]] = [("adamw", True), ("adamw_8bit", False)]
    for name, is_hidden in cases:
        with unused_libraries_hidden(_unused_libraries(spec_of(tmp_path, model, name))):
            found = [finder.find_spec("bitsandbytes", None) for finder in sys.meta_path]
        assert (not any(found)) is is_hidden


def test_an_environment_without_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(JobFailure, match=r"optimizer_type adamw_8bit needs bitsandbytes.*\[quantization\]"):
        AdamW8Bit([torch.nn.Parameter(torch.ones(2))], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
