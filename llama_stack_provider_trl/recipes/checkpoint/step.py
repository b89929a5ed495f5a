"""Step checkpoints, from which a job resumes after a crash, a pause or a restart, on any number of ranks.

`checkpoint-N` holds safetensors, JSON and text only, so that reading one runs nothing (`checkpoint_files`):

- the trained weights as `model.safetensors` or `adapter_model.safetensors`, with configuration and tokenizer: what
  transformers and peft load, however many ranks wrote it (`recipes.checkpoint.shards`);
- `optimizer/state.safetensors` and `optimizer/state.json`: the optimizer's state by the names of the weights
  (`recipes.checkpoint.optimizer_state`);
- with periodic averaging `optimizer/worker-N.safetensors`, the state of worker N > 0, and the momentum of the averaged
  steps, `optimizer/outer.safetensors`;
- `scheduler.json`, `scaler.json` (fp16) and `trainer_state.json`: schedule, loss scaling, counters;
- `rng_state_N.json`: the random numbers of rank N (`recipes.checkpoint.random_state`);
- `recipe_state.json`: the position in the data, counted in rows;
- `manifest.json`: size and sha256 of every file.

Training continues while the files are written, from a copy in CPU memory.

Checkpoints are on rank 0's disk. Ranks of machines that do not see it send their rows and their random numbers from
memory, and write nothing (`recipes.checkpoint.transfer`).
"""

from __future__ import annotations

import copy
import errno
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ... import faults
from ...errors import JobFailure
from ...specs.events import CheckpointDamaged, EventWriter, NullEventWriter, Reason, Warned
from ...specs.job import JobSpec, OptimizerSpec
from ...specs.optimizer_state import elements_in_8_bits, moment_bytes
from ...system.files import (
    MANIFEST,
    damage,
    file_names,
    free_bytes,
    point_latest,
    put_in_place,
    set_aside,
    sha256_of,
    write_manifest,
)
from ..distributed import ranks
from ..distributed.heartbeat import heartbeat
from ..distributed.workers import Workers
from ..model.fsdp import reshard
from ..model.saving import write_configuration
from . import optimizer_state, shards, transfer
from .adapter_card import write_card
from .fencing import FencingToken
from .host_copy import HostCopy
from .optimizer_state import reading
from .transfer import Disks
from .weights import adapter_tensors

_RANDOM = "rng_state_{}.json"
"""By rank."""
_UPLOAD_POLL_INTERVAL = 0.5
"""Seconds between two reads of the number of pending uploads."""
_UPLOAD_GRACE = 5.0
"""Seconds in which an agent notices the last checkpoint, and removes what was uploaded."""
_LONG_WAIT = 1.0
"""Seconds of waiting for the previous checkpoint from which on the job is warned."""

type Model = PreTrainedModel | PeftModel


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint in CPU memory; of sharded tensors this rank's parts."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """By the names of the safetensors files and the names there."""
    optimizer: str
    """The JSON of the optimizer's state."""
    random: Mapping[str, Any]
    """This rank's random numbers."""
    generation: GenerationConfig | None
    """How the model generates; None: it cannot. In the model itself it is put aside while that answers prompts of the
    next step."""


class Saver:
    """Writes one checkpoint at a time in a thread of its own, from a copy that training does not touch.

    The copy takes as much CPU memory as the trained weights and the optimizer's state (of sharded ones, this rank's
    parts). It is reused, so that there is never more than one.

    Every rank has a saver, and calls the same methods in the same order. The threads communicate over a process group
    of their own.
    """

    def __init__(
        self,
        spec: JobSpec,
        device: torch.device,
        writer: EventWriter,
        fencing_token: FencingToken | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.spec, self._device, self.writer = spec, device, writer
        self._workers = workers or Workers(ranks.world_size())
        self.fencing_token = fencing_token or FencingToken()
        self._copy = HostCopy(device)
        self.disks = transfer.find_disks(spec.checkpoint_dir)
        self._group = ranks.new_cpu_group()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_warned = False

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        tokenizer: PreTrainedTokenizerBase,
        random: Mapping[str, Any],
        staging: Path,
        announce: Callable[[Path, float], None],
        momentum: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Copy the content of a checkpoint, and return; it is written in the background.

        Args:
            staging: directory of the small files, `.saving/checkpoint-N`; it becomes `checkpoint-N`.
            announce: called on rank 0 with the checkpoint's path, and the seconds since its copy was complete, when it
                is complete on disk.
            momentum: of the averaged steps, by the names of the weights; None: gradients are reduced in every step.
        """
        assert self._thread is None, "one at a time: wait first"
        weights = named_weights(model)  # first: it reshards, after which the parameters are those of the optimizer
        state = optimizer_state.state_of(model, optimizer)
        tensors = {weights_name(model): weights, optimizer_state.tensors_of(self._workers.own): state.tensors}
        if momentum is not None:
            tensors[optimizer_state.OUTER] = momentum
        generation = copy.deepcopy(getattr(model, "generation_config", None))
        snapshot = Snapshot(self._copy.take(tensors), state.document, random, generation)
        copied_at = time.monotonic()

        def work() -> None:
            try:
                if self._device.type == "cuda":
                    # A new thread is on GPU 0, where any use of CUDA would open a context: 534 MiB for each rank.
                    torch.cuda.set_device(self._device)
                self._write(snapshot, model, tokenizer, staging)
                ranks.on_all_ranks(
                    lambda: self._finish(staging, lambda target: announce(target, time.monotonic() - copied_at)),
                    self._group,
                )
            except BaseException as error:
                faults.reach(f"unsaved-{ranks.rank()}")
                self._error = error
            finally:  # incomplete files must not keep a disk full
                if self.disks.cleans_up:
                    shutil.rmtree(staging.parent, ignore_errors=True)

        self._thread = threading.Thread(target=work, name=f"saves {staging.name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the background thread, if there is one. A collective, after the same step on every rank.

        Does not wait for a checkpoint that is being written.
        """
        # All ranks stop after the same step. A rank that failed and noticed it a step later than the others would wait
        # for them in that step's collectives, and its reason would be lost.
        if self._thread is not None and ranks.any_rank(self._error is not None or not self.busy):
            self.wait()

    def wait(self, due: int | None = None) -> None:
        """Return when no checkpoint is being written; raise its error, if there is one.

        Args:
            due: the step whose checkpoint waits for the previous one; a long wait becomes a warning of the job.
        """
        if self._thread is None:
            return
        began = time.monotonic()
        with heartbeat(self.writer):
            self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        waited = time.monotonic() - began
        if due is not None and waited > _LONG_WAIT and not self._has_warned:
            self._has_warned = True
            message = (
                "checkpoints are due faster than the disk takes them, and training waits: raise save_steps "
                f"(first at step {due}, for {waited:.0f} s)"
            )
            self.writer.write(Warned(message=message))

    def finish(self) -> None:
        """After the last checkpoint: wait for it as `wait` does, and free the memory of the copy."""
        self.wait()
        self._copy.close()

    def abandon(self) -> None:
        """After a failure: wait until the checkpoint that is being written is complete or has failed."""
        if self._thread is not None:
            # Connections to a lost rank break, so this ends; the limit is for a disk that hangs.
            self._thread.join(60.0)

    def _write(self, snapshot: Snapshot, model: Model, tokenizer: PreTrainedTokenizerBase, staging: Path) -> None:
        """Write this rank's parts, in phases: each begins when all ranks have completed the previous one."""

        def begin() -> Mapping[str, Any]:
            if ranks.rank() == 0:
                # Without weights: the configuration and other files of a model that transformers loads.
                if isinstance(model, PeftModel):
                    model.save_pretrained(
                        staging,
                        selected_adapters=["default"],
                        state_dict={**_untrained(model), **_whole_modules(model)},
                        save_embedding_layers=False,
                    )
                    write_card(staging, self.spec)
                else:
                    write_configuration(model, staging)
                    if snapshot.generation is not None:
                        snapshot.generation.save_pretrained(staging)
                tokenizer.save_pretrained(staging)
                (staging / optimizer_state.VALUES).parent.mkdir(exist_ok=True)
                (staging / optimizer_state.VALUES).write_text(snapshot.optimizer)
                for name, tensors in snapshot.tensors.items():
                    shards.reserve(staging / name, tensors)
                for worker in range(1, self._workers.count):  # all have the same tensors
                    name = optimizer_state.tensors_of(worker)
                    shards.reserve(staging / name, snapshot.tensors[optimizer_state.TENSORS])
            return snapshot.random

        states = ranks.on_all_ranks(begin, self._group)
        seeing, workers = self.disks.with_first, self._workers
        writer = seeing.index(ranks.rank()) if self.disks.sees_first else None
        own = optimizer_state.tensors_of(workers.own)

        def parts(name: str) -> Iterator[tuple[int, torch.Tensor]]:
            if workers.count == 1:
                return shards.parts_of(snapshot.tensors[name], writer, len(seeing))
            if name != own and workers.own:
                return iter(())  # the first worker writes what all have alike
            return shards.parts_of(snapshot.tensors[name], workers.position, workers.size)

        def fill() -> None:
            if ranks.rank() == 0:
                for rank, state in enumerate(states):
                    (staging / _RANDOM.format(rank)).write_text(json.dumps(state))
            if self.disks.sees_first:
                for name in snapshot.tensors:
                    shards.fill(staging / name, parts(name))

        ranks.on_all_ranks(fill, self._group)
        if not self.disks.is_shared:
            names = [[] if rank in seeing else self._names(snapshot, rank) for rank in range(ranks.world_size())]
            pieces = chain.from_iterable(transfer.in_pieces(name, parts(name)) for name in snapshot.tensors)
            ranks.on_all_ranks(lambda: transfer.send_to_first(pieces, names, staging, self._group), self._group)

    def _names(self, snapshot: Snapshot, rank: int) -> list[str]:
        own, theirs = (optimizer_state.tensors_of(number // self._workers.size) for number in (ranks.rank(), rank))
        return [theirs if name == own else name for name in snapshot.tensors]

    def _finish(self, staging: Path, announce: Callable[[Path], None]) -> None:
        """Compute checksums, each rank of some files; then rank 0 moves the checkpoint into place."""
        step = staging.name.rpartition("-")[2]
        digests = {}
        for found in ranks.on_all_ranks(
            lambda: _digests(staging, self.disks) if self.disks.sees_first else {}, self._group
        ):
            digests.update(found)
        if ranks.rank() == 0:
            faults.reach(f"saving-{step}")
            write_manifest(staging, digests)
            target = staging.parent.parent / staging.name
            put_in_place(staging, target, self.fencing_token.check)
            point_latest(target.parent, target.name)
            faults.reach(f"saved-{step}")
            announce(target)
            faults.reach(f"announced-{step}")


def named_weights(model: Model) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's file by name: those of the adapter, else all; of tied ones the first."""
    reshard(model)
    if isinstance(model, PeftModel):
        return dict(get_peft_model_state_dict(model, state_dict=adapter_tensors(model), save_embedding_layers=False))
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def weights_name(model: Model) -> str:
    return "adapter_model.safetensors" if isinstance(model, PeftModel) else "model.safetensors"


def load_state(checkpoint: Path, name: str) -> dict[str, Any] | None:
    """A small state, such as the scheduler's, by the name of its JSON file; None: the checkpoint has none. Raises
    JobFailure: invalid_request, where it is malformed."""
    path = checkpoint / name
    with reading(path):
        return dict(json.loads(path.read_text())) if path.exists() else None


def load_random(checkpoint: Path) -> dict[str, Any] | None:
    """This rank's random numbers, as `recipes.checkpoint.random_state` restores them; None: the checkpoint has none.
    Raises JobFailure: invalid_request, where they are malformed."""
    return load_state(checkpoint, _RANDOM.format(ranks.rank()))


def load_weights(model: Model, checkpoint: Path, *, from_first: bool = False) -> None:
    """Read the trained weights into a model, each rank its parts.

    Args:
        from_first: the checkpoint is on rank 0's disk, and others may not see it.
    """
    path, weights = checkpoint / weights_name(model), named_weights(model)
    if from_first:
        shards.read_from_first(path, weights, ranks.broadcast_tensor)
    else:
        shards.read_into(path, weights)


def first_undamaged(
    candidates: Iterable[Path], writer: EventWriter, disks: Disks, *, on_first_only: bool = False
) -> Path | None:
    """The first undamaged checkpoint; damaged ones before it are set aside and reported.

    A collective: every rank verifies some of the files. Raises JobFailure: rank_failed, where only another machine's
    copy is damaged; that copy is set aside.

    Args:
        candidates: each machine's own paths of the same checkpoints.
        on_first_only: only rank 0's disk has them; otherwise every disk has its own copies, which are verified, too.
    """
    for checkpoint in candidates:
        here = None if on_first_only and not disks.sees_first else _damage(checkpoint, disks)
        everywhere = ranks.gather_all((here, socket.gethostname()))
        found = [everywhere[rank][0] for rank in disks.with_first if everywhere[rank][0]]
        elsewhere = [(damage, host) for damage, host in everywhere if damage]
        if not elsewhere:
            return checkpoint
        if not found:
            if disks.cleans_up and not disks.sees_first and here:
                set_aside(checkpoint)
            damaged, host = elsewhere[0]
            raise JobFailure(
                Reason.rank_failed,
                f"the copy of {checkpoint.name} on {host} is damaged ({damaged}), the one of rank 0's machine is not; "
                "it was set aside there: the next attempt copies it again",
            )
        if ranks.rank() == 0:
            aside = set_aside(checkpoint)
            place = f"it is kept as {aside}" if aside else "it is gone"
            message = f"checkpoint {checkpoint} is damaged ({found[0]}) and was skipped; {place}"
            writer.write(CheckpointDamaged(path=checkpoint, message=message), durable=True)
        ranks.barrier()
    return None


def need_space(spec: JobSpec, num_bytes: int, uploads: Path | None = None, writer: EventWriter | None = None) -> None:
    """Return if `num_bytes` more leave `min_free_bytes` free on the disk of the checkpoints.

    Waits while checkpoints are uploaded to the service, since the agent removes them here afterwards. Raises OSError:
    as a full disk does.

    Args:
        writer: gets a warning before a wait.
    """
    writer = writer or NullEventWriter()
    has_warned, patience = False, _UPLOAD_GRACE
    while (free := free_bytes(spec.checkpoint_dir)) < num_bytes + spec.lifecycle.min_free_bytes:
        shortage = (
            f"the next checkpoint takes about {num_bytes >> 20} MiB in {spec.checkpoint_dir}, {free >> 20} MiB are "
            f"free and {spec.lifecycle.min_free_bytes >> 20} MiB must stay free"
        )
        waiting = _uploads(uploads)
        if waiting is None or patience <= 0:
            raise OSError(errno.ENOSPC, shortage)
        if waiting and not has_warned:
            has_warned = True
            message = f"{shortage}: training waits until {waiting} checkpoints have been uploaded; raise save_steps"
            writer.write(Warned(message=message))
        patience = _UPLOAD_GRACE if waiting else patience - _UPLOAD_POLL_INTERVAL
        writer.heartbeat()  # the agent ends the job if the uploads fail
        time.sleep(_UPLOAD_POLL_INTERVAL)


def _uploads(path: Path | None) -> int | None:
    """Number of pending uploads; None: checkpoints of this job are not uploaded."""
    try:
        return None if path is None else int(path.read_text())
    except FileNotFoundError:
        return None


def step_bytes(model: torch.nn.Module, optimizer: OptimizerSpec, workers: int = 0) -> int:
    """The approximate size of a step checkpoint: the trained weights and the optimizer's moments of them.

    Args:
        workers: with periodic averaging, how many have moments of their own; 0: without it.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    untrained = _untrained(model) if isinstance(model, PeftModel) else {}
    in_8_bits = elements_in_8_bits(weight.shape for weight in trained)
    moments = moment_bytes(optimizer.name, sum(weight.numel() for weight in trained), in_8_bits)
    outer = 4 * sum(weight.numel() for weight in trained) if workers else 0
    return sum(weight.nbytes for weight in (*trained, *untrained.values())) + moments * max(1, workers) + outer


def _untrained(model: PeftModel) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that are not trained. PEFT saves no VeRA adapter without them."""
    return {name: weight for name, weight in adapter_tensors(model).items() if not weight.requires_grad}


def _whole_modules(model: PeftModel) -> dict[str, torch.Tensor]:
    """Empty tensors for the modules that are trained as they are, such as the head of a reward model: PEFT saves no
    adapter without them. The file gets their values when it is written."""
    return {name: torch.empty(0) for name in adapter_tensors(model) if ".modules_to_save." in name}


def _digests(directory: Path, disks: Disks) -> dict[str, str]:
    return {name: sha256_of(directory / name) for name in _own_files(directory, disks)}


def _damage(checkpoint: Path, disks: Disks) -> str | None:
    try:
        return damage(checkpoint, of=_own_files(checkpoint, disks))
    except OSError as error:
        return str(error)


def _own_files(directory: Path, disks: Disks) -> Sequence[str]:
    return disks.part_of([name for name in file_names(directory) if name != MANIFEST])
