"""Parts of a dataset that a request makes stay only for a job that needs them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.inputs.row_parts import NewRows
from llama_stack_provider_trl.system.files import put_lines, touched
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import running_service
from tests.contract.stack import SFT, Json
from tests.security.guarded import TOKENS, guarded_service

PREFLIGHT, PREVIEW = "/post-training/preflight", "/post-training/preview"


def _split(name: str, seed: int) -> Json:
    body = sft(name, "questions")
    training = body["training_config"]
    data = {**training["data_config"], "train_split_percentage": 0.5}
    return {
        **body,
        "training_config": {**training, "data_config": data},
        "provider_options": {**body.get("provider_options", {}), "seed": seed},
    }


def _rows(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / "datasets").rglob("*") if path.is_file() and path.suffix != ".json"}


@pytest.mark.contract
def test_a_preview_and_a_preflight_of_a_split_leave_no_copy_of_the_dataset(tmp_path: Path) -> None:
    with running_service(tmp_path, warm_start=True) as service:
        service.register("questions", QUESTIONS)
        before = _rows(service.data_dir)
        shown: list[list[str]] = []
        for seed in (1, 2):
            body = {**_split("shown", seed), "rows": 4}
            answer = service.session.post(f"{service.url}/v1{PREVIEW}", json=body, timeout=100)
            assert answer.status_code == 200, answer.text
            shown.append([row["text"] if "text" in row else str(row) for row in answer.json()["rows"]])
        assert len(shown[0]) == len(shown[1]) == 4  # half of the rows
        assert shown[0] != shown[1]
        answer = service.session.post(f"{service.url}/v1{PREFLIGHT}", json=_split("checked", 3), timeout=100)
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"]["num_rows"] == 4
        assert _rows(service.data_dir) == before
        assert not [*(service.data_dir / "preflights").iterdir()]


@pytest.mark.contract
def test_a_job_that_is_refused_leaves_no_copy_of_the_dataset(tmp_path: Path) -> None:
    tokens: list[dict[str, object]] = [  # the known job of `fill` is one of the two
        {"token": TOKENS["submit"], "role": "submit", "max_queued_jobs": 2},
        *({"token": TOKENS[role], "role": role} for role in ("node", "metrics")),
    ]
    with guarded_service(tmp_path, tokens=tokens) as service:
        headers = {"Authorization": f"Bearer {TOKENS['submit']}"}
        assert service.post(SFT, _split("first", 0), headers=headers).status_code == 200
        before = _rows(service.data_dir)
        for seed, (name, status) in enumerate([("second", 429), ("first", 409), ("third", 429)], 1):
            answer = service.post(SFT, _split(name, seed), headers=headers)
            assert answer.status_code == status, answer.text
        assert service.post(SFT, _split("first", 0), headers=headers).status_code == 200
        assert _rows(service.data_dir) == before


def test_rows_that_something_else_uses_meanwhile_stay(tmp_path: Path) -> None:
    known = put_lines(tmp_path, [b'{"n":0}\n'])
    new = NewRows()
    kept, used, unused = (new.put(tmp_path, [b'{"n":%d}\n' % number]) for number in range(3))
    assert kept == known
    assert touched(used.path)  # as every request does that finds them
    new.discard()
    assert [blob.path.exists() for blob in (kept, used, unused)] == [True, True, False]
    assert abs(time.time() - os.stat(used.path).st_mtime) < 60
