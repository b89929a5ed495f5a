"""What Prometheus reads of a service whose jobs run and whose process is killed; trainings are played."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import SFT, poll
from tests.fake_trainer import fake_trainer
from tests.required import lacking

pytestmark = pytest.mark.contract

STEPS = 30
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    tokens = [{"token": "scrapes", "role": "metrics"}]
    settings = {"train_python": str(fake_trainer(root)), "api_token": "operator", "tokens": tokens}
    with running_service(root, **settings) as service:
        service.session.headers["Authorization"] = "Bearer operator"
        service.register("questions", QUESTIONS)
        yield service


def scraped(service: TrainingService) -> str:
    answer = requests.get(f"{service.url}/metrics", headers={"Authorization": "Bearer scrapes"}, timeout=10)
    assert answer.status_code == 200, answer.text
    return answer.text


def total(text: str, name: str) -> float:
    """The sum of all series of a metric."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


def has_series(service: TrainingService, metric: str, job_uuid: str) -> bool:
    return f'{metric}{{job_uuid="{job_uuid}"}}' in scraped(service)


def train(service: TrainingService, job_uuid: str) -> None:
    body = sft(job_uuid, "questions")
    body["training_config"]["n_epochs"] = STEPS
    service.submit(SFT, body)


def test_counters_are_exact_and_never_go_back_over_kills_of_the_service(service: TrainingService) -> None:
    counters = (
        "trl_tokens_total",
        "trl_jobs_finished_total",
        "trl_attempts_total",
        "trl_checkpoint_write_seconds_count",
    )
    before = dict.fromkeys(counters, 0.0)
    for number in (1, 2):
        name, ended = f"held-{number}", partial(lambda most: total(scraped(service), counters[1]) == most, number)
        train(service, name)
        poll(partial(has_series, service, "trl_job_step", name), "the job has a step", timeout=30)
        run_dir = service.data_dir / "jobs" / name / "attempts" / "1"
        poll((run_dir / "spec.json").exists, "its attempt is written", timeout=30)
        service.kill()
        (run_dir / "go").touch()
        service.start()
        poll(ended, "the job has ended", timeout=30)
        text = scraped(service)
        now = {name: total(text, name) for name in counters}
        assert all(now[name] >= before[name] for name in counters), (before, now)
        before = now
    # A played step has 10 tokens; a job writes one checkpoint and an export.
    assert before == dict(zip(counters, (2 * STEPS * 10, 2, 2, 4), strict=True))
    assert "job_uuid" not in scraped(service)


def test_a_token_of_the_role_metrics_reads_nothing_else_and_none_reads_nothing(service: TrainingService) -> None:
    def status(path: str, token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return requests.get(f"{service.url}{path}", headers=headers, timeout=10).status_code

    assert [status("/metrics", token) for token in (None, "wrong", "scrapes", "operator")] == [401, 401, 200, 200]
    assert [status(path, "scrapes") for path in ("/v1/nodes", "/v1/post-training/jobs", "/", "/docs")] == [403] * 4
    answer = requests.post(
        f"{service.url}/login", data={"token": "scrapes"}, headers={"Origin": service.url}, timeout=10
    )
    assert answer.status_code == 403
    assert "has the role metrics, which has no pages" in answer.text


def test_promtool_accepts_the_metrics(service: TrainingService) -> None:
    if PROMTOOL is None:
        lacking("promtool is not installed: scripts/install-debian-packages.sh installs that of Debian's prometheus")
    train(service, "held-checked")
    poll(partial(has_series, service, "trl_job_loss", "held-checked"), "the job has a loss", timeout=30)
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=scraped(service), capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
