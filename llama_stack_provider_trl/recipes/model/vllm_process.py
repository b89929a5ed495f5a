"""The process of vLLM (https://docs.vllm.ai), under an interpreter of its own: it pins releases of torch and
transformers that are not those of training. `vllm_child` is its program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import JobFailure
from ...specs.events import EventWriter, Reason
from ...system.process import VLLM_GPUS, without_modules
from ..distributed import ranks
from ..distributed.heartbeat import heartbeat

MOST_AT_ONCE = 1024
"""Answers of a batch that vLLM has in progress; the others of it wait. vLLM refuses more than the tokens that one of
its steps takes, 4096 on a CPU and 2048 or more elsewhere."""
CPU_CACHE_GIB = 2
"""Of keys and values, on each device. vLLM's own default is nearly all memory of the machine."""
PROGRAM = Path(__file__).with_name("vllm_child.py")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what is computed together follows from the batch alone
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONSAFEPATH": "1",  # our modules beside the program are none of its own
}
_OF_SEVERAL = {
    "VLLM_HOST_IP": "127.0.0.1",  # else its processes meet at the machine's address in the network
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each needs memory of its own in a machine with several processors
}
"""For a vLLM over several devices, which has a process for each."""
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Of the allocator of training: vLLM cannot release a device's memory with segments that expand."""
_OF_TORCHRUN = (*ranks.VARIABLES, "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_ADDR", "MASTER_PORT")
"""How names of variables begin with which a process is one of several ranks. vLLM opens a process group of its own, and
would wait for a server that torchrun is said to have started."""
_END_SECONDS = 20.0
_NO_MEMORY = (
    "out of memory",
    "OutOfMemory",
    "No available memory",
    "less than desired",
    "larger than the available KV cache",
    "when memory runs out",
)
"""In the texts of vLLM's errors: of torch, and of its own before it reserves the cache."""


class VllmProcess:
    """vLLM with a model, which answers batches.

    Args:
        writer: gets heartbeats while the process works.
        todo: what to do where vLLM cannot have the model.
        less: what to do where memory runs out.
        devices: that the model is divided for, this process's own and those of the ranks behind it.
        has_own_devices: it has those that the launcher has set aside, and none that trains.
    """

    def __init__(
        self,
        python: Path,
        device: torch.device,
        writer: EventWriter,
        *,
        todo: str,
        less: str,
        devices: int = 1,
        has_own_devices: bool = False,
    ) -> None:
        self._python, self._device, self._writer, self._todo, self._less = python, device, writer, todo, less
        self._devices, self._has_own_devices = devices, has_own_devices
        self._child: subprocess.Popen[str] | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Start vLLM with the model of its settings. Raises JobFailure: it cannot be started, or cannot load the
        model."""
        environment = self._environment()
        try:
            self._child = subprocess.Popen(
                [str(self._python), str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except OSError as error:
            problem = f"the interpreter with vLLM, {self._python}, cannot be started ({error.strerror})"
            raise JobFailure(Reason.launch_failed, f"{problem}: correct vllm_python") from error
        own = {"is_cpu": self._device.type == "cpu", "devices": self._devices}
        self._loading("ready", {**settings, **own}, settings["model"])

    def reload(self, model: str, policy: dict[str, Any]) -> None:
        """Have vLLM take the weights as they are. Raises JobFailure: it cannot.

        Args:
            policy: where its new adapter is; empty: in the memory that its settings name.
        """
        self._loading("reloaded", {"reload": policy}, model)

    def sleep(self) -> None:
        """Have vLLM release the device's memory until the next `reload`."""
        self._reply("asleep", {"sleep": True}, "while it released its memory", lambda: None)

    def answer(self, batch: dict[str, Any], on_progress: Callable[[], None]) -> dict[str, Any]:
        """The message with the answers of a batch, which `vllm_child.answer` describes. Raises JobFailure."""
        return self._reply("answers", batch, "while it answered", on_progress)

    def close(self, *, at_once: bool = False) -> None:
        """End the process, if there is one.

        Args:
            at_once: kill it. What has failed has to be reported before the other ranks end, which wait for seconds.
        """
        if (child := self._child) is None:
            return
        self._child = None
        if at_once:
            child.kill()
        with contextlib.suppress(OSError):
            # Processes that were forked from this one, such as loader workers, may still have the pipe.
            child.stdin.write(json.dumps({"end": True}) + "\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
        with contextlib.suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]
        if _status_of(child) is None:
            child.kill()
            _status_of(child)
        child.stdout.close()  # type: ignore[union-attr]

    def _loading(self, name: str, message: dict[str, Any], model: str) -> None:
        assert self._child is not None
        with heartbeat(self._writer, self._child.pid):
            for reply in self._exchanged(message):
                if name in reply:
                    return
                todo = f"The log of the job has the rest. {self._todo}"
                problem = f"vLLM cannot load {model}: {reply['error']}. {todo}"
                raise self._out_of_memory(reply["error"]) or JobFailure(Reason.invalid_model, problem)
        raise self._ended("while it loaded the model")

    def _reply(self, name: str, message: dict[str, Any], when: str, on_progress: Callable[[], None]) -> dict[str, Any]:
        for reply in self._exchanged(message):
            on_progress()
            self._writer.heartbeat_of_child()
            if "error" in reply:
                raise self._out_of_memory(reply["error"]) or RuntimeError(f"vLLM: {reply['error']}")
            if name in reply:
                return reply
        raise self._ended(when)

    def _environment(self) -> dict[str, str]:
        given = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB)} if self._device.type == "cpu" else {}
        if self._devices > 1:
            given |= _OF_SEVERAL
        if self._device.type == "cuda" and (gpus := self._gpus()):
            given["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        inherited = {
            name: value
            for name, value in without_modules(os.environ).items()
            if name not in _ALLOCATOR and not name.startswith(_OF_TORCHRUN)
        }
        return {**inherited, **_ENVIRONMENT, **given}

    def _gpus(self) -> list[str]:
        """The GPUs that it sees; empty: all that this process sees. Raises JobFailure: its own are not known."""
        if self._has_own_devices:
            if own := os.environ.get(VLLM_GPUS):
                return own.split(",")
            problem = f"no GPUs are set aside for vLLM: {VLLM_GPUS} names none"
            raise JobFailure(Reason.launch_failed, f"{problem}; send vllm_mode 'colocate', or start it by the service")
        if (first := self._device.index) is None:
            return []
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = range(first, first + self._devices)
        return [visible[number] if visible else str(number) for number in numbers]

    def _exchanged(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a message; yields the program's own until it ends."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit status is reported
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        for line in self._child.stdout:
            if line.endswith("\n"):  # else it ended within a message
                yield json.loads(line)

    def _ended(self, when: str) -> Exception:
        """Why the program has ended without a message."""
        assert self._child is not None
        status = _status_of(self._child)
        if status is None:
            # `close` kills it.
            return RuntimeError(
                f"vLLM has closed its output {when}, and has not ended: what it has written is in the log"
            )
        if status == -signal.SIGKILL:
            found = f"vLLM was killed {when}, as the kernel does when memory runs out"
            return JobFailure(Reason.out_of_memory, f"{found}. {self._less}")
        return RuntimeError(f"vLLM ended with exit status {status} {when}: its output is in the log")

    def _out_of_memory(self, error: str) -> JobFailure | None:
        """The failure that an error of vLLM is by its text; None: it is another one."""
        if not any(text in error for text in _NO_MEMORY):
            return None
        return JobFailure(Reason.out_of_memory, f"vLLM: {error}. {self._less}")


def _status_of(child: subprocess.Popen[str]) -> int | None:
    """The exit status of a program that is to end; None: it has not, also in `_END_SECONDS`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(_END_SECONDS)
    return None
