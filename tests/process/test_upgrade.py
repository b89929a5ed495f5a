"""The data directory of an earlier release is read and continued: its database, checkpoints, run directories, requests.

`tests/data/service-before-regrouping` was made by the services of two earlier commits; tests/make_upgrade_data.py shows
how.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl.system.data_dir import DATABASE
from tests.contract.service import JOBS, TrainingService, running
from tests.contract.stack import Json
from tests.make_upgrade_data import CUT, DATA, MODEL, ORIGINAL, PREFIX, SAVE_STEPS, SETTINGS, STEPS

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
RELEASES = ("a7b999e", "6715426")


class Upgraded(TrainingService):
    """A service of today on a copy of a release's data directory."""

    def __init__(self, root: Path, release: str) -> None:
        super().__init__(root, **SETTINGS)
        before, here = str(ORIGINAL).encode(), str(root).encode()
        assert len(before) == len(here), "cursors of events and records of SQLite count bytes"
        shutil.copytree(MODEL, root / "model")
        shutil.copytree(DATA / release / "data", self.data_dir)
        for path in [path for path in self.data_dir.rglob("*") if path.is_file()]:
            path.write_bytes(path.read_bytes().replace(before, here))
        answers = (DATA / release / "answers.json").read_bytes()
        self.answers: Json = json.loads(answers.replace(before, here))
        """What the release answered, by path, just before it was killed."""
        self.requests: dict[str, tuple[str, Json]] = json.loads((DATA / release / "requests.json").read_text())
        """What the jobs were made from. Its model is at the original path."""

    def losses(self, job: str) -> list[tuple[str, int, float]]:
        """Kind, step and loss of every metric point."""
        points = self.get(f"{JOBS}/{job}/metrics").json()["data"]
        return [(p["kind"], p["step"], p["metrics"].get("loss", p["metrics"].get("eval_loss"))) for p in points]


@pytest.fixture(scope="module", params=RELEASES)
def service(request: pytest.FixtureRequest) -> Iterator[Upgraded]:
    """Running, with all jobs ended: the first test waits for the one that was cut off."""
    root = Path(tempfile.mkdtemp(prefix=Path(PREFIX).name, dir=Path(PREFIX).parent))
    try:
        with running(Upgraded(root, request.param)) as service:
            service.wait("sft-cut", "completed")
            yield service
    finally:
        shutil.rmtree(root)


def assert_keeps(before: Any, now: Any, where: str) -> None:
    """Whatever was answered before is answered now; objects may have gained fields."""
    if isinstance(before, dict) and isinstance(now, dict):
        assert before.keys() <= now.keys(), f"{where}: {before.keys() - now.keys()} is missing"
        for name, value in before.items():
            assert_keeps(value, now[name], f"{where}.{name}")
    elif isinstance(before, list) and isinstance(now, list):
        assert len(before) == len(now), where
        for number, pair in enumerate(zip(before, now, strict=True)):
            assert_keeps(*pair, f"{where}[{number}]")
    else:
        assert before == now, where


def test_the_database_is_whole_and_has_the_schema_of_a_new_one(service: Upgraded, tmp_path: Path) -> None:
    Store(tmp_path / DATABASE).close()
    assert schema(service.data_dir / DATABASE) == schema(tmp_path / DATABASE)
    with closing(sqlite3.connect(service.data_dir / DATABASE)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def schema(path: Path) -> set[tuple[Any, ...]]:
    """The version, and every table, view, index and trigger with its columns."""
    with closing(sqlite3.connect(path)) as database:
        columns = database.execute(
            "SELECT m.type, m.name, c.name, c.type FROM sqlite_schema AS m LEFT JOIN pragma_table_info(m.name) AS c"
        )
        return {*columns, *database.execute("PRAGMA user_version")}


def test_jobs_that_had_ended_and_datasets_are_shown_as_before(service: Upgraded) -> None:
    assert service.jobs() == list(service.requests)
    shown = {path: before for path, before in service.answers.items() if "/sft-cut/" not in path}
    assert len(shown) == 8
    for path, before in shown.items():
        assert_keeps(before, service.get(path).json(), path)


@pytest.mark.parametrize("job", ["sft-whole", "dpo-whole", "sft-cut"])
def test_the_same_request_again_is_the_same_job(service: Upgraded, job: str) -> None:
    path, body = service.requests[job]
    before = service.status(job)
    assert service.post(path, body).status_code == 200
    assert service.status(job) == before
    other = {**body, "provider_options": {**body["provider_options"], "seed": 7}}
    assert service.post(path, other).status_code == 409


def test_an_interrupted_job_continues_from_its_checkpoint_to_its_end(service: Upgraded) -> None:
    attempts = service.status("sft-cut")["resources_allocated"]["attempts"]
    assert [attempt["start_step"] for attempt in attempts] == [0, SAVE_STEPS]
    events = [line["event"] for line in service.get(f"{JOBS}/sft-cut/events", limit=1000).json()["data"]]
    before = [line["event"] for line in service.answers[f"{JOBS}/sft-cut/events"]["data"]]
    assert events[: len(before)] == before
    steps = [event["step"] for event in events if event["type"] == "progress"]
    assert steps == [*range(1, CUT), *range(SAVE_STEPS + 1, STEPS + 1)]


def test_an_interrupted_job_has_the_losses_of_one_that_was_not(service: Upgraded) -> None:
    """Of another release, and perhaps of another machine: not to the last bit."""
    found, expected = service.losses("sft-cut"), service.losses("sft-whole")
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    assert [point[2] for point in found] == pytest.approx([point[2] for point in expected], rel=1e-4)


def test_checkpoints_of_the_release_can_be_downloaded(service: Upgraded) -> None:
    path = f"{JOBS}/sft-whole/checkpoints/checkpoint-{STEPS - SAVE_STEPS}"
    for file in service.answers[path]["files"]:
        content = service.get(f"{path}/files/{file['path']}").content
        assert hashlib.sha256(content).hexdigest() == file["sha256"], file
    for job, weights in (("sft-whole", "model"), ("dpo-whole", "adapter_model")):
        final = service.get(f"{JOBS}/{job}/checkpoints/final/files/{weights}.safetensors").content
        assert load(final)
