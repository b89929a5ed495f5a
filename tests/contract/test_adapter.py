"""`remote::trl_remote` inside a running Llama Stack 0.3.5, with a running training service behind it."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
import requests
from llama_stack.core.datatypes import StackRunConfig
from llama_stack.core.distribution import get_provider_registry

from llama_stack_provider_trl import provider as inline_provider
from llama_stack_provider_trl.stack.compat import Api
from llama_stack_provider_trl_remote import provider as remote_provider
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.remote_stack import TOKEN, RemoteStack, running_remote_stack
from tests.contract.stack import DPO, LLAMA, SFT, Json
from tests.tiny import REPOSITORY, tiny_model

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[RemoteStack]:
    with running_remote_stack(tmp_path_factory.mktemp("remote")) as stack:
        yield stack


@pytest.fixture(scope="module")
def done(stack: RemoteStack) -> Json:
    """The promised payload, as it stands, when it has been trained."""
    stack.register("pairs", PAIRS, dataset_type="preference")
    return stack.wait(stack.submit(DPO, promised("promised", "pairs")), "completed", timeout=120)


def test_the_promised_payload_trains_on_two_ranks_and_its_result_loads(stack: RemoteStack, done: Json) -> None:
    from transformers import AutoModelForCausalLM

    resources = done["resources_allocated"]
    assert resources["effective_config"]["ranks"] == 2
    # 8 pairs, 4 on each of 2 ranks: one step per epoch.
    assert resources["progress"]["step"] == 3
    final = Path(done["checkpoints"][-1]["path"])
    assert final == stack.service.data_dir / "checkpoints" / "results" / "promised" / "final"
    tuned, base = (
        AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight for path in (final, tiny_model())
    )
    assert not tuned.equal(base)


def test_artifacts_and_status_are_the_services_own_under_both_prefixes(stack: RemoteStack, done: Json) -> None:
    for prefix in ("/v1", "/v1alpha"):
        for call, asked in (("status", "status?config=true"), ("artifacts", "artifacts")):
            there = stack.service.get(f"/post-training/jobs/promised/{asked}").json()
            assert stack.get(f"/post-training/job/{call}", prefix=prefix, job_uuid="promised").json() == there
    assert stack.jobs() == ["promised"]


def test_a_repeated_post_gets_its_job_back_even_when_its_dataset_is_gone(stack: RemoteStack, done: Json) -> None:
    assert requests.delete(f"{stack.url}/v1/datasets/pairs", timeout=30).status_code == 204
    assert stack.submit(DPO, promised("promised", "pairs")) == "promised"
    # The same body sent to the service itself is the same job, too.
    assert stack.service.submit(DPO, promised("promised", "pairs")) == "promised"
    assert stack.jobs() == ["promised"]


def test_rows_are_uploaded_once_per_content(stack: RemoteStack, done: Json) -> None:
    def blobs() -> set[Path]:
        return set((stack.service.data_dir / "datasets").glob("*.jsonl"))

    before = blobs()
    for name in ("questions", "the-same-questions"):
        stack.register(name, QUESTIONS)
        body = sft(f"on-{name}", name)
        body["training_config"]["n_epochs"] = 1000  # it does not complete before it is cancelled
        stack.submit(SFT, body)
    assert len(blobs() - before) == 1
    for name in ("questions", "the-same-questions"):
        assert stack.cancel(f"on-{name}").status_code == 200
        stack.wait(f"on-{name}", "cancelled", timeout=20)


def test_provider_options_reach_the_service_and_are_refused_there_by_name(stack: RemoteStack) -> None:
    stack.register("options", QUESTIONS)
    body = sft("options", "options")
    body["training_config"]["n_epochs"] = 1000
    stack.submit(SFT, body, options={"seed": 7, "priority": "high", "max_seq_length": 96})
    effective = stack.status("options")["resources_allocated"]["effective_config"]
    assert (effective["seed"], effective["max_seq_length"], effective["lifecycle"]["priority"]) == (7, 96, 1)
    assert stack.post(SFT, body, options={"seed": 8}).status_code == 409
    answer = stack.post(SFT, sft("refused", "options"), options={"sead": 7})
    assert answer.status_code == 400
    assert "provider_options.sead=7 is not supported: there is no such option" in answer.json()["detail"]
    assert stack.cancel("options").status_code == 200
    stack.wait("options", "cancelled", timeout=20)


def test_the_token_is_in_no_answer_and_no_log(stack: RemoteStack, done: Json) -> None:
    providers = stack.get("/providers").text
    assert stack.service.url in providers
    assert TOKEN not in providers + stack.log.read_text() + stack.service.log.read_text()


def test_a_service_that_is_down_is_a_502_that_names_it_and_jobs_are_back_with_it(
    stack: RemoteStack, done: Json
) -> None:
    stack.register("while-down", QUESTIONS)
    stack.service.stop()
    answers = [
        stack.get("/post-training/jobs"),
        stack.get("/post-training/job/status", job_uuid="promised"),
        stack.get("/post-training/job/artifacts", job_uuid="promised"),
        stack.cancel("promised"),
        stack.post(SFT, sft("while-down", "while-down")),
    ]
    for answer in answers:
        assert answer.status_code == 502, answer.text
        assert f"the training service at {stack.service.url} accepts no connection" in answer.json()["detail"]
        assert "./scripts/run-remote-fsdp-server.sh" in answer.json()["detail"]
    stack.service.start()
    assert stack.status("promised") == done


def test_the_specs_in_providers_d_match_the_packages(tmp_path: Path) -> None:
    """As Llama Stack reads `external_providers_dir`, without `module:` on a provider's entry."""
    config = StackRunConfig.model_construct(external_providers_dir=REPOSITORY / "providers.d", providers={})
    found = get_provider_registry(config)[Api.post_training]
    for spec in (inline_provider.get_provider_spec(), remote_provider.get_provider_spec()):
        loaded = found[spec.provider_type].model_copy(update={"description": spec.description})
        assert loaded == spec


def test_the_build_file_names_what_can_be_installed() -> None:
    listed = subprocess.run(
        [LLAMA, "stack", "list-deps", REPOSITORY / "build_fsdp.yaml"], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split()[-1] == "llama_stack_provider_trl"


def test_each_dataset_of_a_mixture_is_uploaded_and_trained(stack: RemoteStack, done: Json) -> None:
    spelling = [{"prompt": f"Spell {word}.", "completion": "-".join(word)} for word in ("cat", "tree", "river")]
    for name, rows in (("sums", QUESTIONS[:5]), ("spelling", spelling)):
        stack.register(name, rows)
    mixture = [{"dataset_id": "sums", "weight": 1}, {"dataset_id": "spelling", "weight": 1}]
    job = stack.submit(SFT, sft("mixed", "sums"), options={"mixture": mixture, "nproc_per_node": 1})
    ended = stack.wait(job, "completed")
    found = ended["resources_allocated"]["effective_config"]["recipe"]["effective"]["mixture"]
    assert found == [
        {"dataset_id": "sums", "rows": 5, "rows_per_epoch": 4},
        {"dataset_id": "spelling", "rows": 3, "rows_per_epoch": 4},
    ]
    absent = [mixture[0], {"dataset_id": "absent", "weight": 1}]
    answer = stack.post(SFT, sft("absent", "sums"), options={"mixture": absent})
    assert answer.status_code == 400
    assert "absent" in answer.text
