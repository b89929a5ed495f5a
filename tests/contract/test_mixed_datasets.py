"""Option `mixture` on the service: several registered datasets in one job, checked, planned, held out and trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.cli import main as cli
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

OTHERS = [{"question": f"Spell {word}.", "reply": "-".join(word)} for word in ("cat", "tree", "stone", "river", "sun")]
COLUMNS = {"prompt": "question", "completion": "reply"}
MIXTURE = [
    {"dataset_id": "sums", "weight": 1},
    {"dataset_id": "spelling", "weight": 3, "columns": COLUMNS},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running(TrainingService(tmp_path_factory.mktemp("mixed"))) as found:
        for name, rows in (("sums", QUESTIONS), ("spelling", OTHERS)):
            found.register(name, rows)
        yield found


def split(name: str) -> dict[str, Any]:
    body = sft(name, "sums")
    body["training_config"]["data_config"]["train_split_percentage"] = 0.8
    return body


def test_a_job_trains_on_a_mixture_with_held_out_rows_of_each(service: TrainingService) -> None:
    job = service.submit(SFT, split("mixed"), options={"mixture": MIXTURE})
    service.wait(job, "completed")
    status = service.status("mixed")["resources_allocated"]
    of_epoch = status["effective_config"]["recipe"]["effective"]["mixture"]
    assert [one["dataset_id"] for one in of_epoch] == ["sums", "spelling"]
    total = sum(one["rows"] for one in of_epoch)
    assert sum(one["rows_per_epoch"] for one in of_epoch) == total
    assert abs(of_epoch[1]["rows_per_epoch"] - 0.75 * total) < 1
    points = [point["metrics"] for point in service.get("/post-training/jobs/mixed/metrics").json()["data"]]
    names = set().union(*points)
    assert {"loss/sums", "loss/spelling", "eval_loss/sums", "eval_loss/spelling"} <= names


def test_a_preflight_counts_all_datasets(service: TrainingService) -> None:
    answer = service.post("/post-training/preflight", split("planned"), options={"mixture": MIXTURE})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    of_epoch = found["data"]["mixture"]
    assert [one["dataset_id"] for one in of_epoch] == ["sums", "spelling"]
    assert found["data"]["trained"] == sum(one["rows"] for one in of_epoch) == round(0.8 * len(QUESTIONS)) + 4


def test_a_preview_shows_rows_of_each_dataset_by_its_name(service: TrainingService) -> None:
    body = {**sft("shown", "sums"), "first_row": len(QUESTIONS) - 1, "rows": 3}
    answer = service.post("/post-training/preview", body, options={"mixture": MIXTURE})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    shown = [(row["dataset_id"], row["row"]) for row in found["rows"]]
    assert shown == [("sums", len(QUESTIONS) - 1), ("spelling", 0), ("spelling", 1)]
    assert found["data"]["num_rows"] == len(QUESTIONS) + len(OTHERS)
    assert "Spell cat." in "".join(found["rows"][1]["texts"])


def test_a_bad_part_is_refused_by_its_number(service: TrainingService) -> None:
    for mixture, field, message in (
        ([MIXTURE[0], {"dataset_id": "absent", "weight": 1}], "mixture.1.dataset_id", "no dataset of this name"),
        ([MIXTURE[0], {"dataset_id": "spelling", "weight": 1}], "spelling", "row 0"),
    ):
        answer = service.post(SFT, sft("refused", "sums"), options={"mixture": mixture})
        assert answer.status_code == 400
        assert field in answer.text
        assert message in answer.text


def test_files_are_mixed_from_the_command_line(
    service: TrainingService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    files = []
    for name, rows in (("one", QUESTIONS[:4]), ("two", QUESTIONS[4:8])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", str(files[0]), "--mix", str(files[1]), "--weights", "3,1", "--job", "from-files"]
    model = sft("model", "sums")["model"]
    code = cli.main([*words, "--url", service.url, "--model", model, "--detach"])
    assert code == 0, capsys.readouterr()
    spec = service.status("from-files")["resources_allocated"]["effective_config"]
    assert (spec["share"]["weight"], spec["mixed_with"][0]["share"]["weight"]) == (3, 1)
