"""Classifies the exception that ended a training process. Imports no torch, which may be what failed to import.

Types decide, and the texts of libraries only where a library raises no type of its own.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidRows, JobFailure, TrlError
from ..specs.events import Failed, Reason

_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|OUT_OF_MEMORY|cudaErrorMemoryAllocation|_STATUS_\w{0,40}ALLOC\w{0,40}_FAILED"
    r"|Failed to (CUDA )?(host )?[mc]?alloc\b"
)
"""As the CPU allocator, the CUDA driver, cuBLAS, cuDNN and NCCL report it. NCCL replaces the text of the driver."""
_NOT_INITIALIZED = re.compile(r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_NOT_INITIALIZED")
"""A library's handle was not created, by lack of memory or by an earlier error of the device."""
_HANDLE_BYTES = 256 << 20
"""More than a library's handle takes with its workspace."""
_SHARED_MEMORY_AT = Path("/dev/shm")
_SHARED_MEMORY = re.compile(
    r"shared memory segment|failed to extend /dev/shm|posix_fallocate|out of shared memory"
    r"|unable to \w{1,40}[^\n]{0,400}?(</torch_|shared memory)"
)
"""As NCCL and torch's data loader report that shared memory could not be allocated."""
_NCCL_SETUP = re.compile(
    r"ncclInvalidUsage|ncclInvalidArgument|no socket interface found|driver version is insufficient"
    r"|no CUDA-capable device|invalid device ordinal|system not yet initialized|no kernel image"
)
"""NCCL's errors about this machine. Its others may be the consequence of another rank's end."""
_ASSERTION = re.compile(r"\.cuh?:\d{1,9}: ")
"""In the line that a kernel writes to the process's error output before its call fails."""
_INDEX_ASSERTION = re.compile(r"index out of bounds|srcSelectDimSize|ind_dim_size|n_classes")
"""In that line: torch's kernels that read an embedding, gather a token's logit or compute a token's loss."""
_NUMBERS_ASSERTION = "probability tensor contains either"
_LOG_BYTES = 1 << 18
"""At the end of the error output that are searched: each thread of a kernel writes a line."""
_COMMUNICATION_ERRORS = ("DistNetworkError", "DistBackendError", "DistStoreError", "RankLost")
"""Names of types of torch and `recipes.distributed.ranks`."""
_GLOO_ERRORS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")
_TRACEBACK_LINES = 20


def classify(error: BaseException, disk: str = "the data directory") -> Failed:
    """The `failed` event of an exception: our own reasons first, then the machine's limits, then `rank_failed`.

    Args:
        disk: a directory on the disk that may be full, for the message.
    """
    if isinstance(error, JobFailure):
        return Failed(reason=Reason(error.reason), message=error.message)
    if isinstance(error, InvalidRows):
        return Failed(reason=Reason.invalid_dataset, message=str(error))
    reason, message = _reason_and_message(error, disk)
    return Failed(reason=reason, message=message, traceback=_tail(error))


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether an exception is the consequence of another rank's end, and no failure of this rank.

    This project's own errors, lack of memory, shared memory or disk, and a machine on which NCCL cannot start are
    failures of this rank, whatever their texts mention. Only gloo raises a plain RuntimeError, whose text has to be
    read.
    """
    if isinstance(error, TrlError) or any(is_own(error) for is_own in _OWN_FAILURES):
        return False
    if type(error).__name__ in _COMMUNICATION_ERRORS:
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _GLOO_ERRORS)


def _reason_and_message(error: BaseException, disk: str) -> tuple[Reason, str]:
    if isinstance(error, ImportError):
        return Reason.launch_failed, (
            f"the environment that trains ({sys.executable}) cannot import {error.name or error}: {error}. "
            "Install the training extra there: pip install 'llama_stack_provider_trl[train]'."
        )
    if _lacks_shared_memory(error, disk):
        return Reason.launch_failed, (
            f"shared memory could not be allocated: {_summary(error)}. {_shared_memory_found()} Ranks exchange data "
            "there: start the container with --shm-size=8g (Kubernetes: an emptyDir with medium Memory, mounted at "
            "/dev/shm)."
        )
    if _is_out_of_memory(error):
        return Reason.out_of_memory, (
            f"out of memory: {_summary(error)}. Lower batch_size (raise gradient_accumulation_steps to keep "
            "the global batch), lower max_seq_length, enable_activation_checkpointing, or use LoRA."
        )
    if _is_disk_full(error):
        return Reason.disk_full, (
            f"the disk is full: {_summary(error)}. Free space under {disk} and submit it again under another job_uuid; "
            "checkpoints that were listed before are kept."
        )
    if _is_nccl_setup(error):
        return Reason.launch_failed, (
            f"NCCL cannot run on this machine: {_summary(error)}. Each rank needs a GPU of its own that nvidia-smi "
            "lists, and NCCL_SOCKET_IFNAME an interface of this machine; NCCL_DEBUG=INFO logs more."
        )
    assertion = _device_assertion(error)
    if _is_index(error, assertion):
        return Reason.invalid_model, (
            f"an index was outside of its tensor: {assertion or _summary(error)}. Most often a token has an id for "
            "which the model has no embedding, or a row has more tokens than the model has positions: compare its "
            "tokenizer with its config.json (vocab_size, max_position_embeddings)."
        )
    if assertion is not None and _NUMBERS_ASSERTION in assertion:
        return Reason.diverged, (
            f"the model's numbers are not finite, so that no token can be chosen: {assertion}. Lower the learning "
            "rate, or use dtype bf16 or fp32 in place of fp16."
        )
    if assertion is not None:
        return Reason.rank_failed, (
            f"a kernel on the GPU stopped at a failed assertion: {assertion or 'the log does not have its line'}. "
            "If the next attempt, for which the GPU can be used again, ends like this, set CUDA_LAUNCH_BLOCKING=1 in "
            "the environment that trains, so that the traceback names the operation, and report it."
        )
    return Reason.rank_failed, f"the training process ended with {type(error).__name__}: {_summary(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_OUT_OF_MEMORY.search(text)) or (bool(_NOT_INITIALIZED.search(text)) and _is_gpu_full())


def _is_gpu_full() -> bool:
    """Whether this process's GPU has no memory for a library's handle. The failed step's tensors are still held."""
    torch = sys.modules.get("torch")
    with suppress(Exception):  # after an error of the device every call fails
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.mem_get_info()[0]) < _HANDLE_BYTES
    return False


def _lacks_shared_memory(error: BaseException, disk: str = "") -> bool:
    """Whether /dev/shm is full or too small, and is not the disk of the data directory."""
    text, is_disk = str(error), Path(disk).is_relative_to(_SHARED_MEMORY_AT)
    if isinstance(error, OSError) and error.errno is not None:
        on_it = Path(str(error.filename or "")).is_relative_to(_SHARED_MEMORY_AT)
        return on_it and not is_disk and error.errno in (errno.ENOSPC, errno.ENOMEM)
    if isinstance(error, OSError | RuntimeError) and _SHARED_MEMORY.search(text):
        return True
    return f"{_SHARED_MEMORY_AT}/" in text and "No space left on device" in text and not is_disk


def _shared_memory_found() -> str:
    try:
        found = shutil.disk_usage(_SHARED_MEMORY_AT)
    except OSError:
        return f"{_SHARED_MEMORY_AT} is not there."
    return f"{_SHARED_MEMORY_AT} has {found.total >> 20} MiB, {found.free >> 20} of them free."


def _is_nccl_setup(error: BaseException) -> bool:
    return type(error).__name__ == "DistBackendError" and bool(_NCCL_SETUP.search(str(error)))


def _device_assertion(error: BaseException) -> str | None:
    """The assertion in a kernel by which a call on a GPU failed; empty: its line is not found; None: another error."""
    if not (isinstance(error, RuntimeError) and "device-side assert triggered" in str(error)):
        return None
    for line in reversed(_error_output().split("\n")):
        at = _ASSERTION.search(line)
        if at and "Assertion " in line[at.end() :] and line.removesuffix(".").endswith(" failed"):
            return line.strip()[:400]
    return ""


def _error_output() -> str:
    """The end of what this process has written to its error output; empty: that is no file."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            with open("/proc/self/fd/2", "rb") as file:
                file.seek(max(0, os.fstat(2).st_size - _LOG_BYTES))
                return file.read().decode(errors="replace")
    return ""


def _is_index(error: BaseException, assertion: str | None) -> bool:
    """Whether something was read where its tensor has nothing: the same rows do it again in every attempt."""
    on_cpu = isinstance(error, IndexError) and "index out of range in self" in str(error)
    return on_cpu or (assertion is not None and bool(_INDEX_ASSERTION.search(assertion)))


def _is_disk_full(error: BaseException) -> bool:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or "No space left on device" in str(error)  # safetensors raises a class of its own


_OWN_FAILURES = (_lacks_shared_memory, _is_out_of_memory, _is_disk_full, _is_nccl_setup)


def _summary(error: BaseException) -> str:
    """The first line of an error's text, and NCCL's last message, which has the cause."""
    text = str(error).strip()
    _, _, cause = text.partition("\nLast error:")
    lines = [part.strip().splitlines()[0] for part in (text, cause) if part.strip()]
    return ": ".join(lines)[:500] if lines else type(error).__name__


def _tail(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])
