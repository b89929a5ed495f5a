"""A job driven by llama-stack-client, run by the Python of any release: what to do on standard input, as JSON."""

import json
import sys

import llama_stack_client
from llama_stack_client import BadRequestError, ConflictError, LlamaStackClient, NotFoundError

asked = json.load(sys.stdin)
client = LlamaStackClient(base_url=asked["url"], provider_data={"trl": {"seed": 7}})
post_training = (getattr(client, asked["post_training"]) if asked["post_training"] else client).post_training
datasets = (getattr(client, asked["datasets"]) if asked["datasets"] else client).datasets

datasets.register(
    dataset_id="client-rows", purpose="post-training/messages", source={"type": "rows", "rows": asked["rows"]}
)
job = {
    "job_uuid": asked["name"],
    "model": asked["model"],
    "training_config": {
        "n_epochs": 5000,
        "max_steps_per_epoch": 1,
        "data_config": {"dataset_id": "client-rows", "batch_size": 1, "shuffle": True, "data_format": "instruct"},
    },
    "hyperparam_search_config": {},
    "logger_config": {},
}
assert post_training.supervised_fine_tune(**job).job_uuid == asked["name"]
assert post_training.supervised_fine_tune(**job).job_uuid == asked["name"]  # sent again, it is the same job
assert asked["name"] in [job.job_uuid for job in post_training.job.list()]
assert post_training.preference_optimize(**asked["dpo"]).job_uuid == asked["dpo"]["job_uuid"]


def refused(call, **arguments):
    """What the server says to a call that it refuses."""
    try:
        call(**arguments)
    except (BadRequestError, ConflictError, NotFoundError) as error:  # 0.2.14 has neither 404 nor 409
        return str(error)
    return "it was taken"


said = refused(post_training.supervised_fine_tune, **{**job, "job_uuid": "refused", "model": "/nowhere"})
assert "model='/nowhere' is not supported" in said, said
said = refused(post_training.supervised_fine_tune, **{**job, "model": asked["model"] + "/"})
assert f"job '{asked['name']}' exists already" in said, said

seed = None
if asked["job_calls"]:
    seed = post_training.job.status(job_uuid=asked["name"]).resources_allocated["effective_config"]["seed"]
    assert post_training.job.artifacts(job_uuid=asked["name"]).job_uuid == asked["name"]
    post_training.job.cancel(job_uuid=asked["name"])
    said = refused(post_training.job.status, job_uuid="nobody")
    assert "job 'nobody' not found" in said, said
else:
    status = client.get(f"/v1alpha/post-training/jobs/{asked['name']}/status", cast_to=object)
    seed = status["resources_allocated"]["effective_config"]["seed"]
print(json.dumps({"client": llama_stack_client.__version__, "seed": seed}))
