"""People read one word for a state, on each page and in `trl-remote`; the API and `--json` keep its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.specs.state_words import state_of, state_word
from llama_stack_provider_trl_remote.cli.terminal import job_line, job_row, progress_line
from llama_stack_provider_trl_remote.service import pages
from llama_stack_provider_trl_remote.service.routes.jobs import _states_named

PAGES = Path(pages.__file__).parent


@pytest.mark.parametrize("state", JobState)
def test_each_state_has_a_word_of_its_own_that_names_it(state: JobState) -> None:
    assert state_of(state_word(state)) == state
    assert "_" not in state_word(state)
    assert state_of(state) == state


@pytest.mark.parametrize(("word", "near"), [("fail", "; the nearest is 'failed'"), ("xyz", "")])
def test_a_status_that_there_is_not_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _states_named(word)
    assert str(caught.value).endswith(f"expected one of {', '.join(JobState)}{near}")


def test_lines_of_the_command_have_the_words_of_the_pages() -> None:
    job = {"job_uuid": "a", "state": "in_progress", "status": "in_progress"}
    assert "  running  " in job_line(job)
    assert job_row(job)[1] == "running"
    assert progress_line({"status": "in_progress"}) == "running"


def test_lists_have_the_reason_of_a_failure_and_no_steps_of_an_ended_job_that_trained_none() -> None:
    job = {"job_uuid": "a", "state": "failed", "reason": "invalid_model", "detail": "model 'm': it has no weights"}
    assert job_line(job).endswith("        0/?  a  model 'm': it has no weights")
    assert job_row(job)[1] == "failed: invalid_model"
    searched = {"job_uuid": "s", "state": "completed", "completed_at": "2026-11-21T10:00:00Z"}
    assert "/" not in job_line(searched)
    assert job_row(searched)[6] == ""


def test_no_page_writes_the_name_of_a_state_of_a_job() -> None:
    """Those of nodes and pools are the API's own."""
    for path in sorted((PAGES / "templates").glob("*.html")):
        if path.name not in ("nodes.html", "pools.html"):
            assert not re.findall(r"[>(]\{\{ (?:\w+\.)?state \}\}", path.read_text()), path.name


def test_the_palette_has_the_same_words() -> None:
    (words,) = re.findall(r"^const WORDS = \{ (.*) \};$", (PAGES / "static" / "shell.js").read_text(), re.MULTILINE)
    known = dict(re.findall(r'(\w+): "(\w+)"', words))
    assert known == {state: state_word(state) for state in JobState if state_word(state) != state}
