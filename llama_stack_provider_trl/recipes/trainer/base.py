"""What our SFT and DPO trainers share beyond TRL's: the sampler, the optimizer, and where checkpoints come in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer_utils import set_seed
from trl.trainer.utils import add_fused_lm_head

from ...errors import JobFailure
from ...specs.events import CheckpointSaved, EventWriter, Reason
from ...specs.job import JobSpec
from ..checkpoint import random_state
from ..checkpoint.fencing import FencingToken
from ..checkpoint.optimizer_state import reading
from ..checkpoint.step import Saver, load_optimizer, load_random, load_state, load_weights
from ..checkpoint.transfer import Disks
from ..data.packing import num_rows
from ..data.sampling import BatchPlan, EpochSampler
from ..distributed import ranks
from .arguments import optimizer_class, scheduler_arguments

_STATE = "recipe_state.json"
"""In a step checkpoint: the position in the data, and what else Trainer's own files do not say. `row`: rows of the
epoch (0-based) that have been seen; where an epoch's rows are used up, the next epoch's row 0."""
_SCHEDULER = "scheduler.json"
_SCALER = "scaler.json"


class RecipeTrainer(Trainer):
    """A mixin that goes before a TRL trainer in the bases; `bind` must be called before `train`."""

    spec: JobSpec
    ref_model: torch.nn.Module | None = None
    """The model that DPO's policy is compared with, where it is not the policy itself."""
    need_space: Callable[[], None]
    """Called before a checkpoint is written; raises where it would not fit."""
    checkpoint_fields: Callable[[], dict[str, Any]]
    """What the event of a checkpoint says of the training as it stands, beside the checkpoint's place."""
    batch_plan: BatchPlan
    """How each optimizer step is shared out."""
    notes: dict[str, Any]
    """What else a step checkpoint takes along (JSON): a resumed job finds it here."""
    _saver: Saver
    _writer: EventWriter
    _restored: dict[str, Any]
    _staging: Path | None = None
    _evaluation_sums: list[torch.Tensor]
    _metric_sums: dict[str, dict[str, torch.Tensor]]
    """train or eval -> metric -> [sum, count]"""
    _train_sampler: EpochSampler

    head_outputs: tuple[str, ...]
    """What the fused head computes per token; TRL also asks for entropy, one more pass over the vocabulary."""

    def bind(
        self,
        spec: JobSpec,
        batch_plan: BatchPlan,
        writer: EventWriter,
        fencing_token: FencingToken | None = None,
    ) -> None:
        """Attach the job; sets the optimizer that Trainer will create when training starts."""
        self.spec, self.batch_plan, self._writer = spec, batch_plan, writer
        self._saver = Saver(spec, self.args.device, writer, fencing_token)
        self._restored, self.notes = {}, {}
        self._metric_sums = {"train": {}, "eval": {}}
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

    def add_metrics(self, sums: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        """Add a batch of all ranks to the metrics.

        They are kept as tensors, so that no step waits for the device, and divided when they are logged: a mean of the
        batches' means would depend on how rows are dealt out.

        Args:
            sums: by metric, over `count` tokens or pairs.
        """
        sums_by_metric = self._metric_sums["train" if self.model.training else "eval"]
        for name, total in sums.items():
            sums_by_metric[name] = sums_by_metric.get(name, 0) + torch.stack([total.float(), count.float()])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics added since the last call, each sum divided by its count."""
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        for name, (total, count) in self._metric_sums[mode].items():
            metrics[name] = [float(total / count.clamp(min=1))]
        self._metric_sums[mode].clear()
        if mode == "train":
            metrics["num_tokens"] = [float(self._total_train_tokens)]
        super().log(logs, start_time)

    @property
    def num_rows(self) -> int:
        """Rows that are trained on; of packed sequences, the rows in them."""
        return num_rows(self.train_dataset) - self.batch_plan.needs_filler

    def rows_of(self, dataset: Any) -> int:
        """Rows (or packed sequences) of a dataset that count: without the filler."""
        return len(dataset) - self.batch_plan.needs_filler

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        steps = self.spec.max_steps_per_epoch
        cap = None if steps is None else steps * self.batch_plan.rows_per_step
        dataset = self.train_dataset if train_dataset is None else train_dataset
        self._train_sampler = self._sampler(dataset, cap, shuffle=self.spec.shuffle, batch_plan=self.batch_plan)
        return self._train_sampler

    def begin_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch it is. accelerate's own way to it ends at a dataloader that skips batches of
        several ranks: a job resumed in the middle of a later epoch would go on with the first epoch's order."""
        self._train_sampler.set_epoch(epoch)

    def _get_eval_sampler(self, eval_dataset: Any) -> EpochSampler:
        return self._sampler(eval_dataset, None, shuffle=False)

    def _sampler(
        self, dataset: Any, cap: int | None, *, shuffle: bool, batch_plan: BatchPlan | None = None
    ) -> EpochSampler:
        world = self.args.world_size
        multiple = world * self.spec.batch_size if world > 1 else 1
        return EpochSampler(
            self.rows_of(dataset),
            cap,
            shuffle=shuffle,
            seed=self.spec.seed,
            multiple_of=multiple,
            batch_plan=batch_plan,
        )

    @property
    def rows_of_step(self) -> int:
        """Rows (SFT) or pairs (DPO) of the optimizer step at hand, over all ranks and micro steps."""
        return self._train_sampler.rows_of_step(self.state.global_step)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with a loss that does not depend on how the rows were dealt out: the mean over all tokens (SFT)
        or pairs (DPO), where Trainer takes the mean of the batches' means."""
        self._evaluation_sums = []
        output = super().evaluation_loop(*args, **kwargs)
        total, count = self.accelerator.reduce(torch.stack(self._evaluation_sums).sum(dim=0))
        output.metrics["eval_loss"] = float(total / count.clamp(min=1))
        return output

    def add_evaluation(self, loss: torch.Tensor, count: torch.Tensor) -> None:
        """Add a batch to the running evaluation: the sum of the losses of `count` tokens or pairs."""
        self._evaluation_sums.append(torch.stack([loss.detach().float(), count.float()]))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Begin to write `checkpoint-N`, beside its final place; it is announced when it is complete there.

        Returns when what it will hold is copied. A checkpoint that is still being written is waited for.
        """
        step = self.state.global_step
        self.finish_saving(due=step)
        is_first = ranks.rank() == 0
        self._staging = Path(self.args.output_dir) / self.fencing_token.private_name(".saving")
        written = self._staging / f"checkpoint-{step}"
        try:
            if is_first:
                self.fencing_token.check()
                self.need_space()
                shutil.rmtree(self._staging, ignore_errors=True)
            ranks.barrier()
            # Trainer's own method writes the small files: TRL's would also write a model card.
            Trainer._save_checkpoint(self, model, trial)
            if is_first:
                (written / _STATE).write_text(json.dumps(self._recipe_state()))
            fields = self.checkpoint_fields()
            self._saver.save(
                self.accelerator.unwrap_model(self.model),
                self._inner_optimizer(),
                self.processing_class,
                random_state.capture(self.args.device),
                written,
                lambda target: self._writer.write(CheckpointSaved(kind="step", path=target, **fields), durable=True),
            )
        except BaseException:
            if is_first:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise
        finally:
            self._staging = None

    @property
    def disks(self) -> Disks:
        """Who sees the disk that checkpoints are written to."""
        return self._saver.disks

    @property
    def fencing_token(self) -> FencingToken:
        """Whether this attempt may write there."""
        return self._saver.fencing_token

    def check_saving(self) -> None:
        """Raise what went wrong with a checkpoint in the background, if anything did."""
        self._saver.check()

    def finish_saving(self, due: int | None = None) -> None:
        """Wait until no checkpoint is being written; raise what went wrong."""
        self._saver.wait(due)

    def end_saving(self) -> None:
        """As `finish_saving`; there will be no other checkpoint."""
        self._saver.wait()
        self._saver.close()

    def abandon_saving(self) -> None:
        """Training has failed: let a checkpoint that is being written come to its end."""
        self._saver.abandon()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer calls it for a step checkpoint; the weights are written in the background."""
        if ranks.rank() == 0:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the scheduler's state; the optimizer's is written in the background."""
        if ranks.rank() == 0:
            (Path(output_dir) / _SCHEDULER).write_text(json.dumps(self.lr_scheduler.state_dict()))

    def _save_scaler(self, output_dir: str) -> None:
        """Writes the loss scaling of a job in fp16."""
        if ranks.rank() == 0 and self.accelerator.scaler is not None:
            (Path(output_dir) / _SCALER).write_text(json.dumps(self.accelerator.scaler.state_dict()))

    def _save_rng_state(self, output_dir: str) -> None:
        """Writes nothing: the random numbers of every rank travel from memory, and are written in the background."""

    def _recipe_state(self) -> dict[str, Any]:
        position = self._train_sampler.position(self.state.global_step)
        return {
            "num_tokens": float(self._total_train_tokens),
            "step": self.state.global_step,
            "epoch": position.epoch,
            "row": position.row,
            "rows_per_step": self.batch_plan.rows_per_step,
            "world_size": ranks.world_size(),
            "notes": self.notes,
        }

    def restore(self, checkpoint: Path) -> int:
        """Take over from a step checkpoint what `train(resume_from_checkpoint=...)` does not; returns its step.

        Raises:
            JobFailure: invalid_request, where its optimizer steps took another number of rows: the position in the data
                would be another one, and so would every number from here on.
        """
        self._restored = json.loads((checkpoint / _STATE).read_text())
        rows = self._restored.get("rows_per_step", self.batch_plan.rows_per_step)
        if rows != self.batch_plan.rows_per_step:
            raise JobFailure(
                Reason.invalid_request,
                f"{checkpoint} was trained with {rows} rows per optimizer step, this job takes "
                f"{self.batch_plan.rows_per_step}: choose batch_size x gradient_accumulation_steps x ranks = {rows}",
            )
        self._total_train_tokens += self._restored["num_tokens"]
        given = self.spec.resume_from
        if given is None or checkpoint != given.path:  # another job's notes are of its own evaluations
            self.notes.update(self._restored.get("notes", {}))
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Trainer's own would also read weights in pickles."""
        target = self.accelerator.unwrap_model(self.model if model is None else model)
        load_weights(target, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_optimizer(self.accelerator.unwrap_model(self.model), self._inner_optimizer(), Path(checkpoint))
        with self._restoring(checkpoint, _SCHEDULER) as state:
            if state is None:
                raise ValueError("it is missing")
            # The names that the scheduler has itself: it takes over whatever attribute it is given.
            self.lr_scheduler.load_state_dict({key: state[key] for key in self.lr_scheduler.state_dict()})

    def _load_scaler(self, checkpoint: str | None) -> None:
        """The loss scaling of a job in fp16; another job that resumes from its checkpoint may have none."""
        if checkpoint is None or self.accelerator.scaler is None:
            return
        with self._restoring(checkpoint, _SCALER) as state:
            if state:
                self.accelerator.scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """On as many ranks as saved them, each rank's random numbers continue; on others they begin anew, a function of
        seed, step and rank."""
        if checkpoint is None:
            return
        if self._restored.get("world_size", ranks.world_size()) != ranks.world_size():
            seed = (self.spec.seed * 1_000_003 + self.state.global_step) * 1009 + ranks.rank()
            return set_seed(seed % 2**32)
        state = load_random(Path(checkpoint), self.args.device)
        if state is not None:
            with reading(Path(checkpoint)):
                random_state.restore(state, self.args.device)

    @staticmethod
    @contextmanager
    def _restoring(checkpoint: str, name: str) -> Iterator[dict[str, Any] | None]:
        """A small state of a checkpoint, None where it has none; one that does not fit is refused by a sentence."""
        with reading(Path(checkpoint) / name):
            yield load_state(Path(checkpoint), name)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
        return optimizer

    def load_weights(self, checkpoint: Path) -> None:
        """Put the weights of a step checkpoint of this job, on rank 0's disk, into the model, after training; every
        rank must call it."""
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        if self.disks.is_shared:
            self._load_from_checkpoint(str(checkpoint), model)
        else:
            load_weights(self.accelerator.unwrap_model(model), checkpoint, from_first=True)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)
