"""The share of padding in the batches of a job, and the warning about it."""

from __future__ import annotations

import itertools

import pytest
import torch

from llama_stack_provider_trl.recipes.data.padding import padding_share, problem_of_padding
from tests.fakes import job_spec

pytestmark = pytest.mark.process


def test_the_share_is_that_of_all_batches() -> None:
    lengths = [3, 10, 1, 7]
    drawn = [max(batch) for batch in itertools.product(lengths, repeat=3)]
    mean = sum(lengths) / len(lengths)
    assert padding_share(torch.tensor(lengths), 3) == pytest.approx(1 - mean * len(drawn) / sum(drawn))
    assert padding_share(torch.tensor(lengths), 1) == pytest.approx(0)


def test_most_of_a_batch_is_padding() -> None:
    lengths = torch.tensor([10] * 150 + [1000] * 50)
    padded = {"batch_size": 8, "padding_free": False}
    found = problem_of_padding(job_spec(**padded), lengths)
    assert found is not None
    assert found.startswith("about 71% of the tokens of a batch are padding: the rows have 258 tokens on average")
    assert "pack the rows" not in str(problem_of_padding(job_spec(algorithm="dpo", **padded), lengths))
    for spec in (
        *(job_spec(batch_size=8), job_spec(**padded, packed=True), job_spec(**{**padded, "batch_size": 1})),
        job_spec(**padded, gradient_accumulation_steps=4),  # its rows are put into batches by length
    ):
        assert problem_of_padding(spec, lengths) is None
    assert problem_of_padding(job_spec(**padded), torch.tensor([400, 500] * 100)) is None
