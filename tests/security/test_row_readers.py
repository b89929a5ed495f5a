"""Rows are read in processes with limits, and never in the one that serves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.jobs import submission
from llama_stack_provider_trl.jobs.submission import keep_rows
from llama_stack_provider_trl.specs import row_verdicts
from llama_stack_provider_trl.system import limited
from llama_stack_provider_trl.system.limited import Limited, LimitExceeded
from tests.contract.payloads import sft
from tests.contract.service import TrainingService, refusal, running_service
from tests.required import in_full
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
MOST_MIB = 50
OBJECTS = 5_000_000
EXACT = {"type": "exact", "column": "gold"}
Json = dict[str, Any]


def heavy_rows() -> bytes:
    """45 MB: three rows with five million empty objects each, of which the last one lacks the column of the check."""
    more = "[" + "{}," * (OBJECTS - 1) + "{}]"
    rows = [f'{{"prompt": "a", "completion": "b", "gold": "c", "more": {more}}}'] * 2
    return "\n".join([*rows, f'{{"prompt": "a", "completion": "b", "more": {more}}}', ""]).encode()


class PeakMemory:
    """The most memory that a process has used since this object was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = psutil.Process(pid).memory_info().rss

    def mib(self) -> float:
        status = Path(f"/proc/{self._pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return (int(peak.split()[1]) * 1024 - self._before) / (1 << 20)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    if os.geteuid():
        pytest.skip("the memory of a service that hides itself is read by root")
    with running_service(tmp_path_factory.mktemp("service"), reader_memory_mb=1024) as service:
        answer, sha256 = service.put_blob(heavy_rows())
        assert answer.status_code in (200, 201, 204), answer.text
        service.register_source("heavy", {"type": "blob", "sha256": sha256})
        yield service


def evaluation(dataset_id: str) -> Json:
    return {"job_uuid": "e", "model": str(tiny_model()), "dataset_id": dataset_id, "checks": [EXACT]}


def rewarded(dataset_id: str) -> Json:
    body = sft("g", dataset_id)
    method = {"type": "grpo", "num_generations": 2, "max_completion_length": 4, "rewards": [{"check": EXACT}]}
    return {**body, "algorithm_config": method}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/post-training/evaluate", evaluation("heavy")),
        *in_full(("/post-training/preference-optimize", rewarded("heavy"))),
    ],
)
def test_rows_of_a_check_are_not_read_in_the_service(service: TrainingService, path: str, body: Json) -> None:
    peak = PeakMemory(service.pid)
    answer = service.session.post(f"{service.url}/v1{path}", json=body, timeout=240)
    found = (
        r"^dataset 'heavy', row \d: (no column 'gold'|reading the rows up to this one takes more than 60 s or 512 MiB)"
    )
    assert re.match(found, refusal(answer))
    assert peak.mib() < MOST_MIB


def test_small_files_of_rows_are_not_checked_in_the_service(service: TrainingService) -> None:
    more = "[" + "{}," * 1_300_000 + "{}]"
    rows = f'{{"prompt": "a", "completion": "b", "more": {more}}}\n{{"unknown": 1}}\n'.encode()
    assert len(rows) < 4 << 20
    _, sha256 = service.put_blob(rows)
    service.register_source("small", {"type": "blob", "sha256": sha256})
    peak = PeakMemory(service.pid)
    assert "row 1: found the columns unknown" in refusal(
        service.post("/post-training/supervised-fine-tune", sft("s", "small"))
    )
    assert peak.mib() < MOST_MIB


def test_rows_of_llama_stack_are_checked_in_a_process_with_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_verdicts, "check_file", None)  # here; the fork has it
    ref, warnings = keep_rows(tmp_path, "d", [{"prompt": "a", "completion": "b", "c": 1}], "sft", None)
    assert (ref.num_rows, len(warnings)) == (1, 1)
    with pytest.raises(InvalidRows, match=r"^dataset 'd', row 1: found the columns a"):
        keep_rows(tmp_path, "d", [{"prompt": "a", "completion": "b"}, {"a": 1}], "sft", None)
    monkeypatch.setattr(submission, "_ROW_CHECKS", Limited(seconds=5, memory=16 << 20))
    with pytest.raises(InvalidRows, match=r"^dataset 'd', checking it takes more than 5 s or 16 MiB of memory"):
        keep_rows(tmp_path, "d", [{"prompt": "a", "completion": "b", "more": [{}] * 1_000_000}], "sft", None)
    assert [path.name for path in tmp_path.iterdir()] == [ref.path.name]  # nothing of a refused dataset is kept


def _much() -> Iterator[str]:
    for _ in range(64):
        yield "a" * (1 << 20)


def test_what_a_call_yields_is_bounded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_MOST_FOUND", 4 << 20)
    with pytest.raises(LimitExceeded):
        Limited(20, 256 << 20).call(_much)


def test_the_heavy_rows_are_those_of_the_attack() -> None:
    data = heavy_rows()
    assert len(data) > 42_000_000
    assert len(json.loads(data.splitlines()[0])["more"]) == OBJECTS
