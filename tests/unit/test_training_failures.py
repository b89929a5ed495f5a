"""How a training process distinguishes its own failures from the consequences of another rank's."""

from __future__ import annotations

import errno
import pickle

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
from llama_stack_provider_trl.recipes.failures import classify, follows_from_another_rank
from llama_stack_provider_trl.specs.events import Reason


class DistBackendError(RuntimeError):
    """Named as torch's, which a unit test does not import."""


class RankLost(RuntimeError):
    """Named as ours in `recipes.distributed.ranks`."""


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
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_inside_a_collective_is_no_lost_rank(error: BaseException) -> None:
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.out_of_memory


def test_a_full_disk_is_no_lost_rank() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/nccl")
    assert not follows_from_another_rank(error)
    assert classify(error).reason is Reason.disk_full


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError("NCCL error: remote process exited or there was a network error"),
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
