"""Answers the prompts of a job that trains by vLLM, with the weights as they are in each optimizer step.

Each rank has a vLLM of its own, which answers the rank's prompts, or several ranks have one, whose model is divided for
their devices, or for devices that no rank trains on. The first of these ranks has its process, and sends it the prompts
of all.

An adapter goes through files in the job's directory, which vLLM adds to the base model that it has loaded: 84 MB in
bf16 for one of rank 16 at all linear layers of 8B, where the weights are 16 GB. All weights, with adapters merged, go
through memory that the processes of vLLM open: no disk, and nothing is left behind where a process is killed.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from ...errors import JobFailure
from ...specs.events import EventWriter, Reason
from ...specs.job import JobSpec
from ...specs.methods import VllmSpec
from ...system.model_damage import ADAPTER_WEIGHTS
from ..checkpoint.weights import WeightGroups, adapter_tensors
from ..distributed import ranks
from ..model.adapters import DEFAULT
from ..model.fsdp import gather
from ..model.generation import Sampling
from ..model.loading import DTYPES
from ..model.vllm_process import MOST_AT_ONCE, VllmProcess

_ALIGNMENT = 64
"""Bytes: where a weight begins in the memory that both processes have."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has memory for in each layer: its MaxLoRARanks (0.32.0, vllm/config/lora.py:24)."""

_TODO = {
    "adapter": "Send vllm_sync 'weights', so that adapters are merged, or leave use_vllm out, and transformers answers",
    "weights": "Leave use_vllm out, and transformers answers",
}


class ScoredAnswer(NamedTuple):
    """An answer, as vLLM chose it."""

    ids: list[int]
    log_probs: list[float]
    """Of each token, by the distribution that it was chosen from; NaN: unknown."""


class VllmPolicy:
    """vLLM with the model of a job. A context manager: its process runs while it is open.

    Args:
        at_once: answers of a rank in an optimizer step, at most.
    """

    def __init__(
        self,
        spec: JobSpec,
        vllm: VllmSpec,
        sampling: Sampling,
        *,
        most: int,
        at_once: int,
        device: torch.device,
        writer: EventWriter,
    ) -> None:
        if vllm.python is None:
            raise AssertionError("a job with vLLM and no interpreter")
        self._spec, self._vllm, self._sampling, self._most, self._at_once = spec, vllm, sampling, most, at_once
        self._device = device
        size = vllm.ranks_of_one(spec.ranks)
        first = ranks.rank() // size * size
        self._own_ranks = range(first, first + size)
        """Those that this rank's vLLM answers for; the first has its process."""
        self._process = VllmProcess(
            vllm.python,
            device,
            writer,
            todo=_TODO[vllm.sync],
            less="Lower max_seq_length, raise vllm_gpu_memory_utilization where its cache lacks room, lower that where "
            "the device does, or leave use_vllm out",
            devices=vllm.tensor_parallel_size,
            has_own_devices=vllm.own_devices > 0,
        )
        self._transport: _Transport | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close(at_once=error is not None)
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def start(self, model: Any) -> None:
        """Start vLLM, unless it runs. A collective. Raises JobFailure: it cannot be started, or cannot load the model.

        Args:
            model: that is trained, as Trainer has wrapped it: FSDP2 replaces its weights.
        """
        if self._transport is not None:
            return
        spec, source = self._spec, self._spec.source
        dtype = DTYPES[spec.compute.dtype]
        if self._vllm.sync == "adapter":
            self._transport = _AdapterFiles(model, dtype, spec.checkpoint_dir)
        else:
            self._transport = _SharedWeights(model, dtype)
        settings = {
            "model": source.location,
            "revision": source.revision,
            "trust_remote_code": source.trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": spec.data.max_seq_length,
            "max_num_seqs": min(self._at_once * len(self._own_ranks), MOST_AT_ONCE),
            "gpu_memory_utilization": self._vllm.gpu_memory_utilization,
            # It gives the device's memory to the training in between.
            "sleeps": self._device.type != "cpu" and not self._vllm.own_devices,
            **self._transport.settings,
        }
        _release_cache(self._device)
        self._in_first_rank(lambda: self._process.start(settings))

    def answer(
        self, prompts: Sequence[list[int]], seeds: Sequence[str], ends: list[int], alive: Callable[[], None]
    ) -> list[ScoredAnswer]:
        """Answer the prompts of this rank, if any, by the weights as they are. A collective. Raises JobFailure: vLLM
        has failed.

        Args:
            seeds: of the random numbers of each answer.
        """
        transport, model = self._transport, self._spec.source.model
        if transport is None:
            raise AssertionError("vLLM is not started")
        with transport.written(alive) as policy:
            _release_cache(self._device)
            self._in_first_rank(lambda: self._process.reload(model, policy))
        if len(self._own_ranks) == 1:
            return self._answers(prompts, seeds, ends, alive)
        asked = ranks.gather_all([*zip(prompts, seeds, strict=True)])
        together = [pair for rank in self._own_ranks for pair in asked[rank]]
        answers = self._in_first_rank(
            lambda: self._answers([prompt for prompt, _ in together], [seed for _, seed in together], ends, alive)
        )[self._own_ranks[0]]
        begin = sum(len(asked[rank]) for rank in self._own_ranks if rank < ranks.rank())
        return (answers or [])[begin : begin + len(prompts)]

    def _in_first_rank[Value](self, work: Callable[[], Value]) -> list[Value | None]:
        """Have the rank that has a process of vLLM do what only that can. A collective."""
        if len(self._own_ranks) > 1:
            ranks.barrier()  # all of them have released the memory of their devices
        return ranks.on_all_ranks(lambda: work() if ranks.rank() == self._own_ranks[0] else None)

    def _answers(
        self, prompts: Sequence[list[int]], seeds: Sequence[str], ends: list[int], alive: Callable[[], None]
    ) -> list[ScoredAnswer]:
        """Answer prompts, if there are any, and have vLLM release the memory of a device that trains."""
        batch = {
            "prompts": list(prompts),
            "seeds": [random.Random(seed).getrandbits(31) for seed in seeds],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": self._most,
            "ends": ends,
        }
        answers = []
        if prompts:
            reply = self._process.answer(batch, alive)
            answers = [ScoredAnswer(*pair) for pair in zip(reply["answers"], reply["log_probs"], strict=True)]
        self._process.sleep()
        return answers


class _Transport(ABC):
    """How the weights of a model get to every vLLM of a job."""

    settings: dict[str, Any]
    """For vLLM's start."""

    @abstractmethod
    def written(self, heartbeat: Callable[[], None]) -> AbstractContextManager[dict[str, Any]]:
        """While this is open, all weights are there as they are now; what it has names them to vLLM. A collective."""

    @abstractmethod
    def close(self) -> None:
        """Release what it has."""


class _AdapterFiles(_Transport):
    """The adapter, as PEFT writes it, in a directory of its own for each optimizer step."""

    def __init__(self, model: PeftModel, dtype: torch.dtype, directory: Path) -> None:
        self._model, self._dtype, self._directory = model, dtype, directory
        self._version = 0
        """Of the adapter: vLLM's caches of adapters and prompts know it by this number and a name with it."""
        rank = model.peft_config[DEFAULT].r
        self.settings = {"max_lora_rank": next(most for most in _RANKS if rank <= most)}

    def close(self) -> None:
        """Do nothing: what an optimizer step has written is gone with it."""

    @contextmanager
    def written(self, heartbeat: Callable[[], None]) -> Iterator[dict[str, Any]]:
        self._version += 1
        state = {}
        for name, weight in adapter_tensors(self._model).items():
            if (whole := gather(weight, self._dtype)) is not None:
                state[name] = whole
            heartbeat()
        directory = ranks.on_all_ranks(lambda: self._write(state) if ranks.rank() == 0 else "")[0]
        try:
            yield {"adapter": directory, "version": self._version}
        finally:
            if ranks.rank() == 0:
                shutil.rmtree(directory, ignore_errors=True)

    def _write(self, state: dict[str, torch.Tensor]) -> str:
        """Write the adapter; it is removed before the kernel writes it to the disk. Returns its directory."""
        # After a kill `system.files.remove_leftovers` removes it.
        directory = tempfile.mkdtemp(".tmp", f"policy-{self._version}-", self._directory)
        try:
            self._model.peft_config[DEFAULT].save_pretrained(directory)
            state = get_peft_model_state_dict(self._model, state, DEFAULT, save_embedding_layers=False)
            save_file({name: weight.contiguous() for name, weight in state.items()}, Path(directory, ADAPTER_WEIGHTS))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory


class _SharedWeights(_Transport):
    """Memory with the weights of a model, adapters merged, that the processes of every vLLM open by its path. Rank 0
    has it, and writes it."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._groups = WeightGroups(model, dtype)
        self._places: dict[str, tuple[int, int]] = {}
        table, end = [], 0
        for name, weight in (pair for planned in self._groups.planned for pair in planned.items()):
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + weight.nbytes
            self._places[name] = begin, end
            table.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), begin, end])
        self._fd = -1
        path = ranks.on_all_ranks(lambda: self._made(end) if ranks.rank() == 0 else "")[0]
        self.settings = {"weights": table, "weights_path": path, "weights_bytes": end}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _made(self, size: int) -> str:
        """Make the memory. Returns the path by which other processes open it."""
        try:
            self._fd = os.memfd_create("weights")
        except (AttributeError, OSError) as error:
            problem = f"the memory that training shares with vLLM cannot be made ({error})"
            raise JobFailure(Reason.launch_failed, f"{problem}: vLLM needs Linux; leave use_vllm out") from error
        try:
            os.ftruncate(self._fd, size)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        except OSError as error:
            os.close(self._fd)
            problem = f"the {size / 2**30:.1f} GiB that training shares with vLLM cannot be reserved ({error.strerror})"
            raise JobFailure(Reason.out_of_memory, f"{problem}: leave use_vllm out") from error
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def written(self, heartbeat: Callable[[], None]) -> Iterator[dict[str, Any]]:
        for weights in self._groups.values(heartbeat):
            for name, weight in weights.items():
                begin, end = self._places[name]
                self._memory[begin:end].view(weight.dtype).copy_(weight.reshape(-1))
        ranks.barrier()
        yield {}


def _release_cache(device: torch.device) -> None:
    """Return the device's memory that training keeps for itself: vLLM takes some of it meanwhile."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
