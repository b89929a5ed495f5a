"""Both providers on every Llama Stack release that has post-training, each a real server of it, from the shipped files.

What trains is played by tests/fake_trainer.py, but for one job on releases whose name stands in `TRAINED`.
`TRL_RELEASES` names the releases (scripts/test-matrix.sh sets it); CI runs the newest. Under 0.3.5 the other contract
tests run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.payloads import LORA, PAIRS, QUESTIONS, promised, sft
from tests.contract.release_stack import ReleaseStack, full_dpo, sentence
from tests.contract.service import TrainingService, running
from tests.contract.stack import DPO, SFT, Json, poll, serving
from tests.fake_trainer import fake_trainer
from tests.releases import NATIVE
from tests.required import ALL_SERVERS
from tests.tiny import tiny_model

# Making a release's environment takes a minute, once.
pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

RELEASES = os.environ.get("TRL_RELEASES", "0.3.5 0.6.1").split()
# Under 0.3.5 most other contract tests train: here it is served only where it is named.
TRAINED = ("0.2.23", "0.3.5", "0.6.1") if "TRL_RELEASES" in os.environ else ("0.6.1",)
SERVED = [release for release in RELEASES if release in NATIVE and ("TRL_RELEASES" in os.environ or release != "0.3.5")]
CLIENT = Path(__file__).with_name("release_client.py")
LONG = 5000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[TrainingService]:
    """What remote::trl_remote calls, whichever release it is in."""
    root = tmp_path_factory.mktemp("service")
    with running(TrainingService(root, train_python=str(fake_trainer(root)))) as service:
        yield service


@pytest.fixture(
    scope="module",
    params=[f"{release}-{kind}" for release in SERVED for kind in ("inline", "remote")],
)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[ReleaseStack]:
    release, _, kind = request.param.partition("-")
    service = request.getfixturevalue("service") if kind == "remote" else None
    with serving(ReleaseStack(tmp_path_factory.mktemp(request.param), release, service)) as stack:
        stack.register("rows", QUESTIONS)
        stack.register("pairs", PAIRS, dataset_type="preference")
        yield stack


def named(stack: ReleaseStack, name: str) -> str:
    """A job's name that no other release has on the service that they share."""
    return f"{name}-{stack.release}"


def long_job(stack: ReleaseStack, name: str) -> str:
    body = sft(named(stack, name), "rows")
    body["training_config"] |= {"n_epochs": LONG, "max_steps_per_epoch": 1}
    return stack.submit(SFT, body)


def effective(stack: ReleaseStack, job: str) -> Json:
    return dict(stack.status(job)["resources_allocated"]["effective_config"])


def test_sft(stack: ReleaseStack) -> None:
    job = stack.submit(SFT, sft(named(stack, "sft"), "rows", algorithm_config=LORA, checkpoint_dir="results"))
    done = stack.wait(job, "completed")
    assert done["job_uuid"] == job
    assert done["scheduled_at"] <= done["started_at"] <= done["completed_at"]
    used = effective(stack, job)
    assert (used["method"]["algorithm"], used["lora"]["rank"], used["optimizer"]["learning_rate"]) == ("sft", 4, 1e-3)
    assert used["max_steps_per_epoch"] is None, "one step per epoch, which 0.6 fills in, is nothing that was requested"
    assert job in stack.jobs()
    artifacts = stack.get("/post-training/job/artifacts", job_uuid=job).json()
    assert artifacts == {"job_uuid": job, "checkpoints": done["checkpoints"]}
    assert done["checkpoints"][-1]["path"] == str(stack.data_dir / "checkpoints" / "results" / job / "final")
    # A validation loss that there is not is null on every release, also where its schema demands a number.
    assert done["checkpoints"][-1]["training_metrics"]["train_loss"] > 0
    assert done["checkpoints"][-1]["training_metrics"]["validation_loss"] is None


@pytest.mark.in_turn
def test_dpo(stack: ReleaseStack) -> None:
    job = stack.submit(DPO, full_dpo(promised(named(stack, "dpo"), "pairs")))
    stack.wait(job, "completed")
    used = effective(stack, job)
    assert (used["model"], used["method"]["beta"], used["method"]["loss_type"]) == (str(tiny_model()), 0.2, "hinge")


@pytest.mark.in_turn
def test_the_promised_payload(stack: ReleaseStack) -> None:
    """Taken as it stands where the provider's annotations are the schema, else a 400 that names what is missing."""
    body = promised(named(stack, "promised"), "pairs")
    answer = stack.post(DPO, body)
    if not stack.surface.lenient:
        message = sentence(answer)
        assert all(name in message for name in ("beta", "data_format", "hyperparam_search_config", "logger_config")), (
            message
        )
        return
    assert answer.status_code == 200, answer.text
    stack.wait(body["job_uuid"], "completed")
    used = effective(stack, body["job_uuid"])
    assert (used["method"]["reward_scale"], used["method"]["reward_clip"], used["optimizer"]["learning_rate"]) == (
        1.0,
        5.0,
        5e-5,
    )


@pytest.mark.in_turn
def test_cancel(stack: ReleaseStack) -> None:
    job = long_job(stack, "cancelled")
    poll(lambda: stack.status(job)["status"] == "in_progress", "the job trains", timeout=30)
    assert stack.cancel(job).status_code in (200, 204)
    stack.wait(job, "cancelled")
    assert not stack.processes(job)
    assert stack.cancel(job).status_code in (200, 204)  # what a client may repeat


@pytest.mark.in_turn
def test_unknown_job(stack: ReleaseStack) -> None:
    answers = [stack.get(f"/post-training/job/{call}", job_uuid="nobody") for call in ("status", "artifacts")]
    for answer in [*answers, stack.cancel("nobody")]:
        assert "job 'nobody' not found" in sentence(answer, stack.surface.unknown_job)


@pytest.mark.in_turn
def test_duplicate(stack: ReleaseStack) -> None:
    body = sft(named(stack, "twice"), "rows")
    job = stack.submit(SFT, body)
    assert stack.submit(SFT, body) == job
    other = {**body, "training_config": {**body["training_config"], "n_epochs": 2}}
    assert f"{job!r}" in sentence(stack.post(SFT, other), stack.surface.taken_job)
    stack.wait(job, "completed")
    assert "completed already" in sentence(stack.cancel(job), stack.surface.taken_job)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training_config": {}}, "n_epochs"),
        (
            {"training_config": {"n_epochs": 0, "data_config": sft("", "rows")["training_config"]["data_config"]}},
            "n_epochs",
        ),
        ({"logger_config": {"type": "wandb"}}, "logger_config="),
        ({"model": "/nowhere"}, "model='/nowhere' is not supported"),
        ({"algorithm_config": {**LORA, "apply_lora_to_output": True}}, "algorithm_config.apply_lora_to_output"),
    ],
)
def test_bad_body(stack: ReleaseStack, changes: Json, field: str) -> None:
    job = named(stack, "bad")
    assert field in sentence(stack.post(SFT, {**sft(job, "rows"), **changes}))
    assert job not in stack.jobs()


@pytest.mark.in_turn
def test_bad_dataset(stack: ReleaseStack) -> None:
    assert "dataset_id='nowhere'" in sentence(stack.post(SFT, sft(named(stack, "none"), "nowhere")))
    stack.register("bad", [*QUESTIONS, {"what": "ever"}])
    assert "row 8: " in sentence(stack.post(SFT, sft(named(stack, "bad-rows"), "bad")))


def test_rows_that_cannot_be_stored_are_an_error_with_its_text(stack: ReleaseStack) -> None:
    if stack.service is not None:
        pytest.skip("the service's own tests break its disk")
    stack.register("unstored", [*QUESTIONS, {"prompt": "Anything else?", "completion": "No."}])
    datasets = stack.data_dir / "datasets"
    datasets.mkdir(exist_ok=True)
    aside = datasets.rename(stack.root / "aside")
    datasets.touch()
    try:
        message = sentence(stack.post(SFT, sft(named(stack, "unstored"), "unstored")), stack.surface.broken)
    finally:
        datasets.unlink()
        aside.rename(datasets)
    assert "dataset 'unstored' cannot be stored: " in message
    assert named(stack, "unstored") not in stack.jobs()


def test_provider_data(stack: ReleaseStack) -> None:
    job = stack.submit(SFT, sft(named(stack, "options"), "rows"), options={"seed": 7, "max_seq_length": 96})
    used = effective(stack, job)
    assert (used["seed"], used["max_seq_length"]) == (7, 96)
    answer = stack.post(SFT, sft(named(stack, "refused"), "rows"), options={"sead": 7})
    assert "provider_options.sead=7 is not supported: there is no such option" in sentence(answer)
    stack.wait(job, "completed")


@pytest.mark.in_turn
def test_client(stack: ReleaseStack) -> None:
    """The release's own llama-stack-client, as far as it can: from 0.6 on it asks for a job's status where there is
    none any more."""
    surface = stack.surface
    requested = {
        "url": stack.url,
        "model": str(tiny_model()),
        "name": named(stack, "client"),
        "rows": QUESTIONS,
        "dpo": full_dpo(promised(named(stack, "client-dpo"), "pairs")),
        "post_training": surface.client,
        "datasets": surface.client_datasets,
        "job_calls": not surface.job_in_path,
    }
    done = subprocess.run(
        [stack.python, CLIENT], input=json.dumps(requested), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == 7
    if not requested["job_calls"]:
        assert stack.cancel(requested["name"]).status_code == 200
    stack.wait(requested["name"], "cancelled")
    stack.wait(requested["dpo"]["job_uuid"], "completed")


@pytest.mark.skipif(not ALL_SERVERS, reason="CI: 0.3.5 in test_adapter.py, OGX in test_external_api.py")
def test_a_service_that_is_down_is_named(stack: ReleaseStack) -> None:
    if stack.service is None:
        pytest.skip("the inline provider calls no service")
    stack.service.stop()
    try:
        answers = [stack.get("/post-training/jobs"), stack.post(SFT, sft(named(stack, "unheard"), "rows"))]
        for answer in answers:
            assert stack.service.url in sentence(answer, stack.surface.unreachable)
    finally:
        stack.service.start()
    assert named(stack, "unheard") not in stack.jobs()


@pytest.mark.in_turn
def test_restart_in_mid_job(stack: ReleaseStack) -> None:
    job = long_job(stack, "survivor")
    poll(lambda: stack.status(job)["resources_allocated"]["progress"]["step"] > 1, "the job trains", timeout=30)
    trainers = stack.processes(job)
    stack.stop()
    assert all(process.is_running() for process in trainers), "the training ended with Llama Stack"
    stack.start()
    after = stack.wait_for_checkpoint(job)
    assert after["status"] == "in_progress"
    assert after["resources_allocated"]["attempt"] == 1
    assert [process.pid for process in stack.processes(job)] == [process.pid for process in trainers]
    assert stack.cancel(job).status_code in (200, 204)
    stack.wait(job, "cancelled")


@pytest.mark.skipif(not ALL_SERVERS, reason="CI: trainings under 0.3.5 in test_http_jobs.py")
def test_a_job_that_really_trains(stack: ReleaseStack) -> None:
    if stack.service is not None or stack.release not in TRAINED:
        pytest.skip("trained once per release, by the inline provider")
    from safetensors.torch import load_file

    body = full_dpo(promised("real", "pairs"))
    body["training_config"] |= {"n_epochs": 1, "max_steps_per_epoch": 2}
    done = stack.wait(stack.submit(DPO, body), "completed", timeout=120)
    final = Path(done["checkpoints"][-1]["path"])
    tuned, base = (load_file(path / "model.safetensors") for path in (final, tiny_model()))
    name = "model.embed_tokens.weight"
    assert not tuned[name].equal(base[name])


@pytest.mark.parametrize("release", SERVED)
def test_an_interpreter_that_cannot_train_is_named_at_the_start(release: str, tmp_path: Path) -> None:
    stack = ReleaseStack(tmp_path, release)
    stack.environ["TRL_TRAIN_PYTHON"] = "/nowhere/python"
    with pytest.raises(AssertionError, match="ended by itself"):
        stack.start()
    message = "train_python='/nowhere/python' is not supported: /nowhere/python cannot be started"
    assert message in " ".join(stack.log.read_text().split())


def test_every_job_is_listed_once(stack: ReleaseStack) -> None:
    jobs: Any = stack.jobs()
    assert len(jobs) == len({*jobs}) > 0


@pytest.mark.skipif(not ALL_SERVERS, reason="CI: from 0.3.5 to OGX in test_external_api.py")
@pytest.mark.skipif(not {"0.3.5", "0.6.1"} <= {*RELEASES}, reason="TRL_RELEASES leaves out one of both")
def test_jobs_of_0_3_5_are_listed_and_followed_by_0_6_1_on_the_same_data_directory(tmp_path: Path) -> None:
    with serving(ReleaseStack(tmp_path, "0.3.5")) as before:
        before.register("rows", QUESTIONS)
        done = before.wait(before.submit(SFT, sft("done", "rows")), "completed")
        under_way, waiting = long_job(before, "under-way"), before.submit(SFT, sft("waiting", "rows"))
        before.wait_for_checkpoint(under_way)
        trainers = [process.pid for process in before.processes(under_way)]
        jobs = before.jobs()
        before.stop()
        after = ReleaseStack(tmp_path, "0.6.1")
        with serving(after):
            assert after.jobs() == jobs == ["done", under_way, waiting]
            assert after.status("done") == done
            assert after.status(under_way)["status"] == "in_progress"
            assert [process.pid for process in after.processes(under_way)] == trainers
            # Sent again by a client that does not know of the upgrade, it is the same job.
            assert after.submit(SFT, sft("done", "rows")) == "done"
            assert after.cancel(under_way).status_code == 200
            after.wait(under_way, "cancelled")
            assert after.wait(waiting, "completed")["resources_allocated"]["attempt"] == 1
            after.submit(SFT, sft("new", "rows"))  # the registered dataset is there, too
            after.wait("new", "completed")
        before.start()


@pytest.mark.skipif(not {"0.2.23", "0.6.1"} <= {*RELEASES}, reason="TRL_RELEASES leaves out one of both")
def test_jobs_of_0_2_are_listed_by_0_6_1_and_its_datasets_must_be_registered_again(tmp_path: Path) -> None:
    with serving(ReleaseStack(tmp_path, "0.2.23")) as before:
        before.register("rows", QUESTIONS)
        done = before.wait(before.submit(SFT, sft("done", "rows")), "completed")
        before.stop()
        after = ReleaseStack(tmp_path, "0.6.1")
        with serving(after):
            assert after.status("done") == done
            assert "dataset_id='rows'" in sentence(after.post(SFT, sft("new", "rows")))
            after.register("rows", QUESTIONS)
            after.wait(after.submit(SFT, sft("new", "rows")), "completed")
        before.start()
