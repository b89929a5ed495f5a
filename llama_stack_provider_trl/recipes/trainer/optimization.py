"""How weights are stepped: the optimizer and its schedule, sharding, and what ranks exchange in a step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ...specs.events import Warned
from ...specs.schedules import problem_of_warmup
from ..model.deferred import DeferredWeights
from ..model.fsdp import is_sharded, name_blocks
from ..model.quantization import move_constants
from .arguments import optimizer_class, scheduler_arguments
from .averaging import OuterOptimizer, without_ddp
from .kept_walks import KeptParameters, keep_walks
from .metrics import TrainingMetrics


class Optimization(TrainingMetrics):
    """A trainer with our optimizers, sharding and periodic averaging."""

    _momentum_of: Path | None = None
    """The step checkpoint that has the momentum of outer steps; None: training begins without one."""
    _kept: KeptParameters
    """From the first step on."""
    _flops_per_token: int | None = None
    """None: not counted yet."""

    def __init__(self, *, deferred: DeferredWeights | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._deferred = deferred
        # Trainer creates the optimizer from this when training starts.
        self.optimizer_cls_and_kwargs = optimizer_class(self.spec, self.args.device)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create Trainer's scheduler, with the arguments that depend on the number of steps. Raises JobFailure:
        invalid_request, where the job is too short for its warmup and decay."""
        if problem := problem_of_warmup(self.spec.train.optimizer, num_training_steps):
            self._writer.write(Warned(message=problem))
        self.args.lr_scheduler_kwargs = scheduler_arguments(self.spec.train.optimizer, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, which shards the model and loads its checkpoint; deferred weights are read then."""
        deferred, self._deferred = self._deferred, None
        averaging, sharded = self.spec.train.averaging, is_sharded(self.spec)
        if sharded:
            name_blocks(self.model, self.accelerator)
        apart = without_ddp(self.accelerator) if averaging and not sharded else nullcontext()
        with deferred.returned_to_accelerate() if deferred else nullcontext(), apart:
            prepared = super()._prepare_for_training(*args, **kwargs)
        if sharded:
            move_constants(self.model, self.args.device)
        if averaging:
            trained = self.accelerator.unwrap_model(self.model).named_parameters()
            weights = {name: weight for name, weight in trained if weight.requires_grad}
            self.outer = OuterOptimizer(averaging, weights, self.workers, self._momentum_of)
        self._kept = keep_walks(prepared[0])
        return prepared

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        tokens: Any = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if not torch.is_tensor(tokens) or not tokens.numel():
            return 0
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // tokens.numel()
        return tokens.numel() * self._flops_per_token

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(self._kept)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(self._kept, grad_norm=grad_norm)

    @property
    def gradient_sync(self) -> str | None:
        """When accumulated gradients are reduced over the ranks: `step`, as always under DDP, or `micro_step`. None:
        nothing is accumulated over several ranks."""
        if self.spec.ranks == 1 or self.spec.train.gradient_accumulation_steps == 1:
            return None
        if self.spec.train.averaging and not is_sharded(self.spec):
            return None
        return "micro_step" if self._gradient_kwargs.get("sync_each_batch") else "step"

    def sync_each_micro_step(self) -> None:
        self._gradient_kwargs["sync_each_batch"] = True

    @property
    def _gradient_kwargs(self) -> dict[str, Any]:
        return self.accelerator.gradient_state.plugin_kwargs  # Trainer reads it in every micro step

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's: tokens of an optimizer step over the ranks that average their gradients."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if self.spec.train.averaging and torch.is_tensor(count):
            count = self.workers.sum_within(count)
        return count

    @property
    def is_common(self) -> bool:
        """Whether all ranks are to hold the same weights after the optimizer step at hand."""
        averaging = self.spec.train.averaging
        return averaging is None or averaging.meets(self.state.global_step, self.state.max_steps)

    def average(self) -> None:
        """Do the outer step of periodic averaging, where the job has it. A collective, where `is_common`."""
        if self.outer:
            self.outer.step()
            self.sum_tokens()
