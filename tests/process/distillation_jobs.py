"""Jobs of on-policy distillation with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.recipes.memory import trace as memory
from llama_stack_provider_trl.specs.events import Failed
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import DistillationSpec
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, reference_to


def rows_of(steps: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n} plus {n}?" + " Please." * (n % 3)} for n in range(2 * steps)]


def teacher_model(root: Path, *, rows: int = 0, is_constant: bool = False, tokenizer: Any = None) -> Path:
    """A model of another width than the tiny one.

    Args:
        rows: of its embeddings beyond those of the tiny model.
        tokenizer: None: that of the tiny model.
        is_constant: its distribution is the same after every text, and so learned in a few steps.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_model())
    config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings = 32, 1, False
    config.intermediate_size, config.vocab_size = 48, config.vocab_size + rows
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 16
    config.initializer_range = 0.3  # so that its distributions are far from those of the tiny model
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
    if is_constant:
        embeddings = model.get_input_embeddings().weight.data
        embeddings.copy_(embeddings[:1].expand_as(embeddings).clone())
    model.save_pretrained(root)
    (tokenizer or AutoTokenizer.from_pretrained(tiny_model())).save_pretrained(root)
    return root


def method_of(teacher: Path, **changes: Any) -> DistillationSpec:
    return DistillationSpec(reference=reference_to(str(teacher)), **{"max_completion_length": 8, **changes})


def spec_of(root: Path, method: DistillationSpec, rows: list[dict[str, str]], **changes: Any) -> JobSpec:
    fields = {
        "rows": rows,
        "batch_size": 2,
        "optimizer": OptimizerSpec(name="sgd", learning_rate=0.5),
        "method": method,
    }
    return job_spec(root, tiny_model(), "distillation", **{**fields, **changes})


def ended(status: int, events: list[Any]) -> list[Any]:
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    return events


MORE = [{"prompt": f"Name a number above {n}."} for n in range(8)]


def loaded(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


def built(spec: JobSpec) -> Any:
    """The trainer of a job, on a CPU."""
    import torch

    from llama_stack_provider_trl.recipes.build import build_trainer

    return build_trainer(spec, torch.device("cpu")).trainer


def answered(sequences: int, tokens: int, answer_tokens: int) -> dict[str, Any]:
    """A batch of prompts with answers."""
    import torch

    scored = torch.zeros(sequences, tokens, dtype=torch.long)
    scored[:, -answer_tokens:] = 1
    attended = torch.ones_like(scored)
    attended[-1, -1] = 0  # without any padding attention gets no mask
    return {"input_ids": torch.ones_like(scored), "attention_mask": attended, "completion_mask": scored}


def held(trainer: Any, batch: Callable[[], dict[str, Any]]) -> Sequence[memory.Window]:
    """What a step of a trainer holds, with real weights."""
    live = memory._LiveMemory(1.0)
    for weight in (*trainer.model.parameters(), *trainer.ref_model.parameters()):
        live.ignore(weight)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: live.became_gradient(weight.grad))
    trainer.current_gradient_accumulation_steps = 1  # as Trainer's loop sets it
    with memory._head_of(trainer.spec, "cpu", live, trainer.policy.config), live:
        trainer.training_step(trainer.model, batch())
    return live.windows
