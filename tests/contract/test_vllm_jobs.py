"""Jobs whose prompts vLLM answers.

Without `TRL_VLLM_PYTHON`, an interpreter that has vLLM (its CPU build where there is no GPU), something plays vLLM
(tests/played_vllm), and the answers are not compared with those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.crashing import CrashingService
from tests.contract.generate_requests import GENERATE, answers_of, request
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import DPO, SFT, Json
from tests.played_vllm import REAL, played_vllm, saved
from tests.required import IN_FULL, in_full

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1800 if REAL else 400)]
EVALUATE = "/post-training/evaluate"


class VllmService(CrashingService):
    patience = 900.0 if REAL else CrashingService.patience
    """vLLM itself takes 20 s to start on 2 quiet cores."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model") / "llama", tied=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmService]:
    root = tmp_path_factory.mktemp("service")
    service = VllmService(root, vllm_python=REAL or str(played_vllm(root)))
    with closing(service.store), running(service):
        service.register("rows", QUESTIONS)
        yield service


@pytest.mark.parametrize("ranks", [2, *in_full(1)])
def test_answers_are_the_same_bytes_whatever_was_killed_in_between(server: VllmService, model: str, ranks: int) -> None:
    """16 answers in batches of 4. The trainer dies while it writes the second batch, which is half written then."""
    quick = {"model": model, "engine": "vllm"}
    server.submit(GENERATE, request(f"undisturbed-{ranks}", f"plain-{ranks}", **quick))
    server.wait(f"undisturbed-{ranks}", "completed", timeout=server.patience)
    server.arm("answering-4", "kill")
    options = {"retries": 3, "nproc_per_node": ranks}
    server.submit(GENERATE, request(f"killed-{ranks}", f"answers-{ranks}", **quick), options=options)
    server.wait(f"killed-{ranks}", "completed", timeout=server.patience)
    assert server.store.get(f"killed-{ranks}").attempt == 2
    digest, lines = answers_of(server, f"killed-{ranks}")
    assert digest == answers_of(server, f"undisturbed-{ranks}")[0]
    assert [(line["row"], line["sample"]) for line in lines] == [(row, n) for row in range(8) for n in range(2)]


def test_an_adapter_is_merged_and_an_evaluation_checks_its_answers(server: VllmService, model: str) -> None:
    server.submit(SFT, {**sft("tuned", "rows"), "model": model, "algorithm_config": LORA})
    server.wait("tuned", "completed", timeout=server.patience)
    greedy = {"model": "job:tuned", "samples_per_prompt": 1, "temperature": 0}
    server.submit(GENERATE, request("quick", "of-vllm", engine="vllm", **greedy))
    if REAL:
        server.submit(GENERATE, request("plain", "of-transformers", **greedy))
    check = {"type": "regex", "pattern": "e"}
    evaluation = {
        "job_uuid": "checked",
        "model": "job:tuned",
        "dataset_id": "rows",
        "engine": "vllm",
        "checks": [check],
    }
    server.submit(EVALUATE, {**evaluation, "max_new_tokens": 12})
    for name in ("quick", "checked"):
        server.wait(name, "completed", timeout=server.patience)
    (_, quick), (_, checked) = (answers_of(server, name) for name in ("quick", "checked"))
    assert [line["text"] for line in checked] == [line["text"] for line in quick]
    result = server.status("checked")["resources_allocated"]["result"]
    assert result["passed"] == sum("e" in line["text"] for line in checked) / len(QUESTIONS)
    if REAL:
        server.wait("plain", "completed", timeout=server.patience)
        _, plain = answers_of(server, "plain")
        assert [line["text"] for line in quick] == [line["text"] for line in plain]
    for name in ("quick", "checked"):  # a whole model would stay for each
        config = server.status(name)["resources_allocated"]["effective_config"]
        assert not (Path(config["checkpoint_dir"]) / "merged-base").exists()


def grpo(job_uuid: str, model: str, *, epochs: int, **method: object) -> Json:
    """4 optimizer steps in each epoch, of 2 prompts. Its answers have 4 tokens, and are rewarded for a vowel."""
    vowel = {"check": {"type": "regex", "pattern": "[ea]"}}
    algorithm = {"type": "grpo", "use_vllm": True, "max_completion_length": 4, "rewards": [vowel], **method}
    data = {"dataset_id": "rows", "batch_size": 1}
    training = {"n_epochs": epochs, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "data_config": data}
    return {"job_uuid": job_uuid, "model": model, "algorithm_config": algorithm, "training_config": training}


def of_steps(server: VllmService, job_uuid: str, name: str) -> list[float]:
    """A metric of each optimizer step; of one that was repeated, as it was the last time."""
    points = [point for point in server.store.points(job_uuid) if name in point.metrics]
    return [value for _, value in sorted({point.step: float(point.metrics[name] or 0) for point in points}.items())]


@IN_FULL  # CI: an exact resume in test_grpo_vllm.py, two ranks in test_on_policy_ranks.py; kills of answers above
@pytest.mark.parametrize(("adapters", "ranks"), [(True, 2), (False, 1), (True, 1)])
def test_grpo_has_the_same_weights_whatever_was_killed_in_between(
    server: VllmService, tmp_path: Path, adapters: bool, ranks: int
) -> None:
    """The trainer dies when vLLM has answered its seventh step: it resumes after the fourth. Where every weight is
    trained, the head is that of the embeddings, of which vLLM has a packed copy; an adapter is sent alone."""
    model = saved(tmp_path / "llama", tied=not adapters)
    options = {"retries": 2, "nproc_per_node": ranks, **({"lora": LORA} if adapters else {})}
    found = {}
    for name in ("left", "killed"):
        job_uuid = f"grpo-{name}-{adapters}-{ranks}"
        if name == "killed":
            server.arm("answered-7", "kill")
        server.submit(DPO, grpo(job_uuid, model, epochs=2 * ranks, num_generations=4), options=options)
        server.wait(job_uuid, "completed", timeout=server.patience)
        config = server.status(job_uuid)["resources_allocated"]["effective_config"]
        assert config["method"]["vllm"]["sync"] == ("adapter" if adapters else "weights")
        directory = Path(config["checkpoint_dir"])
        (weights,) = (directory / "final").glob("*.safetensors")
        rewards, differences = (
            of_steps(server, job_uuid, metric) for metric in ("reward", "sampling/sampling_logp_difference/mean")
        )
        found[name] = weights.read_bytes(), rewards, differences
        assert server.store.get(job_uuid).attempt == (2 if name == "killed" else 1)
        assert len(rewards) == 8
        if REAL:  # in fp32: the weights of each step are those that answered it
            assert max(differences) < 1e-3
    assert found["left"] == found["killed"]


@pytest.mark.skipif(not REAL, reason="something plays vLLM, whose answers do not follow from the weights")
def test_grpo_raises_its_reward_with_answers_of_vllm(server: VllmService, model: str) -> None:
    server.submit(DPO, grpo("grpo-rises", model, epochs=5, num_generations=16, beta=0.01))
    server.wait("grpo-rises", "completed", timeout=server.patience)
    rewards = of_steps(server, "grpo-rises", "reward")
    print("rewards", rewards)
    print("differences", max(of_steps(server, "grpo-rises", "sampling/sampling_logp_difference/max")))
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0  # of 5
