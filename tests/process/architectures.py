"""Tiny models of the architectures that are exported."""

from __future__ import annotations

from typing import Any

from tests.tiny import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "pad_token_id": 0,
}


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": SIZES,
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gemma2": SIZES,
    "gemma3_text": SIZES,
    "phi3": SIZES,
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {**SIZES, **EXPERTS},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT, **GROUPED, "num_key_value_heads": 4},
    "gpt_oss": {**SIZES, **EXPERTS},
}
