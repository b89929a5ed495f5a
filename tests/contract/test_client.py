"""llama-stack-client drives jobs from register to artifacts, as its users write it."""

from __future__ import annotations

import pytest
from llama_stack_client import BadRequestError, LlamaStackClient, NotFoundError

from tests.contract.payloads import LORA, PAIRS, QUESTIONS
from tests.contract.stack import ENDED, LlamaStack, poll
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract


@pytest.fixture
def client(stack: LlamaStack) -> LlamaStackClient:
    return LlamaStackClient(base_url=stack.url, max_retries=0, provider_data={"trl": {"logging_steps": 2}})


def test_the_client_drives_jobs_from_register_to_artifacts(client: LlamaStackClient) -> None:
    client.datasets.register(
        dataset_id="client-rows", purpose="post-training/messages", source={"type": "rows", "rows": QUESTIONS}
    )
    client.datasets.register(
        dataset_id="client-pairs", purpose="post-training/messages", source={"type": "rows", "rows": PAIRS}
    )
    optimizer = {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.01, "num_warmup_steps": 1}
    data = {"batch_size": 4, "shuffle": True, "data_format": "instruct"}
    training = {"n_epochs": 2, "gradient_accumulation_steps": 1, "optimizer_config": optimizer}
    post_training = client.alpha.post_training

    tuned = post_training.supervised_fine_tune(
        job_uuid="client-sft",
        model=str(tiny_model()),
        training_config={**training, "data_config": {**data, "dataset_id": "client-rows"}},
        hyperparam_search_config={},
        logger_config={},
        algorithm_config=LORA,
    )
    preferred = post_training.preference_optimize(
        job_uuid="client-dpo",
        finetuned_model=str(tiny_model()),
        algorithm_config={"beta": 0.2, "loss_type": "hinge"},
        training_config={**training, "data_config": {**data, "dataset_id": "client-pairs"}},
        hyperparam_search_config={},
        logger_config={},
    )
    assert (tuned.job_uuid, preferred.job_uuid) == ("client-sft", "client-dpo")
    assert [job.job_uuid for job in post_training.job.list()][-2:] == ["client-sft", "client-dpo"]

    post_training.job.cancel(job_uuid="client-dpo")
    cancelled = post_training.job.status(job_uuid="client-dpo")
    assert cancelled.status == "cancelled"
    effective = cancelled.resources_allocated["effective_config"]
    assert effective["model"] == str(tiny_model())  # Llama Stack's own meaning of finetuned_model
    assert (effective["method"]["beta"], effective["method"]["loss_type"]) == (0.2, "hinge")

    poll(lambda: post_training.job.status(job_uuid="client-sft").status in ENDED, "the client's job ends", timeout=90)
    status = post_training.job.status(job_uuid="client-sft")
    assert status.status == "completed", status.resources_allocated
    assert status.resources_allocated["effective_config"]["logging_steps"] == 2
    artifacts = post_training.job.artifacts(job_uuid="client-sft")
    assert [c.identifier for c in artifacts.checkpoints] == ["client-sft-checkpoint-2", "client-sft-final"]
    assert [c.to_dict() for c in artifacts.checkpoints] == [c.to_dict() for c in status.checkpoints]
    assert artifacts.checkpoints[-1].training_metrics.train_loss > 0
    assert artifacts.checkpoints[-1].training_metrics.validation_loss is None


def test_the_client_raises_its_own_errors_with_our_sentences(client: LlamaStackClient) -> None:
    post_training = client.alpha.post_training
    with pytest.raises(NotFoundError, match="job 'nobody' not found"):
        post_training.job.status(job_uuid="nobody")
    with pytest.raises(BadRequestError, match="fsdp_cpu_offload=True is not supported"):
        post_training.supervised_fine_tune(
            job_uuid="client-refused",
            model=str(tiny_model()),
            training_config={
                "n_epochs": 1,
                "data_config": {"dataset_id": "x", "batch_size": 1},
                "efficiency_config": {"fsdp_cpu_offload": True},
            },
            hyperparam_search_config={},
            logger_config={},
        )
