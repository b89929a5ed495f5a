"""Answers the prompts of a job that trains by vLLM, with the weights as they are in each optimizer step.

The weights, with adapters merged, go through memory that the process of vLLM inherits: no disk, and nothing is left
behind where a process is killed.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ...errors import JobFailure
from ...specs.events import EventWriter, Reason
from ...specs.job import JobSpec
from ...specs.methods import VllmSpec
from ..checkpoint.weights import WeightGroups
from ..model.generation import Sampling
from ..model.loading import DTYPES
from ..model.vllm_process import MOST_AT_ONCE, VllmProcess

_ALIGNMENT = 64
"""Bytes: where a weight begins in the memory that both processes have."""


class ScoredAnswer(NamedTuple):
    """An answer, as vLLM chose it."""

    ids: list[int]
    log_probs: list[float]
    """Of each token, by the distribution that it was chosen from; NaN: unknown."""


class VllmPolicy:
    """vLLM with the model of a job. A context manager: its process runs while it is open.

    Args:
        at_once: answers of an optimizer step.
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
        self._device, self._writer = device, writer
        self._process = VllmProcess(
            vllm.python,
            device,
            writer,
            todo="Leave use_vllm out, and transformers answers",
            less="Lower max_seq_length, raise vllm_gpu_memory_utilization where its cache lacks room, lower that where "
            "the device does, or leave use_vllm out",
        )
        self._weights: _SharedWeights | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def start(self, model: Any) -> None:
        """Start vLLM. Raises JobFailure: it cannot be started, or cannot load the model."""
        spec, source = self._spec, self._spec.source
        dtype = DTYPES[spec.compute.dtype]
        self._weights = _SharedWeights(model, dtype)
        _release_cache(self._device)
        self._process.start(
            {
                "model": source.location,
                "revision": source.revision,
                "trust_remote_code": source.trust_remote_code,
                "dtype": str(dtype).removeprefix("torch."),
                "max_model_len": spec.data.max_seq_length,
                "max_num_seqs": min(self._at_once, MOST_AT_ONCE),
                "gpu_memory_utilization": self._vllm.gpu_memory_utilization,
                **self._weights.settings,
            },
            inherited=[self._weights.fd],
        )

    def answer(
        self, prompts: Sequence[list[int]], seeds: Sequence[str], ends: list[int], alive: Callable[[], None]
    ) -> list[ScoredAnswer]:
        """Answer prompts by the weights as they are. Raises JobFailure: vLLM has failed.

        Args:
            seeds: of the random numbers of each answer.
        """
        if self._weights is None:
            raise AssertionError("vLLM is not started")
        self._weights.write(alive)
        _release_cache(self._device)
        self._process.reload(self._spec.source.model)
        batch = {
            "prompts": list(prompts),
            "seeds": [random.Random(seed).getrandbits(31) for seed in seeds],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": self._most,
            "ends": ends,
        }
        reply = self._process.answer(batch, alive)
        self._process.sleep()
        return [
            ScoredAnswer(ids, log_probs) for ids, log_probs in zip(reply["answers"], reply["log_probs"], strict=True)
        ]


class _SharedWeights:
    """Memory with the weights of a model, which a child inherits as a file descriptor."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._groups = WeightGroups(model, dtype)
        self._places: dict[str, tuple[int, int]] = {}
        table, end = [], 0
        for name, weight in (pair for planned in self._groups.planned for pair in planned.items()):
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + weight.nbytes
            self._places[name] = begin, end
            table.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), begin, end])
        try:
            self.fd = os.memfd_create("weights")
        except (AttributeError, OSError) as error:
            problem = f"the memory that training shares with vLLM cannot be made ({error})"
            raise JobFailure(Reason.launch_failed, f"{problem}: vLLM needs Linux; leave use_vllm out") from error
        try:
            os.ftruncate(self.fd, end)
            self._memory = torch.frombuffer(mmap.mmap(self.fd, end), dtype=torch.uint8)
        except OSError as error:
            os.close(self.fd)
            problem = f"the {end / 2**30:.1f} GiB that training shares with vLLM cannot be reserved ({error.strerror})"
            raise JobFailure(Reason.out_of_memory, f"{problem}: leave use_vllm out") from error
        self.settings = {"weights": table, "weights_fd": self.fd, "weights_bytes": end}

    def write(self, heartbeat: Callable[[], None]) -> None:
        """Write all weights as they are."""
        for weights in self._groups.values(heartbeat):
            for name, weight in weights.items():
                begin, end = self._places[name]
                self._memory[begin:end].view(weight.dtype).copy_(weight.reshape(-1))

    def close(self) -> None:
        os.close(self.fd)


def _release_cache(device: torch.device) -> None:
    """Return the device's memory that training keeps for itself: vLLM takes some of it meanwhile."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
