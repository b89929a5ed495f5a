"""How a training process distinguishes its own failures from the consequences of another rank's."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_stack_provider_trl.errors import (
    InvalidRequest,
    InvalidRows,
    JobConflict,
    JobFailure,
    JobNotFound,
    ServiceRefusal,
    ServiceUnreachable,
    StoreError,
    TrlError,
)
from llama_stack_provider_trl.jobs.decisions.states import REASONS
from llama_stack_provider_trl.recipes.failures import classify, follows_from_another_rank
from llama_stack_provider_trl.specs.events import Reason


class DistBackendError(RuntimeError):
    """Named as torch's, which a unit test does not import."""


class RankLost(RuntimeError):
    """Named as ours in `recipes.distributed.ranks`."""


NCCL = "NCCL error in: NCCLUtils.cpp:77, {} error, NCCL version 2.29\nncclError: Call failed.\nLast error:\n{}"
"""torch's message of a failed NCCL call: the kind of error, and NCCL's last message."""


def test_a_failed_meeting_of_ranks_is_a_failure_of_its_own_whatever_its_advice_mentions() -> None:
    error = JobFailure(
        Reason.launch_failed, "rank 1 did not come: see the messages of NCCL or gloo/transport in the logs"
    )
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.launch_failed


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError("NCCL error: unhandled cuda error, Cuda failure 'out of memory'"),
        DistBackendError(NCCL.format("unhandled cuda", "Failed to CUDA calloc async 608 bytes")),
        DistBackendError(NCCL.format("unhandled cuda", "Failed to CUDA host alloc 4096 bytes")),
        DistBackendError(NCCL.format("unhandled cuda", "Cuda failure 2 'out of memory'")),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_inside_a_collective_is_no_lost_rank(error: BaseException) -> None:
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.out_of_memory


@pytest.mark.parametrize(("free", "reason"), [(10 << 20, Reason.out_of_memory), (9 << 30, Reason.rank_failed)])
@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_a_handle_that_was_not_created_is_a_lack_of_memory_only_on_a_full_gpu(
    monkeypatch: pytest.MonkeyPatch, library: str, free: int, reason: Reason
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True, mem_get_info=lambda: (free, 80 << 30))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    error = RuntimeError(f"CUDA error: {library}_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert classify(error).reason is reason


def test_a_handle_that_was_not_created_after_an_error_of_the_device_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda = SimpleNamespace(is_initialized=lambda: True, mem_get_info=fail)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert classify(error).reason is Reason.rank_failed


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError(
            NCCL.format(
                "unhandled system",
                "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left on "
                "device (28)",
            )
        ),
        RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
        RuntimeError("DataLoader worker (pid 7) is killed: the dataloader's workers are out of shared memory."),
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/nccl-x"),
    ],
)
def test_a_lack_of_shared_memory_is_neither_a_lost_rank_nor_a_full_disk(error: BaseException) -> None:
    assert not follows_from_another_rank(error)
    failed = classify(error, "/data/jobs")
    assert failed.reason is Reason.launch_failed
    assert "--shm-size=8g" in failed.message
    assert "Free space under" not in failed.message


def test_a_data_directory_in_shared_memory_can_be_full() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/data/jobs/a")
    assert classify(error, "/dev/shm/data/jobs").reason is Reason.disk_full
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/shm/model")
    assert classify(missing, "/data").reason is Reason.rank_failed


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("invalid usage (ncclInvalidUsage)", "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"),
        ("internal", "Bootstrap : no socket interface found"),
        ("unhandled cuda", "Cuda failure 802 'system not yet initialized'"),
    ],
)
def test_a_machine_on_which_nccl_cannot_start_is_no_lost_rank_and_the_cause_is_named(kind: str, cause: str) -> None:
    error = DistBackendError(NCCL.format(kind, cause))
    assert not follows_from_another_rank(error)
    failed = classify(error)
    assert failed.reason is Reason.launch_failed
    assert cause in failed.message


def test_a_full_disk_is_no_lost_rank() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/nccl")
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.disk_full


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        DistBackendError(NCCL.format("remote process exited", "socketProgress: Connection closed by remote peer")),
        DistBackendError(NCCL.format("unhandled cuda", "Cuda failure 1 'invalid argument'")),
        RankLost("rank 1 has failed"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_a_communication_error_after_another_rank_has_ended_is_its_consequence(error: BaseException) -> None:
    assert follows_from_another_rank(error)


def test_an_error_that_merely_mentions_nccl_is_reported() -> None:
    error = ValueError("backend must be gloo or NCCL")
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.rank_failed


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("model", "x", "name another."),
        InvalidRows("blank text", row=3),
        JobNotFound("job-1"),
        JobConflict("taken"),
        StoreError("locked"),
        ServiceUnreachable("http://127.0.0.1:8322", "does not answer"),
        ServiceRefusal("http://127.0.0.1:8322", 403, "no"),
        JobFailure(Reason.diverged, "the loss is nan"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: TrlError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_token_without_an_embedding_is_the_fault_of_the_model_and_not_tried_again() -> None:
    failed = classify(IndexError("index out of range in self"))
    assert failed.reason is Reason.invalid_model
    assert REASONS[failed.reason].backoff is None
    assert "a token has an id for which the model has no embedding" in failed.message
    assert classify(IndexError("list index out of range")).reason is Reason.rank_failed


@contextmanager
def error_output(path: Path, text: str) -> Iterator[None]:
    """This process's error output, as a kernel's assertion leaves it."""
    before = os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        os.write(2, text.encode())
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


LINE = "/pytorch/aten/src/ATen/native/cuda/{}: block: [5,0,0], thread: [64,0,0] Assertion `{}` failed.\n"
INDEX = LINE.format("IndexKernelUtils.cu:16: vectorized_gather_kernel", "{}")


@pytest.mark.parametrize(
    ("assertion", "reason", "sentence"),
    [
        (
            INDEX.format('ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"'),
            Reason.invalid_model,
            "a token has an id for which the model has no embedding",
        ),
        (INDEX.format("srcIndex < srcSelectDimSize"), Reason.invalid_model, "srcSelectDimSize` failed"),
        (
            LINE.format("Loss.cu:242: nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes"),
            Reason.invalid_model,
            "t < n_classes` failed",
        ),
        (
            LINE.format(
                "TensorCompare.cu:112: _assert_async_cuda_kernel",
                "probability tensor contains either `inf`, `nan` or element < 0",
            ),
            Reason.diverged,
            "the model's numbers are not finite, so that no token can be chosen",
        ),
        (
            LINE.format("Distributions.cu:1: kernel", "cumdist[size - 1] > 0"),
            Reason.rank_failed,
            "a kernel on the GPU stopped at a failed assertion: /pytorch/aten/src/ATen/native/cuda/Distributions.cu:1",
        ),
        ("", Reason.rank_failed, "failed assertion: the log does not have its line. If the next attempt"),
    ],
)
def test_a_failed_assertion_in_a_kernel_is_what_its_line_in_the_error_output_shows(
    tmp_path: Path, assertion: str, reason: Reason, sentence: str
) -> None:
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")
    with error_output(tmp_path / "rank-0.log", f"step 1\n{assertion * 2}Traceback\n"):
        failed = classify(error)
    assert failed.reason is reason
    assert sentence in failed.message
