"""A job driven by llama-stack-client, run by the Python of any release: what to do on standard input, as JSON."""

import json
import sys

import llama_stack_client
from llama_stack_client import BadRequestError, ConflictError, LlamaStackClient, NotFoundError

requested = json.load(sys.stdin)
client = LlamaStackClient(base_url=requested["url"], provider_data={"trl": {"seed": 7}})
post_training = (getattr(client, requested["post_training"]) if requested["post_training"] else client).post_training
datasets = (getattr(client, requested["datasets"]) if requested["datasets"] else client).datasets

datasets.register(
    dataset_id="client-rows", purpose="post-training/messages", source={"type": "rows", "rows": requested["rows"]}
)
job = {
    "job_uuid": requested["name"],
    "model": requested["model"],
    "training_config": {
        "n_epochs": 5000,
        "max_steps_per_epoch": 1,
        "data_config": {"dataset_id": "client-rows", "batch_size": 1, "shuffle": True, "data_format": "instruct"},
    },
    "hyperparam_search_config": {},
    "logger_config": {},
}
assert post_training.supervised_fine_tune(**job).job_uuid == requested["name"]
assert post_training.supervised_fine_tune(**job).job_uuid == requested["name"]  # sent again, it is the same job
assert requested["name"] in [job.job_uuid for job in post_training.job.list()]
assert post_training.preference_optimize(**requested["dpo"]).job_uuid == requested["dpo"]["job_uuid"]


def refused(call, **arguments):
    """The server's answer to a call that it refuses."""
    try:
        call(**arguments)
    except (BadRequestError, ConflictError, NotFoundError) as error:  # 0.2.14 has neither 404 nor 409
        return str(error)
    return "it was taken"


message = refused(post_training.supervised_fine_tune, **{**job, "job_uuid": "refused", "model": "/nowhere"})
assert "model='/nowhere' is not supported" in message, message
message = refused(post_training.supervised_fine_tune, **{**job, "model": requested["model"] + "/"})
assert f"job '{requested['name']}' exists already" in message, message

seed = None
if requested["job_calls"]:
    seed = post_training.job.status(job_uuid=requested["name"]).resources_allocated["effective_config"]["seed"]
    assert post_training.job.artifacts(job_uuid=requested["name"]).job_uuid == requested["name"]
    post_training.job.cancel(job_uuid=requested["name"])
    message = refused(post_training.job.status, job_uuid="nobody")
    assert "job 'nobody' not found" in message, message
else:
    status = client.get(f"/v1alpha/post-training/jobs/{requested['name']}/status", cast_to=object)
    seed = status["resources_allocated"]["effective_config"]["seed"]
print(json.dumps({"client": llama_stack_client.__version__, "seed": seed}))
