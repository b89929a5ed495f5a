"""The external API on real servers, from the shipped files: both providers, on every release that takes external APIs.

What trains is played by tests/fake_trainer.py. `TRL_RELEASES` names the releases (scripts/test-matrix.sh sets it); CI
runs OGX. Where it is set, one job really trains under OGX.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract.external import EXTERNAL, ExternalStack
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.release_stack import ReleaseStack, full_dpo, sentence
from tests.contract.service import TrainingService, running
from tests.contract.stack import DPO, SFT, Json, serving
from tests.fake_trainer import fake_trainer
from tests.releases import OGX, python_of
from tests.required import ALL_SERVERS
from tests.tiny import tiny_model

# Making a release's environment takes a minute, once.
pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

RELEASES = [release for release in os.environ.get("TRL_RELEASES", OGX).split() if release in EXTERNAL]
CLIENTS = {
    "0.2.23": ("", "", True),
    "0.3.5": ("alpha", "", True),
    "0.4.7": ("alpha", "beta", True),
    "0.5.4": ("alpha", "beta", False),
    "0.6.1": ("alpha", "beta", False),
}
"""What of the release's client has post_training, what datasets, and whether it can ask for one job."""


@pytest.fixture(
    scope="module", params=[(release, kind) for release in RELEASES for kind in ("inline", "remote")], ids="-".join
)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalStack]:
    release, kind = request.param
    root = tmp_path_factory.mktemp(f"external-{release}-{kind}")
    if kind == "inline":
        with serving(ExternalStack(root, release)) as stack:
            yield stack
        return
    (root / "service").mkdir()
    with (
        running(TrainingService(root / "service", train_python=str(fake_trainer(root)))) as service,
        serving(ExternalStack(root, release, service)) as stack,
    ):
        yield stack


def held(job_uuid: str, dataset_id: str) -> Json:
    """A job of four steps that waits before its last one."""
    body = sft(job_uuid, dataset_id)
    body["training_config"]["n_epochs"] = 4
    return body


@pytest.fixture(scope="module")
def done(stack: ExternalStack) -> Json:
    """The promised payload, as it stands, when it has been trained."""
    stack.register("pairs", PAIRS, dataset_type="preference")
    return stack.wait(stack.submit(DPO, promised("promised", "pairs")), "completed", timeout=30)


@pytest.fixture(scope="module")
def questions(stack: ExternalStack) -> str:
    return stack.register("questions", QUESTIONS)


def test_the_promised_payload_is_a_job_and_both_styles_and_prefixes_show_the_same_job(
    stack: ExternalStack, done: Json
) -> None:
    effective = done["resources_allocated"]["effective_config"]
    assert (effective["algorithm"], effective["method"]["reward_clip"], effective["n_epochs"]) == (
        "dpo",
        5.0,
        3,
    )
    names = ["my-dpo-model-checkpoint-1", "my-dpo-model-final"]
    assert [checkpoint["identifier"] for checkpoint in done["checkpoints"]] == names
    assert Path(done["checkpoints"][-1]["path"]) == stack.data_dir / "checkpoints" / "results" / "promised" / "final"
    for prefix in ("/v1", "/v1alpha"):
        assert {"job_uuid": "promised"} in stack.get("/post-training/jobs", prefix=prefix).json()["data"]
        for call in ("status", "artifacts"):
            wanted = done if call == "status" else {key: done[key] for key in ("job_uuid", "checkpoints")}
            assert stack.get(f"/post-training/job/{call}", prefix=prefix, job_uuid="promised").json() == wanted
            assert stack.get(f"/post-training/jobs/promised/{call}", prefix=prefix).json() == wanted


def test_options_of_the_header_count_and_a_job_that_is_sent_again_is_the_same_or_a_409(
    stack: ExternalStack, questions: str
) -> None:
    body, options = sft("tuned", questions), {"seed": 7, "priority": "high"}
    assert stack.submit(SFT, body, options=options) == "tuned"
    assert stack.submit(SFT, body, options=options) == "tuned"
    effective = stack.wait("tuned", "completed", timeout=30)["resources_allocated"]["effective_config"]
    assert (effective["seed"], effective["lifecycle"]["priority"], effective["algorithm"]) == (7, 1, "sft")
    assert "job 'tuned' exists already" in sentence(stack.post(SFT, body, options={"seed": 8}), 409)
    refused = sentence(stack.post(SFT, sft("untuned", questions), options={"sead": 7}), 400)
    assert "provider_options.sead=7 is not supported: there is no such option" in refused


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (SFT, {"model": "/nowhere"}, "model='/nowhere' is not supported"),
        (SFT, {"training_config": None}, "training_config"),
        (SFT, {"training_config": {"n_epochs": 0}}, "n_epochs"),
        (SFT, {"logger_config": {"type": "wandb"}}, "logger_config="),
        (DPO, {"job_uuid": "a/b"}, "job_uuid='a/b' is not supported"),
        (DPO, {"algorithm_config": {"beta": -1}}, "algorithm_config.beta"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(
    stack: ExternalStack, questions: str, path: str, changes: Json, message: str
) -> None:
    assert message in sentence(stack.post(path, {**sft("bad", questions), **changes}), 400)
    assert "bad" not in stack.jobs()


@pytest.mark.in_turn
@pytest.mark.parametrize("header", ["X-LlamaStack-Provider-Data", "X-OGX-Provider-Data"])
@pytest.mark.parametrize("value", ["seed=7", "[7]", '"trl"'])
def test_a_header_that_is_no_object_is_a_400_where_the_server_would_drop_it(
    stack: ExternalStack, questions: str, header: str, value: str
) -> None:
    if header not in stack.headers:
        pytest.skip("Llama Stack up to 0.6 drops it before any provider is called, and the header of OGX is OGX's")
    answer = requests.post(f"{stack.url}/v1{SFT}", json=sft("bad", questions), headers={header: value}, timeout=30)
    assert f"{header}={value!r} is not supported: expected a JSON object" in sentence(answer, 400)


@pytest.mark.in_turn
def test_ogxs_own_header_counts_where_both_are_sent(stack: ExternalStack, questions: str) -> None:
    if stack.release != OGX:
        pytest.skip("the header of OGX is OGX's")
    for theirs, ours, named in (("sead", "seed", "provider_options.sead=7"), ("seed", "sead", "model='/nowhere'")):
        values = {"X-OGX-Provider-Data": {theirs: 7}, "X-LlamaStack-Provider-Data": {ours: 7}}
        headers = {name: json.dumps({"trl": value}) for name, value in values.items()}
        body = sft("bad", questions, model="/nowhere" if theirs == "seed" else str(tiny_model()))
        answer = requests.post(f"{stack.url}/v1{SFT}", json=body, headers=headers, timeout=30)
        assert f"{named} is not supported" in sentence(answer, 400)


@pytest.mark.in_turn
def test_a_field_that_a_call_does_not_have_is_refused_where_the_routes_are_ours(
    stack: ExternalStack, questions: str
) -> None:
    if not stack.has_datasets:
        pytest.skip("Llama Stack up to 0.6 drops it before any provider is called")
    message = "check_point_dir='here' is not supported: there is no such field"
    assert message in sentence(stack.post(SFT, sft("bad", questions, check_point_dir="here")), 400)
    assert "uuid=" in sentence(stack.post("/post-training/job/cancel", {"job_uuid": "nobody", "uuid": "nobody"}), 400)
    # As everywhere, what is null is not there.
    assert "'nobody' not found" in sentence(
        stack.post("/post-training/job/cancel", {"job_uuid": "nobody", "x": None}), 404
    )


@pytest.mark.skipif(not ALL_SERVERS, reason="all calls by tests/contract/test_adapter.py; TRL_TESTS=full runs it")
def test_a_service_that_is_down_is_a_502_that_names_it(stack: ExternalStack, questions: str) -> None:
    if stack.service is None:
        pytest.skip("the inline provider calls no service")
    stack.service.stop()
    try:
        answers = [
            stack.post("/post-training/job/cancel", {"job_uuid": "promised"}),
            stack.post(SFT, sft("unheard", questions)),
            *([stack.get("/datasets/questions")] if stack.has_datasets else []),
            *(stack.get("/post-training/jobs"), stack.get("/post-training/jobs/promised/status")),
            *([stack.get("/datasets")] if stack.has_datasets else []),
        ]
        assert all(f"the training service at {stack.service.url} " in sentence(answer, 502) for answer in answers)
    finally:
        stack.service.start()
    assert "unheard" not in stack.jobs()


@pytest.mark.in_turn
def test_bad_rows_and_unknown_datasets_are_400(stack: ExternalStack) -> None:
    message = "training_config.data_config.dataset_id='nowhere' is not supported"
    assert message in sentence(stack.post(SFT, sft("no-rows", "nowhere")), 400)
    stack.register("bad", [*QUESTIONS, {"what": "ever"}])
    assert "dataset 'bad', row 8: " in sentence(stack.post(SFT, sft("bad-rows", "bad")), 400)


@pytest.mark.in_turn
def test_unknown_jobs_are_404_in_both_styles_and_ended_ones_are_not_cancelled(stack: ExternalStack, done: Json) -> None:
    for prefix in ("/v1", "/v1alpha"):
        root = "/post-training"
        answers = [
            stack.get(f"{root}/job/status", prefix=prefix, job_uuid="nobody"),
            stack.get(f"{root}/job/artifacts", prefix=prefix, job_uuid="nobody"),
            stack.post(f"{root}/job/cancel", {"job_uuid": "nobody"}, prefix=prefix),
            stack.get(f"{root}/jobs/nobody/status", prefix=prefix),
            stack.get(f"{root}/jobs/nobody/artifacts", prefix=prefix),
            stack.post(f"{root}/jobs/nobody/cancel", None, prefix=prefix),
        ]
        assert all("job 'nobody' not found" in sentence(answer, 404) for answer in answers)
    assert "completed already" in sentence(stack.cancel("promised"), 409)


def test_client(stack: ExternalStack, questions: str, done: Json) -> None:
    """The release's own llama-stack-client, as far as it can: that of 0.7 has no post-training any more."""
    if stack.release not in CLIENTS:
        pytest.skip("its client, where it has one, knows no post-training")
    post_training, datasets, job_calls = CLIENTS[stack.release]
    requested = {
        "url": stack.url,
        "model": str(tiny_model()),
        "name": "client",
        "rows": QUESTIONS,
        "dpo": full_dpo(promised("client-dpo", "pairs")),
        "post_training": post_training,
        "datasets": datasets,
        "job_calls": job_calls,
    }
    command = [python_of(stack.release), Path(__file__).with_name("release_client.py")]
    called = subprocess.run(
        command, input=json.dumps(requested), capture_output=True, text=True, timeout=60, check=False
    )
    assert called.returncode == 0, called.stderr
    assert json.loads(called.stdout)["seed"] == 7
    if not job_calls:
        assert stack.cancel("client").status_code == 200
    stack.wait("client", "cancelled")
    stack.wait("client-dpo", "completed")


@pytest.mark.in_turn
def test_a_job_trains_through_a_restart_and_every_step_counts_once(stack: ExternalStack, questions: str) -> None:
    stack.submit(SFT, held("held-over", questions))
    before = stack.wait_for_checkpoint("held-over")
    (trainer, *_) = stack.processes("held-over")
    stack.stop()
    assert trainer.is_running(), "the training ended with the server"
    stack.start()
    assert stack.status("held-over")["started_at"] == before["started_at"]
    stack.release_job("held-over")
    after = stack.wait("held-over", "completed", timeout=30)
    assert after["resources_allocated"]["attempt"] == 1
    assert after["resources_allocated"]["progress"]["step"] == 4
    assert "held-over" in stack.jobs()


@pytest.mark.in_turn
def test_a_running_job_is_cancelled_in_either_style(stack: ExternalStack, questions: str) -> None:
    for name, cancel in (
        ("held-1", lambda: stack.cancel("held-1")),
        ("held-2", lambda: stack.post("/post-training/jobs/held-2/cancel", None, prefix="/v1alpha")),
    ):
        stack.submit(SFT, held(name, questions))
        stack.wait_for_checkpoint(name)
        answer = cancel()
        assert (answer.status_code, answer.json()) == (200, None), answer.text
        stack.wait(name, "cancelled", timeout=20)


def test_datasets_that_are_ours(stack: ExternalStack) -> None:
    if not stack.has_datasets:
        pytest.skip("Llama Stack's own take every purpose")
    prefixes = ("/v1",) if stack.release == "0.7.3" else ("/v1", "/v1beta")
    for prefix in prefixes:
        stack.register("one", PAIRS, metadata={"source": "us"})
        answer = stack.get("/datasets/one", prefix=prefix).json()
        assert (answer["identifier"], answer["metadata"]["num_rows"]) == ("one", len(PAIRS))
        assert answer in stack.get("/datasets", prefix=prefix).json()["data"]
        again = {"dataset_id": "one", "source": {"type": "rows", "rows": PAIRS[:1]}}
        assert "exists already with another content" in sentence(stack.post("/datasets", again, prefix=prefix), 409)
        assert requests.delete(f"{stack.url}{prefix}/datasets/one", timeout=30).status_code == 204
        assert "dataset 'one' not found" in sentence(stack.get("/datasets/one", prefix=prefix), 404)
        bad = stack.post("/datasets", {"dataset_id": "two", "purpose": "any"}, prefix=prefix)
        assert "purpose='any' is not supported" in sentence(bad, 400)

    file = stack.files / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    stack.register_source("from-a-file", {"type": "uri", "uri": str(file)})
    stack.wait(stack.submit(SFT, sft("on-a-file", "from-a-file")), "completed", timeout=30)
    outside: dict[str, Any] = {"dataset_id": "outside", "source": {"type": "uri", "uri": "/etc/hosts"}}
    assert "dataset_roots" in sentence(stack.post("/datasets", outside), 400)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "blob", "sha256": "0" * 64}, "blobs are not accepted here: use rows, or a uri"),
        ({"type": "uri", "uri": "rows.jsonl"}, "or send the rows themselves"),
        ({"type": "uri", "uri": "/etc/rows.jsonl"}, "or send the rows themselves"),
    ],
)
def test_where_there_is_no_service_none_is_mentioned(stack: ExternalStack, source: Json, message: str) -> None:
    if not stack.has_datasets or stack.service is not None:
        pytest.skip("these datasets are the service's, or Llama Stack's")
    answer = sentence(stack.post("/datasets", {"dataset_id": "refused", "source": source}), 400)
    assert message in answer
    assert not any(word in answer for word in ("service", "upload", "/v1/blobs"))
    assert "refused" not in [dataset["identifier"] for dataset in stack.get("/datasets").json()["data"]]


def test_rows_of_llama_stacks_own_datasets_are_read_where_it_refuses_the_purpose(stack: ExternalStack) -> None:
    if stack.release != "0.7.3":
        pytest.skip("0.7.3 alone has datasets that are not for post-training")
    body = {"dataset_id": "theirs", "purpose": "eval/question-answer", "source": {"type": "rows", "rows": QUESTIONS}}
    assert stack.post("/datasets", body, prefix="/v1beta").status_code == 200
    stack.wait(stack.submit(SFT, sft("on-theirs", "theirs")), "completed", timeout=30)


def test_a_job_really_trains_by_another_interpreter(stack: ExternalStack, done: Json) -> None:
    if stack.release != OGX or stack.service is not None or "TRL_RELEASES" not in os.environ:
        pytest.skip("one job, inline under OGX; not where TRL_RELEASES is not set, since it takes half a minute")
    trained = stack.wait(stack.submit(DPO, promised("real", "pairs")), "completed")
    assert trained["resources_allocated"]["progress"]["step"] == 6
    assert (Path(trained["checkpoints"][-1]["path"]) / "model.safetensors").exists()


@pytest.mark.skipif(OGX not in RELEASES, reason="upgrades from 0.3.5 end at OGX")
def test_jobs_of_llama_stack_are_listed_and_followed_by_ogx_and_those_that_wait_train_there(tmp_path: Path) -> None:
    before = ReleaseStack(tmp_path, "0.3.5")
    before.start()
    try:
        rows = before.register("rows", QUESTIONS)
        done = before.wait(before.submit(SFT, sft("done", rows)), "completed")
        before.submit(SFT, held("held", rows))
        before.wait_for_checkpoint("held")
        before.submit(DPO, promised("waits", before.register("pairs", PAIRS)))
        (trainer, *_) = before.processes("held")
        before.stop()
        # Not only the server is another one now, but its environment and its run file.
        with serving(ExternalStack(tmp_path, OGX)) as after:
            assert after.jobs() == ["done", "held", "waits"]
            assert after.status("done") == done
            assert trainer.is_running()
            after.release_job("held")
            assert after.wait("held", "completed")["resources_allocated"]["attempt"] == 1
            after.wait("waits", "completed")
            other = {**sft("done", rows), "model": str(tiny_model(tied=False))}
            after.register("rows", QUESTIONS)
            assert "exists already" in sentence(after.post(SFT, other), 409)
    finally:
        before.kill_tasks()
