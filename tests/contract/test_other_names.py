"""Options `columns` and `roles` on both servers: a job trains on rows under the names of their dataset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

ROWS = [{"question_text": row["prompt"], "reply": row["completion"]} for row in QUESTIONS]
TALKS = [
    {"dialogue": [{"role": "customer", "content": row["prompt"]}, {"role": "agent", "content": row["completion"]}]}
    for row in QUESTIONS
]
COLUMNS = {"prompt": "question_text", "completion": "reply"}
"""With which `ROWS` are `QUESTIONS`."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running(TrainingService(tmp_path_factory.mktemp("names"))) as found:
        for name, rows in (("plain", QUESTIONS), ("renamed", ROWS), ("talks", TALKS)):
            found.register(name, rows)
        yield found


def losses(service: TrainingService, name: str, dataset: str, **options: object) -> list[float]:
    job = service.submit(SFT, sft(name, dataset), options=options or None)
    service.wait(job, "completed")
    points = service.get(f"/post-training/jobs/{name}/metrics").json()["data"]
    return [point["metrics"]["loss"] for point in points if "loss" in point["metrics"]]


def test_a_job_trains_on_rows_under_other_names(service: TrainingService) -> None:
    expected = losses(service, "plain", "plain")
    assert expected
    assert losses(service, "renamed", "renamed", columns=COLUMNS) == expected
    talks = {"columns": {"messages": "dialogue"}, "roles": {"user": "customer", "assistant": ["agent"]}}
    assert losses(service, "talks", "talks", **talks) == expected


def test_names_that_no_row_has_are_refused(service: TrainingService) -> None:
    for options, message in (
        ({"columns": {"prompt": "query", "completion": "reply"}}, "This row lacks query, which the option columns"),
        ({"columns": {**COLUMNS, "input": "more"}}, "no row has the column more, which the option columns names"),
        ({"columns": {"query": "question_text"}}, "'query' is no column of a row shape"),
    ):
        answer = service.post(SFT, sft("refused", "renamed"), options=options)
        assert answer.status_code == 400
        assert message in answer.text
