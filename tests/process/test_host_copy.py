"""The copy of tensors in CPU memory that a step checkpoint is written from."""

from __future__ import annotations

import pytest
import torch

from llama_stack_provider_trl.recipes.checkpoint.host_copy import HostCopy

pytestmark = pytest.mark.process
CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(5, 3),
        "half": torch.randn(7).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "empty": torch.empty(0, 3),
        "step": torch.tensor(3.0),
        "codes": torch.arange(9, dtype=torch.uint8),
    }


def test_a_copy_has_the_values_shapes_and_dtypes_of_the_tensors() -> None:
    given = {"model": tensors(), "optimizer": tensors()}
    copied = HostCopy(CPU).take(given)
    assert {file: list(found) for file, found in copied.items()} == {file: list(found) for file, found in given.items()}
    for file, found in given.items():
        for name, tensor in found.items():
            assert copied[file][name].dtype is tensor.dtype
            assert torch.equal(copied[file][name], tensor)
            assert copied[file][name].is_contiguous()


def test_a_copy_does_not_change_with_the_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    copied = HostCopy(CPU).take({"model": {"weight": weight}})
    with torch.no_grad():
        weight.add_(1.0)
    assert copied["model"]["weight"].tolist() == [1.0] * 3
    assert not copied["model"]["weight"].requires_grad


def test_copies_of_the_same_sizes_share_their_memory_and_others_do_not() -> None:
    copy = HostCopy(CPU)
    one = copy.take({"model": {"weight": torch.zeros(1000)}})["model"]["weight"]
    again = copy.take({"model": {"weight": torch.ones(1000)}})["model"]["weight"]
    assert one.data_ptr() == again.data_ptr()
    assert again.tolist() == [1.0] * 1000
    other = copy.take({"model": {"weight": torch.full((3000,), 2.0)}})["model"]["weight"]
    assert other.tolist() == [2.0] * 3000
    assert again.tolist() == [1.0] * 1000


def test_a_closed_copy_can_be_taken_again() -> None:
    copy = HostCopy(CPU)
    copy.take({"model": tensors()})
    copy.close()
    copy.close()
    assert copy.take({"model": {"weight": torch.ones(2)}})["model"]["weight"].tolist() == [1.0, 1.0]
