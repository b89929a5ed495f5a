"""Norms and rotary embeddings in fewer passes: their numbers, and which of transformers' own they replace."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llama_stack_provider_trl.recipes.fast import elementwise
from llama_stack_provider_trl.recipes.fast.elementwise import use_fewer_passes

pytestmark = pytest.mark.process
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
NORMS = {"llama": "LlamaRMSNorm", "qwen3": "Qwen3RMSNorm", "gemma3": "Gemma3RMSNorm"}
ROTATED = ("llama", "qwen2", "gemma3", "mistral")


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def differences(one: Callable[..., Any], other: Callable[..., Any], given: list[torch.Tensor]) -> float:
    """Largest difference of outputs and gradients, relative to the largest number of each."""
    found = []
    for function in (one, other):
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        found.append((*outputs, *torch.autograd.grad(loss, wanted)))
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 4, 8)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_numbers_of_transformers(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm: Any = getattr(modeling(name), NORMS[name])(8, eps=1e-3)
    states, weight = (torch.randn(*size, requires_grad=True) for size in (shape, (8,)))
    offset = elementwise._offset_of(type(norm))
    assert offset == (1.0 if name == "gemma3" else 0.0)

    def plain(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (states,))

    def ours(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return elementwise.rms_norm(states, weight + offset, 1e-3)

    assert differences(ours, plain, [states, weight]) < 1e-5
    assert differences(ours, plain, [states, weight.detach()]) < 1e-5
    assert differences(ours, plain, [states.detach(), weight]) < 1e-5


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotary_embedding_has_the_numbers_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    plain: Any = modeling(name).apply_rotary_pos_emb
    plain = getattr(plain, "plain", plain)
    states = [torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2)]
    angles = [torch.randn(2, 5, 8) for _ in range(2)]  # the halves differ, as those of some architectures do

    def with_heads(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, cos, sin: function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    assert elementwise._rotates_halves(plain)
    assert differences(with_heads(elementwise._Rotate(plain)), with_heads(plain), [*states, *angles]) < 1e-6


@pytest.mark.parametrize("name", ["gpt_neox", "phi3", "glm4_moe"])
def test_a_partial_rotary_embedding_is_left_to_transformers(name: str) -> None:
    torch.manual_seed(0)
    plain: Any = modeling(name).apply_rotary_pos_emb
    plain = getattr(plain, "plain", plain)
    states, angles = [torch.randn(2, 4, 5, 8) for _ in range(2)], [torch.randn(2, 5, 4) for _ in range(2)]
    for one, other in zip(elementwise._Rotate(plain)(*states, *angles), plain(*states, *angles), strict=True):
        assert one.equal(other)


def test_other_functions_and_classes_are_left_alone() -> None:
    class OtherRMSNorm(torch.nn.Module):
        """Without the root."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.weight * states / (states.square().mean(dim=-1, keepdim=True) + self.eps)

    class WithBiasRMSNorm(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(torch.ones(size)), torch.nn.Parameter(torch.zeros(size))

    class WithOptionsRMSNorm(torch.nn.Module):
        def __init__(self, size: int, *, options: object) -> None:
            super().__init__()

    for kind in (OtherRMSNorm, WithBiasRMSNorm, WithOptionsRMSNorm, torch.nn.LayerNorm):
        assert elementwise._offset_of(kind) is None
    assert not elementwise._rotates_halves(modeling("glm").apply_rotary_pos_emb)  # turns neighbours
    assert not elementwise._rotates_halves(lambda q, k, cos: (q, k))


def test_a_norm_without_a_weight_is_left_alone() -> None:
    class OptionalRMSNorm(torch.nn.Module):
        """As Gemma 3n has: some of its instances have no weight."""

        def __init__(self, size: int, *, with_scale: bool = True) -> None:
            super().__init__()
            self.eps = 1e-6
            if with_scale:
                self.weight = torch.nn.Parameter(torch.ones(size))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            normed = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.eps)
            return normed * self.weight if hasattr(self, "weight") else normed

    norms: Any = torch.nn.Sequential(OptionalRMSNorm(8), OptionalRMSNorm(8, with_scale=False))
    states = torch.randn(3, 8)
    expected = norms(states)
    use_fewer_passes(norms)
    assert ["forward" in vars(norm) for norm in norms] == [True, False]
    assert torch.allclose(norms(states), expected, atol=1e-6)


@pytest.fixture
def restored() -> Any:
    module = modeling("llama")
    before = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = getattr(before, "plain", before)
    yield
    module.apply_rotary_pos_emb = before


def test_a_model_computes_both_in_fp32_and_neither_in_half_precision(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.float32)
    ids = torch.arange(6)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    counts = {"norm": 0, "rotate": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(elementwise, "rms_norm", counting("norm", elementwise.rms_norm))
    monkeypatch.setattr(elementwise, "rotate", counting("rotate", elementwise.rotate))
    use_fewer_passes(model)
    replaced: Any = modeling("llama").apply_rotary_pos_emb
    use_fewer_passes(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)))  # as a reference
    assert modeling("llama").apply_rotary_pos_emb is replaced
    counts.update(norm=0, rotate=0)  # of the trials
    found = model(input_ids=ids, use_cache=False).logits
    assert counts == {"norm": 3, "rotate": 2}
    assert torch.allclose(found, expected, atol=1e-5)
    halved = model.to(torch.bfloat16)(input_ids=ids, use_cache=False).logits
    assert counts == {"norm": 3, "rotate": 2}
    assert torch.allclose(halved.float(), expected, atol=0.05)
