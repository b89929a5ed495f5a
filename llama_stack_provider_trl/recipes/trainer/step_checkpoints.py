"""Step checkpoints: Trainer's methods that save and load them, without its pickles and in the background."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import set_seed

from ...errors import JobFailure
from ...specs.events import CheckpointSaved, Reason
from ..checkpoint import optimizer_state, random_state
from ..checkpoint.fencing import FencingToken
from ..checkpoint.optimizer_state import reading
from ..checkpoint.step import Saver, load_random, load_state, load_weights, step_bytes
from ..distributed import ranks
from ..model.fsdp import accumulates_shards
from .data_order import DataOrder
from .optimization import Optimization

_STATE = "recipe_state.json"
"""In a step checkpoint: the position in the data, and other state that Trainer's own files lack. `row`: rows of the
epoch (0-based) that have been seen; at the end of an epoch, row 0 of the next one."""
_SCHEDULER = "scheduler.json"
_SCALER = "scaler.json"


def trained_batch_size(checkpoint: Path, world_size: int) -> int | None:
    """The rows of a micro batch with which an attempt on as many ranks wrote a checkpoint; None: it is not known, or it
    had another number of ranks."""
    try:
        state = json.loads((checkpoint / _STATE).read_text())
        same = state["world_size"] == world_size
        return int(state["batch_size"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class StepCheckpoints(DataOrder, Optimization):
    """A trainer that saves its state and resumes from it.

    Args:
        chooses_gradient_sync: the job leaves `gradient_sync` to the recipe: `spec` has what its memory permits.
        require_space: called with the bytes of a checkpoint before it is written; raises where they do not fit.
    """

    checkpoint_fields: Callable[[], dict[str, Any]]
    """The fields of a checkpoint event beside its path. Set by the callback that counts them, `JobCallback`."""
    _staging: Path | None = None

    def __init__(
        self,
        *,
        chooses_gradient_sync: bool,
        require_space: Callable[[int], None],
        fencing_token: FencingToken,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        spec = self.spec
        self.notes: dict[str, Any] = {}
        """Further state of the job that step checkpoints hold, as JSON values; a resumed job finds it here."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Called on every rank before a step checkpoint is copied. Set by `JobCallback` where there is something to
        do."""
        self.saver = Saver(spec, self.args.device, self._writer, fencing_token, self.workers)
        workers = self.workers.count if spec.train.averaging else 0
        self.step_bytes = step_bytes(self.model, spec.train.optimizer, workers)
        """The approximate size of a step checkpoint."""
        self._require_space, self._chooses_gradient_sync = require_space, chooses_gradient_sync
        self._restored: dict[str, Any] = {}
        """The content of `_STATE` in the checkpoint that training resumes from."""

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Start to write `checkpoint-N` in a staging directory; the event follows when it is complete in its place.

        Returns when its content is copied. Waits for the checkpoint before, if that is still being written.
        """
        step = self.state.global_step
        self.before_checkpoint()
        self.saver.wait(due=step)
        is_first = ranks.rank() == 0
        self._staging = Path(self.args.output_dir) / self.saver.fencing_token.private_name(".saving")
        written = self._staging / f"checkpoint-{step}"
        try:
            if is_first:
                self.saver.fencing_token.check()
                self._require_space(self.step_bytes)
                shutil.rmtree(self._staging, ignore_errors=True)
            ranks.barrier()
            # Trainer's own method writes the small files: TRL's would also write a model card.
            Trainer._save_checkpoint(self, model, trial)
            if is_first:
                (written / _STATE).write_text(json.dumps(self._recipe_state()))
            fields = self.checkpoint_fields()
            self.saver.save(
                self.accelerator.unwrap_model(self.model),
                self._inner_optimizer,
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

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Make the directory of a step checkpoint; the weights are written in the background."""
        if ranks.rank() == 0:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler's state; the optimizer's is written in the background."""
        if ranks.rank() == 0:
            (Path(output_dir) / _SCHEDULER).write_text(json.dumps(self.lr_scheduler.state_dict()))

    def _save_scaler(self, output_dir: str) -> None:
        if ranks.rank() == 0 and self.accelerator.scaler is not None:
            (Path(output_dir) / _SCALER).write_text(json.dumps(self.accelerator.scaler.state_dict()))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: the random numbers of all ranks are written in the background."""

    def _recipe_state(self) -> dict[str, Any]:
        position = self._train_sampler.position(self.state.global_step)
        return {
            "num_tokens": float(self.num_tokens),
            "step": self.state.global_step,
            "epoch": position.epoch,
            "row": position.row,
            "rows_per_step": self.batch_plan.rows_per_step,
            "batch_size": self.batch_plan.batch_size,
            "world_size": ranks.world_size(),
            "gradient_sync": self.gradient_sync,
            "notes": self.notes,
        }

    def restore(self, checkpoint: Path) -> int:
        """Restore the state of a step checkpoint that `train(resume_from_checkpoint=...)` does not; returns its step.
        Raises JobFailure: invalid_request, where its optimizer steps took another number of rows: the position in the
        data would differ, and so would every later number."""
        self._restored = json.loads((checkpoint / _STATE).read_text())
        rows = self._restored.get("rows_per_step", self.batch_plan.rows_per_step)
        if rows != self.batch_plan.rows_per_step:
            raise JobFailure(
                Reason.invalid_request,
                f"{checkpoint} was trained with {rows} rows per optimizer step, this job takes "
                f"{self.batch_plan.rows_per_step}: choose batch_size x gradient_accumulation_steps x ranks / "
                f"context_parallel_size = {rows}",
            )
        # As an integer: a float would make the count one of float32, which skips numbers beyond 2 ** 24.
        self.num_tokens += int(self._restored["num_tokens"])
        may_choose = self._chooses_gradient_sync and accumulates_shards(self.spec)
        if may_choose and self._has_same_ranks and self._restored.get("gradient_sync") != "step":
            # Sums in another order round differently: every later number would differ from an uninterrupted job's.
            self.sync_each_micro_step()
        requested = self.spec.resume_from
        if requested is None or checkpoint != requested.path:  # another job's notes are about its own evaluations
            self.notes.update(self._restored.get("notes", {}))
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])

    @property
    def _has_same_ranks(self) -> bool:
        return bool(self._restored.get("world_size", ranks.world_size()) == ranks.world_size())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Read safetensors only. Trainer's own method also reads pickles."""
        target = self.accelerator.unwrap_model(self.model if model is None else model)
        load_weights(target, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model, self._momentum_of = self.accelerator.unwrap_model(self.model), Path(checkpoint)
        saved = optimizer_state.read_optimizer(self._momentum_of, self.workers.own)
        optimizer_state.restore(model, self._inner_optimizer, saved, self._momentum_of)
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
        if not self._has_same_ranks:
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

    @property
    def _inner_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of a step checkpoint on rank 0's disk into the model, after training; a collective."""
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        if self.saver.disks.is_shared:
            self._load_from_checkpoint(str(checkpoint), model)
        else:
            load_weights(self.accelerator.unwrap_model(model), checkpoint, from_first=True)
