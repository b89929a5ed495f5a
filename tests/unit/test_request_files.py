"""Requests for jobs out of JSON, YAML and TOML files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl_remote.request_files import read_request
from tests.tiny import REPOSITORY

RECIPES = sorted((REPOSITORY / "examples" / "recipes").glob("*.yaml"))
YAML = """
job_uuid: sft-1
model: org/name
training_config:
  n_epochs: 1
  learning_rate: 2e-4
  data_config: {dataset_id: 2026-11-23, batch_size: 4, shuffle: true}
"""
TOML = """
job_uuid = "sft-1"
model = "org/name"
[training_config]
n_epochs = 1
learning_rate = 2e-4
data_config = {dataset_id = "2026-11-23", batch_size = 4, shuffle = true}
"""
REQUEST = {
    "job_uuid": "sft-1",
    "model": "org/name",
    "training_config": {
        "n_epochs": 1,
        "learning_rate": 0.0002,
        "data_config": {"dataset_id": "2026-11-23", "batch_size": 4, "shuffle": True},
    },
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.json", json.dumps(REQUEST)),
        ("job", json.dumps(REQUEST)),
        ("job.yaml", YAML),
        ("job.YML", YAML),
        ("job.toml", TOML),
        ("job.yaml", "service: {device_memory_gb: 24}\njob:" + YAML.replace("\n", "\n  ")),
        ("job.toml", TOML.replace("[training", "[job.training").replace("job_uuid", "[job]\njob_uuid")),
    ],
)
def test_the_same_request_is_the_same_in_every_format_and_as_a_recipe(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_request(str(file)) == REQUEST


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_recipes_of_the_repository_are_requests(recipe: Path) -> None:
    body = read_request(str(recipe))
    assert SupervisedFineTuneRequest.model_validate(body).training_config.data_config is not None


@pytest.mark.parametrize("number", ["1e3", "-2.5e-4", ".5", "3.", "+1E-05"])
def test_numbers_of_yaml_are_those_of_json(tmp_path: Path, number: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"value: {number}\nversion: 1.2.3\nname: e5\n")
    assert read_request(str(file)) == {"value": float(number), "version": "1.2.3", "name": "e5"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.json", "{", "it is not JSON"),
        ("job.json", '{"a": NaN}', "it is not JSON"),
        ("job.yaml", "a: [", "it is not YAML"),
        ("job.yaml", "a: !!set {x}", "it is not YAML"),
        ("job.yaml", "a: !!python/name:os.system", "it is not YAML"),
        ("job.toml", "a =", "it is not TOML"),
        ("job.toml", "a = 2026-11-23", "it is not TOML"),
        ("job.yaml", "- a", "found a list, expected an object"),
        ("job.yaml", "", "found a NoneType, expected an object"),
        ("job.yaml", "job: 5", "found a int, expected an object"),
    ],
)
def test_a_file_that_holds_no_request_is_refused_in_one_sentence(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        read_request(str(file))
    assert message in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_request_with_a_field_job_beside_others_is_sent_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"job": {"a": 1}, "job_uuid": "x"}')
    assert read_request(str(file)) == {"job": {"a": 1}, "job_uuid": "x"}
