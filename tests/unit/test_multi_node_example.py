"""The example of docs/tutorials/two-machines.md is a job that the service takes, and its commands are those of `trl-remote`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from llama_stack_provider_trl.options import ProviderOptions
from llama_stack_provider_trl.recipes.spec import ShardingSpec
from llama_stack_provider_trl.requests import SupervisedFineTuneRequest
from llama_stack_provider_trl.resolve import Settings, resolve
from llama_stack_provider_trl_remote.cli import parser

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = (REPOSITORY / "docs" / "tutorials" / "two-machines.md").read_text().split("## A job, from its rows to its result")[1]


def example_body() -> dict[str, object]:
    found = re.search(r"^```json\n(.+?)^```", EXAMPLE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def commands() -> list[list[str]]:
    return [shlex.split(line)[2:] for line in re.findall(r"^\$ trl-remote .+", EXAMPLE, re.MULTILINE)]


def test_the_example_asks_for_two_nodes_and_nothing_in_it_is_refused(tmp_path: Path) -> None:
    body = example_body()
    options = ProviderOptions.parse(body.pop("provider_options"))
    settings = Settings(tmp_path, ("cpu",), max_ranks=2, max_nodes=2, sharding=ShardingSpec())
    taken = resolve(SupervisedFineTuneRequest.model_validate(body), options, settings)
    assert taken.warnings == []
    assert taken.fields["resources"].nodes == 2


def test_its_commands_are_there_and_speak_of_the_job_and_the_rows_of_the_file() -> None:
    given = [parser().parse_args(words) for words in commands()]
    assert [(one.group, one.command) for one in given] == [
        ("datasets", "add"),
        ("jobs", "submit"),
        ("jobs", "watch"),
        ("jobs", "pull"),
    ]
    added, _, watched, pulled = given
    training = example_body()["training_config"]
    assert isinstance(training, dict)
    assert training["data_config"]["dataset_id"] == added.dataset_id
    assert (REPOSITORY / added.file).is_file()
    assert {watched.job_uuid, pulled.job_uuid} == {example_body()["job_uuid"]}
