"""Errors of commands in the words of the command line, and what a command prints while it waits."""

from __future__ import annotations

import asyncio
import io
import time
from argparse import Namespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobNotFound, ServiceRefusal
from llama_stack_provider_trl_remote.cli.refusals import in_a_shell, with_the_name_meant
from llama_stack_provider_trl_remote.cli.waiting import waiting

URL = "http://127.0.0.1:8322"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "dataset 'a' not found: GET /v1/datasets lists those that are registered",
            "dataset 'a' not found: trl-remote datasets list lists those that are registered",
        ),
        (str(JobNotFound("a")), "job 'a' not found: trl-remote jobs list shows them"),
        (
            "choose another dataset_id, or DELETE /v1/datasets/a first",
            "choose another dataset_id, or trl-remote datasets delete a first",
        ),
        (
            "These columns are DPO's: was POST /v1/post-training/preference-optimize meant?",
            "These columns are DPO's: was --method dpo (for the request of a file --algorithm dpo) meant?",
        ),
        (
            "These columns are SFT's: was POST /v1/post-training/supervised-fine-tune meant?",
            "These columns are SFT's: was --method sft (for the request of a file --algorithm sft) meant?",
        ),
        ("GET /v1/datasets/foo has it", "GET /v1/datasets/foo has it"),
        ("see GET /v1/nodes/a and GET /v1/nodes.", "see GET /v1/nodes/a and trl-remote nodes list."),
        (
            str(ServiceRefusal(URL, 413, "the body is larger than 64 KiB")),
            f"the training service at {URL} refuses this: the body is larger than 64 KiB",
        ),
        (
            f"the training service at {URL} has not answered POST /v1/post-training/preflight within 600 s: repeat it",
            f"the training service at {URL} has not answered within 600 s: repeat it",
        ),
    ],
)
def test_what_is_meant_for_programs_is_a_command_in_a_shell(given: str, expected: str) -> None:
    assert in_a_shell(given) == expected


class Known:
    """A client of a service with some names."""

    url = URL

    async def get(self, path: str, **query: Any) -> Any:
        assert path == "/v1/post-training/queue"
        return {"data": [{"job_uuid": "sft-questions"}, {"job_uuid": "other"}]}

    async def get_all(self, path: str) -> Any:
        assert path == "/v1/datasets"
        return {"data": [{"identifier": "questions"}]}


def error_of(error: Exception, **given: Any) -> str:
    async def command(client: Any, options: Namespace) -> int:
        raise error

    with pytest.raises(type(error) if isinstance(error, ServiceRefusal) else (ServiceRefusal, type(error))) as found:
        asyncio.run(with_the_name_meant(command, Known(), Namespace(**given)))  # type: ignore[arg-type]
    return str(found.value)


def test_the_name_that_was_meant_is_named() -> None:
    assert error_of(JobNotFound("sft-question"), job_uuid="sft-question").endswith("; was sft-questions meant?")
    assert error_of(JobNotFound("otter"), job_uuids=["sft-questions", "otter"]).endswith("; was other meant?")
    missing = ServiceRefusal(URL, 404, "dataset 'questions2' not found")
    no_log = ServiceRefusal("http://h", 404, "attempt 2 of job 'other' has no log of rank 5")
    assert error_of(no_log, job_uuid="other") == str(no_log)
    assert error_of(missing, dataset_id="questions2").endswith("; was questions meant?")
    assert "meant" not in error_of(JobNotFound("nothing like it"), job_uuid="nothing like it")
    assert "meant" not in error_of(ServiceRefusal(URL, 409, "job 'other2' is running"), job_uuid="other2")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_command_shows_for_how_long_it_waits_and_takes_that_away() -> None:
    terminal, file = Terminal(), io.StringIO()
    with waiting("preflight", terminal, every=0.01):
        while "preflight ... 0:00" not in terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue().rpartition("\r")[0].rstrip(" ").endswith("\r")
    with waiting("preflight", file, every=0.0):
        pass
    assert file.getvalue() == ""
