"""The base of all our trainers, with what TRL's do not have: data order, optimizer, metrics and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer_utils import set_seed

from ...errors import JobFailure
from ...specs.events import CheckpointSaved, EventWriter, Reason, Warned
from ...specs.job import JobSpec
from ...specs.schedules import problem_of_warmup
from ..checkpoint import random_state
from ..checkpoint.fencing import FencingToken
from ..checkpoint.optimizer_state import reading
from ..checkpoint.step import Saver, load_optimizer, load_random, load_state, load_weights, step_bytes
from ..checkpoint.transfer import Disks
from ..data.lengths import num_rows, row_lengths
from ..data.sampling import BatchPlan, EpochSampler
from ..distributed import ranks
from ..model.adapters import continues, read_weights
from ..model.deferred import DeferredWeights
from ..model.fsdp import accumulates_shards, is_sharded, name_blocks, sharding_on_any_device
from ..model.quantization import keep_adapters_in_fp32, move_constants
from .arguments import optimizer_class, scheduler_arguments
from .averaging import OuterOptimizer, without_ddp, workers_of
from .trl_patches import fast_head, fuse_head, has_fast_head, keep_allocator_cache, weighs_tokens_alike

_STATE = "recipe_state.json"
"""In a step checkpoint: the position in the data, and other state that Trainer's own files lack. `row`: rows of the
epoch (0-based) that have been seen; at the end of an epoch, row 0 of the next one."""
_SCHEDULER = "scheduler.json"
_SCALER = "scaler.json"


class RecipeTrainer(Trainer):
    """A mixin before a TRL trainer in the bases: our data order, optimizer, metrics and checkpoints.

    Args:
        spec: as this attempt's ranks train it.
        batch_plan: the batches of each optimizer step.
        chooses_gradient_sync: the job leaves `gradient_sync` to the recipe: `spec` has what its memory permits.
        require_space: called with the bytes of a checkpoint before it is written; raises where they do not fit.
        fencing_token: whether this attempt may write into the job's checkpoint directory.
        deferred: the model's weights, where they stay in their files until it is sharded.
        arguments: of the TRL trainer.
    """

    ref_model: torch.nn.Module | None = None
    """The model that DPO's policy is compared with, where it is not the policy itself."""
    checkpoint_fields: Callable[[], dict[str, Any]]
    """The fields of a checkpoint event beside its path. Set by the callback that counts them, `JobCallback`."""
    head_outputs: tuple[str, ...]
    """What the fused head computes per token; empty: the model has no head over the vocabulary."""
    outer: OuterOptimizer | None = None
    """With periodic averaging, from the first step on."""
    _staging: Path | None = None
    _momentum_of: Path | None = None
    """The checkpoint that training resumes from."""
    evaluation_sums: dict[str, list[torch.Tensor]]
    """Sum and count of each batch of an evaluation, by part of the loss."""
    kept_metrics: dict[str, list[torch.Tensor]] | None = None
    """Not None: sum and count of each batch are kept here, by metric."""
    _train_sampler: EpochSampler
    sampler_class: type[EpochSampler] = EpochSampler

    def __init__(
        self,
        *,
        spec: JobSpec,
        batch_plan: BatchPlan,
        chooses_gradient_sync: bool = False,
        writer: EventWriter,
        require_space: Callable[[int], None],
        fencing_token: FencingToken,
        deferred: DeferredWeights | None = None,
        **arguments: Any,
    ) -> None:
        with sharding_on_any_device():
            super().__init__(**arguments)
        ranks.extend_timeouts()
        keep_allocator_cache(self)
        if spec.lora and spec.lora.quantize_base:
            keep_adapters_in_fp32(self.model)
            if continues(spec):
                read_weights(spec, self.model)  # TRL has rounded them to bf16
        self.spec, self.batch_plan, self._writer = spec, batch_plan, writer
        self._chooses_gradient_sync, self._deferred = chooses_gradient_sync, deferred
        self.notes: dict[str, Any] = {}
        """Further state of the job that step checkpoints hold, as JSON values; a resumed job finds it here."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Called on every rank before a step checkpoint is copied. Set by `JobCallback` where there is something to
        do."""
        self.workers = workers_of(spec)
        self._saver = Saver(spec, self.args.device, writer, fencing_token, self.workers)
        self._require_space = require_space
        self.step_bytes = step_bytes(
            self.model, spec.train.optimizer, self.workers.count if spec.train.averaging else 0
        )
        """The approximate size of a step checkpoint."""
        self._own_tokens = torch.zeros((), dtype=torch.float64)
        self._restored: dict[str, Any] = {}
        self._metric_sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        """train or eval -> metric -> [sum, count]"""
        # Trainer creates the optimizer from this when training starts.
        self.optimizer_cls_and_kwargs = optimizer_class(spec, self.args.device)
        if self.head_outputs:
            policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
            fuse_head(policy, outputs=self.head_outputs)

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
        return prepared

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create Trainer's scheduler, with the arguments that depend on the number of steps.

        Raises:
            JobFailure: invalid_request, where the job is too short for its warmup and decay.
        """
        if problem := problem_of_warmup(self.spec.train.optimizer, num_training_steps):
            self._writer.write(Warned(message=problem))
        self.args.lr_scheduler_kwargs = scheduler_arguments(self.spec.train.optimizer, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def scoring(self) -> AbstractContextManager[None]:
        """While this is open, forwards score batches with the head that is fastest on this device."""
        if not has_fast_head(self.spec, self.args.device.type):
            return nullcontext()
        return fast_head(alike=weighs_tokens_alike(self.spec))

    @property
    def is_common(self) -> bool:
        """Whether all ranks are to hold the same weights after the optimizer step at hand."""
        averaging = self.spec.train.averaging
        return averaging is None or averaging.meets(self.state.global_step, self.state.max_steps)

    def average(self) -> None:
        """Do the outer step of periodic averaging, where the job has it. A collective, where `is_common`."""
        if self.outer:
            self.outer.step()
            self._sum_logged({})

    def over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks. A collective; in training with periodic averaging this rank's own ones, which are summed
        over the ranks when they are logged."""
        if self.outer and self.model.training:
            return sums
        summed: torch.Tensor = self.accelerator.reduce(sums)
        return summed

    def add_tokens(self, count: torch.Tensor) -> None:
        """Add tokens, summed by `over_ranks`, to those that were trained on."""
        if self.outer:
            self._own_tokens = self._own_tokens.to(count.device) + count
        else:
            self._total_train_tokens += count

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's: tokens of an optimizer step over the ranks that average their gradients."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if self.spec.train.averaging and torch.is_tensor(count):
            count = self.workers.sum_within(count)
        return count

    def add_metrics(self, sums: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        """Add a batch of all ranks to the metrics.

        Sums stay tensors until they are logged, so that no step waits for the device. They are divided then, because
        a mean of the batches' means would depend on the batch plan.

        Args:
            sums: by metric, over `count` tokens or pairs.
        """
        sums_by_metric = self._metric_sums["train" if self.model.training else "eval"]
        for name, total in sums.items():
            of_batch = torch.stack([total.float(), count.float()])
            sums_by_metric[name] = sums_by_metric.get(name, 0) + of_batch
            if self.kept_metrics is not None:
                self.kept_metrics.setdefault(name, []).append(of_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics added since the last call, each sum divided by its count."""
        mode = "train" if self.model.training else "eval"
        if mode == "train" and self.outer:
            logs = self._sum_logged(logs)
        metrics = self._metrics[mode]
        for name, (total, count) in self._metric_sums[mode].items():
            metrics[name] = [float(total / count.clamp(min=1))]
        self._metric_sums[mode].clear()
        if mode == "train":
            metrics["num_tokens"] = [float(self._total_train_tokens)]
        super().log(logs, start_time)

    def _sum_logged(self, logs: dict[str, float]) -> dict[str, float]:
        """Sum over the ranks what each has counted on its own since the last call. A collective.

        Returns:
            The logs, with the mean of the gradients' norms and the bytes of the outer steps.
        """
        sums = self._metric_sums["train"] if logs else {}
        norm = torch.as_tensor(logs.get("grad_norm", 0.0))
        values = [self._own_tokens, norm, *(part for pair in sums.values() for part in pair)]
        own = torch.stack([value.to(self.args.device, torch.float64) for value in values])
        tokens, norms, *parts = self.accelerator.reduce(own)
        self._total_train_tokens += tokens.long()
        self._own_tokens = torch.zeros_like(tokens)
        for number, name in enumerate(sums):
            sums[name] = torch.stack(parts[2 * number : 2 * number + 2])
        found = dict(logs)
        if "grad_norm" in found:
            found["grad_norm"] = float(norms) / ranks.world_size()
        if "loss" in found and self.outer:
            found["exchanged_bytes"] = float(self.outer.take_bytes())
        return found

    @property
    def num_rows(self) -> int:
        """Rows that are trained on; of packed sequences, the rows in them."""
        return num_rows(self.train_dataset) - self.batch_plan.needs_filler

    def rows_of(self, dataset: Any) -> int:
        """Rows (or packed sequences) of a dataset that count: without the filler."""
        return len(dataset) - self.batch_plan.needs_filler

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        steps = self.spec.train.max_steps_per_epoch
        cap = None if steps is None else steps * self.batch_plan.rows_per_step
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = row_lengths(dataset) if self.groups_by_length else None
        self._train_sampler = self._sampler(
            dataset, cap, shuffle=self.spec.train.shuffle, batch_plan=self.batch_plan, lengths=lengths
        )
        return self._train_sampler

    def begin_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch. accelerate does not reach it through a dataloader that skips batches on several
        ranks: a job resumed in the middle of a later epoch would continue with the first epoch's order."""
        self._train_sampler.set_epoch(epoch)

    def _get_eval_sampler(self, eval_dataset: Any) -> EpochSampler:
        return self._sampler(eval_dataset, None, shuffle=False)

    def _sampler(self, dataset: Any, cap: int | None, *, shuffle: bool, **of_steps: Any) -> EpochSampler:
        world = self.args.world_size
        multiple = world * self.spec.data.batch_size if world > 1 else 1
        return self.sampler_class(
            self.rows_of(dataset), cap, shuffle=shuffle, seed=self.spec.data.seed, multiple_of=multiple, **of_steps
        )

    @property
    def groups_by_length(self) -> bool:
        """Whether the rows of an optimizer step are put into batches by length. Its numbers do not depend on which
        rows share a batch, unless something is averaged over a batch."""
        spec, batch_plan = self.spec, self.batch_plan
        has_batch_means = spec.method.has_batch_means or self.aux_loss_enabled or spec.data.packed
        several = batch_plan.world_size * batch_plan.accumulation_steps > 1
        # Rank 0 gets the longest rows of every step: one worker would never see short ones.
        return spec.data.group_by_length and several and not has_batch_means and spec.train.averaging is None

    @property
    def gradient_sync(self) -> str | None:
        """When accumulated gradients are reduced over the ranks: `step`, as always under DDP, or `micro_step`. None:
        nothing is accumulated over several ranks."""
        if self.spec.ranks == 1 or self.spec.train.gradient_accumulation_steps == 1:
            return None
        if self.spec.train.averaging and not is_sharded(self.spec):
            return None
        return "micro_step" if self._gradient_kwargs.get("sync_each_batch") else "step"

    @property
    def _gradient_kwargs(self) -> dict[str, Any]:
        found: dict[str, Any] = self.accelerator.gradient_state.plugin_kwargs  # Trainer reads it in every micro step
        return found

    @property
    def rows_of_step(self) -> int:
        """Rows (SFT) or pairs (DPO) of the optimizer step at hand, over all ranks and micro steps."""
        return self._train_sampler.rows_of_step(self.state.global_step)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with `eval_loss` as the mean over all tokens (SFT) or pairs (DPO). Trainer takes the mean of the
        batches' means, which depends on the batches."""
        self.evaluation_sums = {}
        output = super().evaluation_loop(*args, **kwargs)
        sums = torch.stack([torch.stack(batches).sum(dim=0) for batches in self.evaluation_sums.values()])
        totals, counts = self.accelerator.reduce(sums).unbind(dim=1)
        output.metrics["eval_loss"] = float((totals / counts.clamp(min=1)).sum())
        return output

    def add_evaluation(self, loss: torch.Tensor, count: torch.Tensor, part: str = "") -> None:
        """Add a batch to the running evaluation: the sum of the losses of `count` tokens or pairs.

        Args:
            part: of a loss with several parts, whose means are added.
        """
        batches = self.evaluation_sums.setdefault(part, [])
        batches.append(torch.stack([loss.detach().float(), count.float()]))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Start to write `checkpoint-N` in a staging directory; the event follows when it is complete in its place.

        Returns when its content is copied. Waits for the checkpoint before, if that is still being written.
        """
        step = self.state.global_step
        self.before_checkpoint()
        self.finish_saving(due=step)
        is_first = ranks.rank() == 0
        self._staging = Path(self.args.output_dir) / self.fencing_token.private_name(".saving")
        written = self._staging / f"checkpoint-{step}"
        try:
            if is_first:
                self.fencing_token.check()
                self._require_space(self.step_bytes)
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
                lambda target, seconds: self._writer.write(
                    CheckpointSaved(kind="step", path=target, write_seconds=seconds, **fields), durable=True
                ),
                None if self.outer is None else self.outer.momentum,
            )
        except BaseException:
            if is_first:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise
        finally:
            self._staging = None

    @property
    def disks(self) -> Disks:
        """Which ranks see the disk that checkpoints are written to."""
        return self._saver.disks

    @property
    def fencing_token(self) -> FencingToken:
        """Whether this attempt may write checkpoints."""
        return self._saver.fencing_token

    def check_saving(self) -> None:
        """Raise the error of a checkpoint that failed in the background, if there is one."""
        self._saver.check()

    def finish_saving(self, due: int | None = None) -> None:
        """Wait until no checkpoint is being written; raise its error, if there is one."""
        self._saver.wait(due)

    def end_saving(self) -> None:
        """Do what `finish_saving` does, after the last checkpoint."""
        self._saver.wait()
        self._saver.close()

    def abandon_saving(self) -> None:
        """After a failure of training: wait for the checkpoint that is being written, if there is one."""
        self._saver.abandon()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Make the directory of a step checkpoint; the weights are written in the background."""
        if ranks.rank() == 0:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler's state; the optimizer's is written in the background."""
        if ranks.rank() == 0:
            (Path(output_dir) / _SCHEDULER).write_text(json.dumps(self.lr_scheduler.state_dict()))

    def _save_scaler(self, output_dir: str) -> None:
        """Write the loss scaling of a job in fp16."""
        if ranks.rank() == 0 and self.accelerator.scaler is not None:
            (Path(output_dir) / _SCALER).write_text(json.dumps(self.accelerator.scaler.state_dict()))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: the random numbers of all ranks are written in the background."""

    def _recipe_state(self) -> dict[str, Any]:
        position = self._train_sampler.position(self.state.global_step)
        return {
            "num_tokens": float(self._total_train_tokens),
            "step": self.state.global_step,
            "epoch": position.epoch,
            "row": position.row,
            "rows_per_step": self.batch_plan.rows_per_step,
            "world_size": ranks.world_size(),
            "gradient_sync": self.gradient_sync,
            "notes": self.notes,
        }

    def restore(self, checkpoint: Path) -> int:
        """Restore the state of a step checkpoint that `train(resume_from_checkpoint=...)` does not; returns its step.

        Raises:
            JobFailure: invalid_request, where its optimizer steps took another number of rows: the position in the data
                would differ, and so would every later number.
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
        may_choose = self._chooses_gradient_sync and accumulates_shards(self.spec)
        same_ranks = self._restored.get("world_size", ranks.world_size()) == ranks.world_size()
        if may_choose and same_ranks and self._restored.get("gradient_sync") != "step":
            # Sums in another order round differently: every later number would differ from an uninterrupted job's.
            self._gradient_kwargs["sync_each_batch"] = True
        given = self.spec.resume_from
        if given is None or checkpoint != given.path:  # another job's notes are about its own evaluations
            self.notes.update(self._restored.get("notes", {}))
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Read safetensors only. Trainer's own method also reads pickles."""
        target = self.accelerator.unwrap_model(self.model if model is None else model)
        load_weights(target, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model, self._momentum_of = self.accelerator.unwrap_model(self.model), Path(checkpoint)
        load_optimizer(model, self._inner_optimizer(), self._momentum_of, self.workers.own)
        with self._restoring(checkpoint, _SCHEDULER) as state:
            if state is None:
                raise ValueError("it is missing")
            # Only names that the scheduler has: it would set any attribute that it is given.
            self.lr_scheduler.load_state_dict({key: state[key] for key in self.lr_scheduler.state_dict()})

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore the loss scaling of a job in fp16; a checkpoint of another job may have none."""
        if checkpoint is None or self.accelerator.scaler is None:
            return
        with self._restoring(checkpoint, _SCALER) as state:
            if state:
                self.accelerator.scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's random numbers; with another number of ranks, seed them from seed, step and rank."""
        if checkpoint is None:
            return
        if self._restored.get("world_size", ranks.world_size()) != ranks.world_size():
            seed = (self.spec.data.seed * 1_000_003 + self.state.global_step) * 1009 + ranks.rank()
            return set_seed(seed % 2**32)
        state = load_random(Path(checkpoint))
        if state is not None:
            with reading(Path(checkpoint)):
                random_state.restore(state, self.args.device)

    @staticmethod
    @contextmanager
    def _restoring(checkpoint: str, name: str) -> Iterator[dict[str, Any] | None]:
        """A small state of a checkpoint, None where it has none. An error while this is open names the file."""
        with reading(Path(checkpoint) / name):
            yield load_state(Path(checkpoint), name)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
        return optimizer

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of a step checkpoint on rank 0's disk into the model, after training; a collective."""
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        if self.disks.is_shared:
            self._load_from_checkpoint(str(checkpoint), model)
        else:
            load_weights(self.accelerator.unwrap_model(model), checkpoint, from_first=True)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)
