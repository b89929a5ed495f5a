"""Which modules LoRA adapts, and what an architecture without them is refused with, before any training."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.job import LoraSpec

pytestmark = pytest.mark.process


def mixture_of_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))


def refusal(model: Any, *modules: str, mlp: bool = False) -> str:
    from llama_stack_provider_trl.recipes.model.loading import adapter_config

    with pytest.raises(JobFailure) as refused:
        adapter_config(model, LoraSpec(target_modules=modules, mlp=mlp, rank=2, alpha=4))
    assert refused.value.reason is Reason.invalid_request
    return refused.value.message


@pytest.mark.parametrize("modules", [("q_proj",), ()])
def test_experts_that_lora_would_leave_out_are_refused_by_name(modules: tuple[str, ...]) -> None:
    message = refusal(mixture_of_experts(), *modules, mlp=True)
    assert "holds its experts as 3-D parameters (down_proj, gate_up_proj)" in message
    assert "name attention modules (k_proj, o_proj, q_proj, v_proj)" in message


def test_the_attention_of_a_mixture_of_experts_is_adapted() -> None:
    from llama_stack_provider_trl.recipes.model.loading import adapter_config

    adapted = adapter_config(mixture_of_experts(), LoraSpec(target_modules=("q_proj",), rank=2, alpha=4))
    assert set(adapted.target_modules) == {"q_proj"}


def two_projections() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def test_factors_are_of_inputs_in_mlp_blocks_and_of_outputs_elsewhere() -> None:
    from peft import get_peft_model

    from llama_stack_provider_trl.recipes.model.loading import adapter_config

    # GPT-2 calls a layer of its attention and one of its MLP c_proj.
    for modules, mlp in (
        (("c_attn",), False),
        (("c_attn",), True),
        (("c_attn", "attn.c_proj"), True),
        (("c_fc",), False),
    ):
        model = two_projections()
        spec = LoraSpec(method="ia3", target_modules=modules, mlp=mlp, rank=2, alpha=4)
        config = adapter_config(model, spec)
        config.fan_in_fan_out = True
        adapted = get_peft_model(model, config)
        found = {name: layer.is_feedforward for name, layer in adapted.named_modules() if hasattr(layer, "ia3_l")}
        assert found
        assert all(is_feedforward == (".mlp." in name) for name, is_feedforward in found.items())
        assert any(".mlp." in name for name in found) == (mlp or modules == ("c_fc",))


def test_a_model_without_attention_names_the_linear_modules_that_it_has() -> None:
    assert "Its linear modules are: dt_proj, in_proj, out_proj, x_proj;" in refusal(mamba(), "q_proj", "v_proj")


def test_modules_of_mamba_that_peft_cannot_adapt_are_refused_by_name() -> None:
    message = refusal(mamba(), "in_proj", mlp=True)
    assert "LoRA cannot adapt out_proj of this MambaForCausalLM" in message
    assert message.endswith("name lora_attn_modules among: dt_proj, in_proj, x_proj.")
