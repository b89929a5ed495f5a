"""Classifies the exception that ended a training process. Imports no torch, which may be what failed to import.

Types decide, and the texts of libraries only where a library raises no type of its own.
"""

from __future__ import annotations

import errno
import sys
import traceback

from ..errors import InvalidRows, JobFailure, TrlError
from ..specs.events import Failed, Reason

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""As the CPU allocator, the CUDA driver (also through NCCL, as a DistBackendError), cuBLAS and cuDNN report it."""
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

    This project's own errors, running out of memory and a full disk are failures of this rank, whatever their texts
    mention. Only gloo raises a plain RuntimeError, whose text has to be read.
    """
    if isinstance(error, TrlError) or _is_out_of_memory(error) or _is_disk_full(error):
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
    if _is_out_of_memory(error):
        return Reason.out_of_memory, (
            f"out of memory: {_first_line(error)}. Lower batch_size (raise gradient_accumulation_steps to keep "
            "the global batch), lower max_seq_length, enable_activation_checkpointing, or use LoRA."
        )
    if _is_disk_full(error):
        return Reason.disk_full, (
            f"the disk is full: {_first_line(error)}. Free space under {disk} and submit again; "
            "checkpoints that were listed before are kept."
        )
    return Reason.rank_failed, f"the training process ended with {type(error).__name__}: {_first_line(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY))
    )


def _is_disk_full(error: BaseException) -> bool:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or "No space left on device" in str(error)  # safetensors raises a class of its own


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _tail(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])
