"""The base of all our trainers: Trainer, with a class of ours for each topic."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ..distributed import ranks
from ..distributed.heartbeat import heartbeat
from ..fast.batches import forward_arguments
from ..fast.compiled import COMPILED, compile_blocks, first_batch
from ..fast.float8 import use_float8
from ..fast.lora import fuse_lora
from ..model.fsdp import reshard
from .data_order import DataOrder
from .later_metrics import LaterMetrics
from .optimization import Optimization
from .source_losses import SourceLosses
from .step_checkpoints import StepCheckpoints
from .trl_patches import every_position, fast_head, fuse_head, has_fast_head, weighs_tokens_alike


class RecipeTrainer(StepCheckpoints, DataOrder, Optimization, SourceLosses, LaterMetrics):
    """What the trainers of all methods have. Those on a trainer of TRL derive from that, too, after this."""

    ref_model: torch.nn.Module | None = None
    """The model that DPO's policy is compared with, where it is not the policy itself."""
    head_outputs: tuple[str, ...]
    """What the fused head computes per token; empty: the model has no head over the vocabulary."""
    keeps_gathered = False
    """Of ranks that shard the model: whether its blocks stay gathered while it answers prompts."""
    fused_lora: str
    """Which LoRA layers compute as one operation, and why no others; empty: the job has none."""
    compiled_blocks: str
    """Which blocks are compiled, or why none."""
    float8: str
    """Which linear layers multiply in 8 bits, or why none."""
    compile_seconds: dict[str, float]
    """What that took, for the job's record; empty: nothing was compiled."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.head_outputs:
            fuse_head(self.policy, outputs=self.head_outputs)
        kind = self.args.device.type
        self.fused_lora = fuse_lora(self.model, self.spec, kind) if self.spec.lora else ""
        self.compiled_blocks, self.compile_seconds = compile_blocks(self.policy, self.spec, kind), {}
        self.float8 = use_float8(
            self.policy,
            self.spec,
            self.args.device,
            is_compiled=self.compiled_blocks.startswith(COMPILED),
            capability=_least_capability(self.args.device) if self.spec.compute.float8 == "always" else (),
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.compiled_blocks.startswith(COMPILED):
            began = time.monotonic()
            with heartbeat(self._writer):
                self._compile(prepared[0])
            self.compile_seconds = {"compile_seconds": round(time.monotonic() - began, 1)}
        return prepared

    def _compile(self, model: torch.nn.Module) -> None:
        """Compute a batch that each attempt begins with in every way in which the job will compute its own."""
        inputs = self._prepare_inputs(first_batch(self.spec, self.train_dataset))
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for training in (True, False) if self.spec.data.validation else (True,):
                self.model.train(training)
                self.rehearse(forward_arguments(inputs), training=training)
        self.model.train()
        model.zero_grad()
        reshard(model)

    def rehearse(self, arguments: dict[str, Any], *, training: bool) -> None:
        """Compute a batch in every way in which the job will compute its own in training, or in evaluations."""
        with torch.set_grad_enabled(training), self.scoring():
            scores = self.model(**arguments).log_probs
        if training:
            scores.sum().backward()

    def router_arguments(self) -> dict[str, bool]:
        """Arguments of a forward whose loss keeps the router of a mixture of experts balanced."""
        return {"output_router_logits": True} if self.aux_loss_enabled else {}

    def balanced(self, loss: torch.Tensor, outputs: Any, steps: int = 1) -> torch.Tensor:
        """The loss, and of a mixture of experts what keeps its router balanced, divided by `steps`."""
        return loss + self.router_aux_loss_coef * outputs.aux_loss / steps if self.aux_loss_enabled else loss

    @property
    def policy(self) -> Any:
        """The model that is trained, without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def scoring(self) -> AbstractContextManager[None]:
        """While this is open, forwards score batches with the head that is fastest on this device."""
        kind = self.args.device.type
        if has_fast_head(self.spec, kind):
            return fast_head(kind=kind, alike=weighs_tokens_alike(self.spec))
        return every_position() if self.spec.compute.padding_free else nullcontext()


def _least_capability(device: torch.device) -> tuple[int, ...]:
    """The least compute capability of the GPUs of all ranks; empty: they have none."""
    if device.type != "cuda":
        return ()
    return min(map(tuple, ranks.gather_numbers(torch.cuda.get_device_capability(device))))
