"""What our SFT and DPO trainers share beyond TRL's: the sampler, the optimizer and whole-or-nothing checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from trl.trainer.utils import add_fused_lm_head

from .. import faults
from ..files import put_in_place, write_manifest
from . import ranks
from .arguments import optimizer_class, scheduler_arguments
from .packing import num_rows
from .sampling import EpochSampler
from .spec import JobSpec

_STATE = "recipe_state.json"
"""In a step checkpoint: what the recipe must know to go on and Trainer's own files do not say."""


class RecipeTrainer(Trainer):
    """A mixin that goes before a TRL trainer in the bases; `bind` must be called before `train`."""

    spec: JobSpec
    saved_checkpoint: Path | None = None
    """The checkpoint directory that was written last, complete and fsynced."""
    need_space: Callable[[], None]
    """Called before a checkpoint is written; raises where it would not fit."""
    notes: dict[str, Any]
    """What else a step checkpoint takes along (JSON): a resumed job finds it here."""
    _staging: Path | None = None
    _evaluated: list[torch.Tensor]
    _train_sampler: EpochSampler

    head_outputs: tuple[str, ...]
    """What the fused head computes per token; TRL also asks for entropy, one more pass over the vocabulary."""

    def bind(self, spec: JobSpec) -> None:
        """Attach the job; sets the optimizer that Trainer will create when training starts."""
        self.spec, self.notes = spec, {}
        self.optimizer_cls_and_kwargs = optimizer_class(spec, self.args.device)
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        add_fused_lm_head(policy, outputs=self.head_outputs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's, with the part of it that only the number of steps decides.

        Raises:
            JobFailure: invalid_request, where the job is too short for its warmup and decay.
        """
        self.args.lr_scheduler_kwargs = scheduler_arguments(self.spec.optimizer, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Turn the metrics, kept as tensors so that no step waits for the device, into numbers."""
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        for name, values in metrics.items():
            metrics[name] = [float(value) for value in values]
        if mode == "train":
            metrics["num_tokens"] = [float(self._total_train_tokens)]
        super().log(logs, start_time)

    @property
    def num_rows(self) -> int:
        """Rows that are trained on; of packed sequences, the rows in them."""
        return num_rows(self.train_dataset) - self._fillers()

    @staticmethod
    def _rows_of(dataset: Any) -> int:
        return len(dataset) - RecipeTrainer._fillers()

    @staticmethod
    def _fillers() -> int:
        return 1 if ranks.world_size() > 1 else 0

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        spec = self.spec
        rows_per_step = spec.batch_size * spec.gradient_accumulation_steps * self.args.world_size
        cap = None if spec.max_steps_per_epoch is None else spec.max_steps_per_epoch * rows_per_step
        dataset = self.train_dataset if train_dataset is None else train_dataset
        self._train_sampler = self._sampler(dataset, cap, shuffle=spec.shuffle)
        return self._train_sampler

    def begin_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch it is. accelerate's own way to it ends at a dataloader that skips batches of
        several ranks: a job resumed in the middle of a later epoch would go on with the first epoch's order."""
        self._train_sampler.set_epoch(epoch)

    def _get_eval_sampler(self, eval_dataset: Any) -> EpochSampler:
        return self._sampler(eval_dataset, None, shuffle=False)

    def _sampler(self, dataset: Any, cap: int | None, *, shuffle: bool) -> EpochSampler:
        world = self.args.world_size
        shares = world * self.spec.batch_size if world > 1 else 1
        return EpochSampler(self._rows_of(dataset), cap, shuffle=shuffle, seed=self.spec.seed, multiple_of=shares)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with a loss that does not depend on how the rows were dealt out: the mean over all tokens (SFT)
        or pairs (DPO), where Trainer takes the mean of the batches' means."""
        self._evaluated = []
        output = super().evaluation_loop(*args, **kwargs)
        total, count = self.accelerator.reduce(torch.stack(self._evaluated).sum(dim=0))
        output.metrics["eval_loss"] = float(total / count.clamp(min=1))
        return output

    def note_evaluated(self, loss: torch.Tensor, count: torch.Tensor) -> None:
        """Add a batch to the running evaluation: the sum of the losses of `count` tokens or pairs."""
        self._evaluated.append(torch.stack([loss.detach().float(), count.float()]))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write `checkpoint-N` beside its final place, fsync it, then rename: a directory of that name is complete.

        Every rank writes its part; rank 0 puts the whole in place once all have.
        """
        step = self.state.global_step
        self._staging = Path(self.args.output_dir) / ".saving"
        written = self._staging / f"checkpoint-{step}"
        target = Path(self.args.output_dir) / written.name
        is_first = ranks.rank() == 0
        try:
            if is_first:
                self.need_space()
                shutil.rmtree(self._staging, ignore_errors=True)
            ranks.wait_for_all()
            # Trainer's own method: TRL's would also write a model card that names us as nothing but "trl".
            Trainer._save_checkpoint(self, model, trial)
            ranks.wait_for_all()
            if is_first:
                (written / _STATE).write_text(json.dumps({**self.notes, "num_tokens": float(self._total_train_tokens)}))
                faults.reach(f"saving-{step}")
                write_manifest(written)
                put_in_place(written, target)
            ranks.wait_for_all()
        finally:  # a full disk must not stay full because of us
            if is_first:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        self.saved_checkpoint = target
        faults.reach(f"saved-{step}")

    def take_up(self, checkpoint: Path) -> int:
        """Take over from a step checkpoint what `train(resume_from_checkpoint=...)` does not; returns its step."""
        state = json.loads((checkpoint / _STATE).read_text())
        self._total_train_tokens += state.pop("num_tokens")
        self.notes.update(state)
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])

    def load_weights(self, checkpoint: Path) -> None:
        """Put the weights of a step checkpoint of this job into the model, after training; every rank must call it."""
        self._load_from_checkpoint(str(checkpoint), self.model_wrapped if self.is_fsdp_enabled else self.model)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)
