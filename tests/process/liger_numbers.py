"""How far blocks by Liger's kernels are from those by torch's operations, in Triton's interpreter: no GPU is here.

    TRITON_INTERPRET=1 python -m tests.process.liger_numbers DIRECTORY

Writes for each type of model what was done, the largest difference, and of how many tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from transformers import AutoConfig, AutoModelForCausalLM

from llama_stack_provider_trl.recipes.fast import liger
from llama_stack_provider_trl.recipes.fast.batches import collate_rows, forward_arguments
from llama_stack_provider_trl.recipes.fast.model import use_rows
from llama_stack_provider_trl.recipes.trainer.trl_patches import fuse_head
from tests.training import job_spec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,  # no power of 2
    "num_hidden_layers": 1,  # the interpreter computes a row of a tensor at a time, in milliseconds
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def interpret_liger() -> None:
    """Have the interpreter of triton 3.7 take what it lacks: numbers as tensors, and CUDA's reciprocal square root."""
    import liger_kernel.ops.rms_norm as norms

    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = converted
    norms.rsqrt = lambda values: tl.math.rsqrt(values)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    use_rows(model, "cpu")
    return model


def computed(model: Any) -> list[torch.Tensor]:
    """The log-probabilities of two rows in one sequence, and the gradients of all weights."""
    fuse_head(model, ("log_probs",))
    rows = [{"input_ids": list(range(1, size)), "labels": list(range(1, size))} for size in (10, 6)]
    scores = model(**forward_arguments(collate_rows(rows))).log_probs
    return [scores.detach(), *torch.autograd.grad(scores.sum(), list(model.parameters()))]


def main(root: str) -> None:
    interpret_liger()
    spec, found = job_spec(Path(root), root, liger_kernels="always"), {}
    for kind in liger.PROVEN:
        expected = computed(model_of(kind))
        model = model_of(kind)
        done = liger.use_liger(model, spec, "cuda")
        model.activation_checkpointing_enable({"use_reentrant": False})
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(computed(model), expected, strict=True)]
        found[kind] = [done, max(differences), len(differences)]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
