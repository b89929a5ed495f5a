"""Jobs through a running Llama Stack, from POST to checkpoints, as a script with `requests` drives them."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.contract.payloads import (
    LORA,
    PAIRS,
    QUESTIONS,
    assert_original_example_is_honoured,
    original_example,
    promised,
    sft,
)
from tests.contract.stack import DPO, SFT, Json, LlamaStack, poll
from tests.tiny import tiny_model
from tests.tutorials import LLAMA_STACK, MODEL, blocks

pytestmark = pytest.mark.contract

# Through a data frame, a row of one shape gets NaN in the columns of the other.
MIXED_ROWS = [*QUESTIONS[:4], *({"instruction": "Say a number.", "output": str(n)} for n in range(4))]
# An empty cell of a CSV file is NaN as well.
CSV = "instruction,input,output\nAdd,1 and 2,3\nSay yes,,yes\nSubtract,1 from 3,2\nSay no,,no\n"
LORA_OPTIONS = {"merge_adapter": True, "max_seq_length": 96, "lr_scheduler": "cosine", "seed": 7}


class Submitted(NamedTuple):
    """Four jobs posted one after the other on a machine with one device."""

    dpo: str
    lora: str
    failing: str
    unwanted: str
    queued: Json
    """Status of the second while the first had the device."""
    dropped: Json
    """Status of the fourth, right after it was cancelled in the queue."""


@pytest.fixture(scope="module")
def submitted(stack: LlamaStack, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    pairs = stack.register("pairs", PAIRS, dataset_type="preference")
    mixed = stack.register("mixed", MIXED_ROWS)
    encoded = base64.b64encode(CSV.encode()).decode()
    held_out = stack.register_source("held-out", {"type": "uri", "uri": f"data:text/csv;base64,{encoded}"})
    dpo = stack.submit(DPO, promised("promised", pairs))
    body = sft("lora", mixed, algorithm_config=LORA)
    body["training_config"] |= {"n_epochs": 2, "max_validation_steps": 100}
    body["training_config"]["data_config"]["validation_dataset_id"] = held_out
    lora = stack.submit(SFT, body, options=LORA_OPTIONS)
    broken = _broken_copy(tmp_path_factory.mktemp("models") / "broken")
    failing = stack.submit(SFT, sft("failing", mixed, model=str(broken)))
    unwanted = stack.submit(DPO, promised("unwanted", pairs))
    queued = poll(lambda: _waiting(stack.status(lora)), "the second job names what it waits for", timeout=20)
    assert queued is not None
    assert stack.cancel(unwanted).status_code == 200
    return Submitted(dpo, lora, failing, unwanted, queued, stack.status(unwanted))


@pytest.fixture(scope="module")
def dpo(stack: LlamaStack, submitted: Submitted) -> Json:
    return stack.wait(submitted.dpo, "completed")


@pytest.fixture(scope="module")
def lora(stack: LlamaStack, submitted: Submitted) -> Json:
    return stack.wait(submitted.lora, "completed")


@pytest.fixture(scope="module")
def failed(stack: LlamaStack, submitted: Submitted) -> Json:
    return stack.wait(submitted.failing, "failed")


def test_a_queued_job_is_scheduled_and_reports_which_job_holds_the_device(submitted: Submitted) -> None:
    assert submitted.queued["status"] == "scheduled"
    assert submitted.queued["started_at"] is None
    assert submitted.queued["resources_allocated"]["detail"] == f"waiting for cpu (held by {submitted.dpo})"


def test_a_job_cancelled_in_the_queue_is_cancelled_at_once_and_never_starts(
    stack: LlamaStack, submitted: Submitted, failed: Json
) -> None:
    assert submitted.dropped["status"] == "cancelled"
    now = stack.status(submitted.unwanted)  # `failed` waited for every older job: its turn has come and gone
    assert now == submitted.dropped
    assert now["started_at"] is None
    assert now["resources_allocated"]["attempt"] == 0
    assert now["checkpoints"] == []


def test_jobs_are_listed_oldest_first_under_both_prefixes(stack: LlamaStack, submitted: Submitted) -> None:
    mine = [submitted.dpo, submitted.lora, submitted.failing, submitted.unwanted]
    for prefix in ("/v1", "/v1alpha"):
        listed = stack.get("/post-training/jobs", prefix=prefix).json()["data"]
        assert [job["job_uuid"] for job in listed if job["job_uuid"] in mine] == mine


def test_the_promised_payload_completes_with_three_epochs_of_checkpoints(dpo: Json) -> None:
    steps = [(c["identifier"], c["epoch"]) for c in dpo["checkpoints"]]
    assert steps == [("my-dpo-model-checkpoint-2", 1), ("my-dpo-model-checkpoint-4", 2), ("my-dpo-model-final", 3)]
    assert all(c["post_training_job_id"] == dpo["job_uuid"] for c in dpo["checkpoints"])
    assert dpo["scheduled_at"] < dpo["started_at"] < dpo["completed_at"]


def test_the_example_of_the_original_providers_runs_as_it_stands(stack: LlamaStack) -> None:
    rows = stack.register("three", PAIRS[:3], dataset_type="preference")
    job = stack.submit(DPO, original_example("original", rows))
    assert_original_example_is_honoured(stack.wait(job, "completed"))


def test_the_promised_checkpoint_dir_is_under_the_data_directory_and_the_job(stack: LlamaStack, dpo: Json) -> None:
    parents = {Path(c["path"]).parent for c in dpo["checkpoints"]}
    assert parents == {stack.data_dir.resolve() / "checkpoints" / "results" / dpo["job_uuid"]}


def test_status_reports_progress_effective_configuration_and_log(dpo: Json) -> None:
    allocated = dpo["resources_allocated"]
    assert allocated["state"] == "completed"
    assert allocated["device"] == "cpu"
    assert allocated["attempt"] == 1
    assert allocated["error"] is None
    assert allocated["warnings"] == []
    assert Path(allocated["log_path"]).is_file()
    progress = allocated["progress"]
    assert (progress["step"], progress["total_steps"], progress["percent"], progress["epoch"]) == (6, 6, 100.0, 3.0)
    assert 0 < progress["loss"] < math.log(2)  # it learned: an untrained DPO model has exactly log 2
    assert progress["tokens_per_second"] > 0
    assert progress["peak_memory_bytes"] > 0


def test_the_effective_configuration_shows_what_was_requested_and_what_was_decided(dpo: Json) -> None:
    effective = dpo["resources_allocated"]["effective_config"]
    assert effective["model"] == str(tiny_model())
    assert effective["output_name"] == "my-dpo-model"
    requested = {"beta": 0.1, "loss_type": "sigmoid", "reward_scale": 1.0, "reward_clip": 5.0}
    assert requested.items() <= effective["method"].items()
    assert effective["max_steps_per_epoch"] == 100
    assert effective["optimizer"]["learning_rate"] == 5e-5
    assert effective["dataset"]["num_rows"] == len(PAIRS)
    assert effective["recipe"]["total_steps"] == 6
    assert effective["recipe"]["effective"]["malloc"] in ("keeps large blocks", "gives large blocks back")


def test_a_job_without_validation_data_has_no_invented_validation_loss(dpo: Json) -> None:
    for checkpoint in dpo["checkpoints"]:
        metrics = checkpoint["training_metrics"]
        assert metrics["train_loss"] > 0
        assert metrics["validation_loss"] is None
        assert metrics["perplexity"] is None


def test_every_checkpoint_of_the_promised_job_loads_and_has_learned(dpo: Json) -> None:
    paths = _paths(dpo["checkpoints"])
    assert len(_distinct_weights([tiny_model(), *paths])) == 1 + len(paths)


def test_artifacts_are_the_checkpoints_of_the_status_under_both_prefixes(stack: LlamaStack, dpo: Json) -> None:
    for prefix in ("/v1", "/v1alpha"):
        artifacts = stack.get("/post-training/job/artifacts", prefix=prefix, job_uuid=dpo["job_uuid"]).json()
        assert artifacts == {"job_uuid": dpo["job_uuid"], "checkpoints": dpo["checkpoints"]}
        assert stack.get("/post-training/job/status", prefix=prefix, job_uuid=dpo["job_uuid"]).json() == dpo


@pytest.mark.parametrize("prefix", ["/v1", "/v1alpha"])
def test_the_same_body_again_is_the_same_job(stack: LlamaStack, dpo: Json, prefix: str) -> None:
    before = stack.jobs()
    again = stack.post(DPO, promised(dpo["job_uuid"], "pairs"), prefix=prefix)
    assert (again.status_code, again.json()) == (200, {"job_uuid": dpo["job_uuid"]})
    assert stack.jobs() == before
    assert stack.status(dpo["job_uuid"]) == dpo


def test_another_body_under_a_taken_job_uuid_is_a_conflict(stack: LlamaStack, dpo: Json) -> None:
    other = promised(dpo["job_uuid"], "pairs") | {"finetuned_model": "another-name"}
    answer = stack.post(DPO, other)
    assert answer.status_code == 409
    assert "choose another job_uuid" in answer.json()["detail"]
    same_body_other_options = stack.post(DPO, promised(dpo["job_uuid"], "pairs"), options={"seed": 1})
    assert same_body_other_options.status_code == 409


def test_a_completed_job_cannot_be_cancelled(stack: LlamaStack, dpo: Json) -> None:
    answer = stack.cancel(dpo["job_uuid"])
    assert answer.status_code == 409
    assert "completed already" in answer.json()["detail"]


def test_rows_and_csv_files_with_empty_cells_are_read_completely(lora: Json) -> None:
    effective = lora["resources_allocated"]["effective_config"]
    assert effective["dataset"]["num_rows"] == len(MIXED_ROWS)
    assert effective["validation"]["num_rows"] == 4
    assert effective["recipe"]["effective"]["data"]["kept"] == len(MIXED_ROWS)


def test_provider_options_in_the_header_are_honoured(lora: Json) -> None:
    effective = lora["resources_allocated"]["effective_config"]
    assert effective["max_seq_length"] == 96
    assert effective["optimizer"]["scheduler"] == "cosine"
    assert effective["seed"] == 7
    assert [c["identifier"] for c in lora["checkpoints"]] == ["lora-checkpoint-4", "lora-final", "lora-merged"]


def test_validation_loss_is_measured_and_perplexity_is_its_exponential(lora: Json) -> None:
    losses = []
    for checkpoint in lora["checkpoints"]:
        metrics = checkpoint["training_metrics"]
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["validation_loss"]))
        losses.append(metrics["validation_loss"])
    assert 0 < losses[-1] < losses[0] < 2 * math.log(1024)  # it falls, from about that of a random model


def test_lora_checkpoints_are_adapters_and_merged_is_the_whole_model(lora: Json) -> None:
    *adapters, merged = _paths(lora["checkpoints"])
    assert all((path / "adapter_config.json").is_file() for path in adapters)
    assert not (merged / "adapter_config.json").exists()
    assert len(_distinct_weights([tiny_model(), merged])) == 2
    _load(adapters)


def test_a_failed_job_reports_why_what_to_do_and_where_the_log_is(failed: Json) -> None:
    error = failed["resources_allocated"]["error"]
    assert error["reason"] == "invalid_model"
    assert "broken" in error["message"]
    assert "Repair the model as the message describes" in error["message"]
    assert Path(error["log_path"]).is_file()
    assert failed["completed_at"] is not None


def test_a_running_job_is_cancelled_long_before_its_end_and_keeps_its_checkpoints(
    stack: LlamaStack, failed: Json
) -> None:
    rows = stack.register("questions", QUESTIONS)
    body = sft("endless", rows)
    body["training_config"]["n_epochs"] = 5000
    job = stack.submit(SFT, body, options={"save_steps": 20})
    before = stack.wait_for_checkpoint(job)
    assert before["status"] == "in_progress"
    assert stack.processes(job), "the job's processes cannot be found by their marks"

    assert stack.cancel(job).status_code == 200
    poll(lambda: not stack.processes(job), "the job's processes are gone", timeout=30)
    after = stack.wait(job, "cancelled", timeout=30)
    progress = after["resources_allocated"]["progress"]
    assert progress["step"] < progress["total_steps"] / 4
    assert after["completed_at"] is not None
    assert after["resources_allocated"]["error"] is None
    assert after["checkpoints"][: len(before["checkpoints"])] == before["checkpoints"]
    _load(_paths([after["checkpoints"][0], after["checkpoints"][-1]]))
    assert stack.cancel(job).status_code == 200  # a repeated request succeeds too
    assert stack.status(job) == after


def test_the_program_of_the_first_tutorial_ends_with_a_model_that_loads(
    stack: LlamaStack, failed: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "".join(blocks(LLAMA_STACK, "python"))
    for written, here in (("http://127.0.0.1:8321", stack.url), (MODEL, str(tiny_model()))):
        assert program.count(written) == 1
        program = program.replace(written, here)
    names: Json = {}
    exec(program, names)
    assert names["status"]["status"] == "completed", names["status"]
    assert "my-model-final" in capsys.readouterr().out
    assert names["tuned"].config.num_hidden_layers == 2


def test_llama_stack_itself_never_loads_torch(stack: LlamaStack, dpo: Json, lora: Json) -> None:
    maps = Path(f"/proc/{stack.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    mapped = maps.read_text()
    assert "python" in mapped
    assert "libtorch" not in mapped


def _waiting(status: Json) -> Json | None:
    return status if status["resources_allocated"]["detail"] else None


def _broken_copy(path: Path) -> Path:
    shutil.copytree(tiny_model(), path)
    config = json.loads((path / "config.json").read_text())
    # What a file shows by itself is refused when the job is submitted.
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    return path


def _paths(checkpoints: Iterable[Json]) -> list[Path]:
    return [Path(checkpoint["path"]) for checkpoint in checkpoints]


def _load(paths: Iterable[Path]) -> list[Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = []
    for path in paths:
        assert AutoTokenizer.from_pretrained(path).eos_token
        models.append(AutoModelForCausalLM.from_pretrained(path))
    return models


def _distinct_weights(paths: Iterable[Path]) -> set[bytes]:
    """One entry per model whose first attention weights differ from all others'."""
    return {model.model.layers[0].self_attn.q_proj.weight.float().detach().numpy().tobytes() for model in _load(paths)}


def test_a_mixture_of_datasets_is_trained(stack: LlamaStack) -> None:
    sums = stack.register("mixed-sums", QUESTIONS[:5])
    words = stack.register(
        "mixed-words", [{"question": f"Spell {word}.", "reply": "-".join(word)} for word in ("cat", "tree")]
    )
    columns = {"prompt": "question", "completion": "reply"}
    mixture = [{"dataset_id": sums, "rows": 3}, {"dataset_id": words, "columns": columns}]
    ended = stack.wait(stack.submit(SFT, sft("mixture", sums), options={"mixture": mixture}), "completed")
    found = ended["resources_allocated"]["effective_config"]["recipe"]["effective"]["mixture"]
    assert found == [
        {"dataset_id": "mixed-sums", "rows": 5, "rows_per_epoch": 3},
        {"dataset_id": "mixed-words", "rows": 2, "rows_per_epoch": 2},
    ]
