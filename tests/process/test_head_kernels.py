"""The fused head in torch, as on a GPU where Triton cannot compile: the numbers of the head on a CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import trl.kernels.chunked_divergence as divergence
import trl.kernels.chunked_logprob as kernels
import trl.trainer.utils as utils
from transformers import LlamaConfig, LlamaForCausalLM

from llama_stack_provider_trl.recipes.trainer import trl_patches

pytestmark = pytest.mark.process
SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def loss_and_gradients(labels: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    trl_patches.fuse_head(model, outputs=("log_probs", "is_top1"))
    outputs = model(input_ids=torch.arange(16).reshape(2, 8), labels=labels, fused_lm_head=True)
    outputs.loss.backward()
    return float(outputs.loss.detach()), [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("trained", [3, 0])
def test_the_head_in_torch_leaves_out_tokens_as_triton_does_and_has_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, trained: int
) -> None:
    labels = torch.arange(16).reshape(2, 8).clone()
    labels[:, trained:] = -100
    expected, gradients = loss_and_gradients(labels)
    monkeypatch.setattr(trl_patches, "missing_compiler", lambda: "no C compiler was found")
    monkeypatch.setattr(kernels, "_TRITON_AVAILABLE", True)
    for module in (kernels, divergence):
        monkeypatch.setattr(module, "_use_triton", module._use_triton)  # put back after the test
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)  # as of a GPU
    assert trl_patches.choose_head_kernels("cuda")[0] == "torch"
    loss, own = loss_and_gradients(labels)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert len(own) == len(gradients) > 0
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_an_estimate_counts_the_tiles_of_the_head_in_torch_and_none_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_tile = kernels._forward_tile
    with trl_patches.traced_head("cuda", 64, nullcontext):
        assert kernels._forward_tile is not forward_tile
    monkeypatch.setattr(kernels, "_use_triton", trl_patches._never)
    with trl_patches.traced_head("cuda", 64, nullcontext):
        assert kernels._forward_tile is forward_tile
