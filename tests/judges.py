"""A model that gives one reply to whatever it reads, without training."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import tiny_model


def saying(root: Path, text: str) -> Path:
    """A tiny model that writes a text of one token, and ends.

    Its layers add nothing. The embedding of every token leads to the text's, and the embedding of that to the end.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    (said,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    config = {"tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), **config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for weight in (embeddings, head):
            weight.zero_()
        embeddings[:, 0] = 1.0
        embeddings[said] = torch.zeros_like(embeddings[said]).index_fill_(0, torch.tensor([1]), 1.0)
        head[said, 0] = head[tokenizer.eos_token_id, 1] = 1.0
        model.model.norm.weight.fill_(1.0)
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root
