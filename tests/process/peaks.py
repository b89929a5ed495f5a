"""What a training holds in memory at most."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModMemStats
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_stack_provider_trl.recipes.memory import trace as memory
from llama_stack_provider_trl.recipes.model.fsdp import blocks_of, mixed_precision
from llama_stack_provider_trl.specs.job import JobSpec


def most(windows: Sequence[memory.Window]) -> float:
    return max(window.activations + window.logits + window.gradients for window in windows)


def sharded_peak(spec: JobSpec, batch: memory.Batch) -> int:
    """Bytes of a step on a rank of a job in bf16 whose exchange of weights and gradients is a fake one, by torch's own
    tracker. Units are those that accelerate makes."""
    config = memory.load_config(spec.source)
    dist.init_process_group("fake", rank=0, world_size=spec.ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (spec.ranks,))
        with ExitStack() as stack:
            with torch.device("meta"):
                model = memory._built(config, spec.source, spec)
                memory.use_rows(model, "cuda")
                memory.tile_mlp(model, spec, "cuda")
                memory.fuse_head(model, ("log_probs", "is_top1"))
                trained = get_peft_model(model, memory.adapter_config(model, spec.lora)) if spec.lora else model
                if spec.lora:
                    memory.fuse_lora(trained, spec, "cuda")
            stack.enter_context(memory.traced_attention(packed=False))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            memory._make_fake(trained)
            for weight in trained.parameters():
                weight.data = weight.data.float() if weight.requires_grad else weight.data
            trained.train()
            if spec.compute.gradient_checkpointing:
                model.activation_checkpointing_enable(
                    activation_checkpointing_kwargs=memory.checkpoint_arguments(spec, "cuda")
                )
                if spec.lora:
                    model.enable_input_require_grads()
            keeps = spec.sharding is not None and spec.sharding.strategy == "SHARD_GRAD_OP"
            options = {"mesh": mesh, "mp_policy": mixed_precision(torch.bfloat16)}
            inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
            is_tied = inputs.weight is head.weight
            for block in blocks_of(model).values():
                fully_shard(block, reshard_after_forward=not keeps, **options)
            if not is_tied:
                fully_shard(inputs, reshard_after_forward=not keeps, **options)
            tail = [model.model.norm, *([inputs] if is_tied else []), head]
            fully_shard(tail, reshard_after_forward=False, **options)
            fully_shard(trained, **options)
            stack.enter_context(memory._head_of(spec, "cuda", memory._LiveMemory(1.0), config))
            tracker = FSDPMemTracker(trained)
            tracker.memory_tracking[head] = _FSDPModMemStats("head")  # a fused head reads its weight, and is not called
            with tracker:
                memory._step(trained, spec, batch, "cuda")
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        dist.destroy_process_group()
