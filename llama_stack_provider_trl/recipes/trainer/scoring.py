"""Log-probabilities of a batch by the reference: another model, or the policy without its adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ..model.adapters import REFERENCE
from ..model.fsdp import is_sharded
from .base import RecipeTrainer
from .reference import precomputes
from .trl_patches import with_adapter, without_adapter


@contextmanager
def no_recomputation(model: torch.nn.Module) -> Iterator[None]:
    """Switch activation checkpointing off while this is open. TRL's own context would switch it on in every block."""
    recomputed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for module in recomputed:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in recomputed:
            module.gradient_checkpointing = True


class ScoresReference(RecipeTrainer):
    """A trainer of a method with a reference, over batches with `forward_arguments` and `log_probs`."""

    _batches: Any

    def score_reference(self, inputs: dict[str, Any]) -> torch.Tensor:
        """log pi_ref(answer|prompt) of the answers of a collated batch, as `_batches` orders them."""
        with self.as_reference() as model, self.scoring():
            forward = self._batches.forward_arguments(model, inputs)
            return self._batches.log_probs(model(**forward), inputs).float()

    def rehearse(self, arguments: dict[str, Any], *, training: bool) -> None:
        super().rehearse(arguments, training=training)
        if (self.spec.reference is not None or self.spec.method.kl_weight) and not precomputes(self.spec):
            with self.as_reference() as model, self.scoring():
                model(**arguments)

    @contextmanager
    def as_reference(self) -> Iterator[torch.nn.Module]:
        """The model whose forwards are those of the reference while this is open, without a gradient."""
        adapter_off: AbstractContextManager[Any] = nullcontext()
        if self.ref_model is None and is_peft_model(self.model):
            policy = self.accelerator.unwrap_model(self.model)
            adapter_off = (
                with_adapter(policy, REFERENCE) if REFERENCE in policy.peft_config else without_adapter(policy)
            )
        elif self.ref_model is None and self.state.global_step > 0:  # at step 0 it is still the base model
            raise AssertionError("full fine-tuning without a reference model")
        with torch.no_grad(), no_recomputation(self.model), self._precision(), adapter_off:
            yield self.model if self.ref_model is None else self.ref_model

    def _precision(self) -> AbstractContextManager[Any]:
        """The precision of the policy's forward, so that a policy equal to its reference has log-ratios of exactly 0:
        autocast in one process and under DDP, the mixed precision of its units under FSDP2."""
        return nullcontext() if is_sharded(self.spec) else self.accelerator.autocast()
