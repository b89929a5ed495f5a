"""CPU time of each walk over a model's modules that a step is spared (`recipes/trainer/kept_walks.py`).

    .venv/bin/python benchmarks/walks.py

Llama blocks of small weights with LoRA on all linear layers, whose modules are as many as those of a large model. The
least of 30 repetitions, in milliseconds of the thread's own time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from machine import REPOSITORY, begin

REPETITIONS = 30


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama_stack_provider_trl.recipes.trainer.kept_walks import keep_walks

    begin("torch", "transformers", "peft")
    print("| layers | train() | count of parameters | zero_grad() | list of parameters | together | kept |")
    print("|---|---|---|---|---|---|---|")
    for layers in (16, 32):
        small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **small))
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        walks = [
            milliseconds(adapted.train),
            milliseconds(partial(adapted.num_parameters, exclude_embeddings=True)),
            milliseconds(adapted.zero_grad),
            milliseconds(partial(listed, adapted)),
        ]
        kept = keep_walks(adapted)
        steps = milliseconds(adapted.train) + milliseconds(adapted.zero_grad)
        steps += milliseconds(partial(listed, kept))
        print("| " + " | ".join([str(layers), *(f"{one:.2f}" for one in (*walks, sum(walks), steps))]) + " |")


def listed(model: Any) -> None:
    list(model.parameters())


def milliseconds(walk: Callable[[], object]) -> float:
    """Of the fastest call."""
    times = []
    for _ in range(REPETITIONS):
        began = time.thread_time()
        walk()
        times.append(time.thread_time() - began)
    return 1000 * min(times)


if __name__ == "__main__":
    main()
