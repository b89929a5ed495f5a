"""docs/tutorials/two-machines.md: the service accepts its job, and its commands are those of `trl-remote`."""

from __future__ import annotations

from pathlib import Path

from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import ShardingSpec
from llama_stack_provider_trl_remote.cli.main import parser
from tests.tiny import REPOSITORY
from tests.tutorials import TWO_MACHINES, commands, job


def test_the_example_asks_for_two_nodes_and_nothing_in_it_is_refused(tmp_path: Path) -> None:
    body = job(TWO_MACHINES)
    options = ProviderOptions.parse(body.pop("provider_options"))
    settings = Settings(data_dir=tmp_path / "data", devices=("cpu",), max_ranks=2, max_nodes=2, sharding=ShardingSpec())
    taken = resolve(SupervisedFineTuneRequest.model_validate(body), options, settings)
    assert taken.warnings == []
    assert taken.fields["resources"].nodes == 2


def test_its_commands_are_there_and_name_the_job_and_the_rows_of_the_file() -> None:
    given = [parser().parse_args(words) for words in commands(TWO_MACHINES)]
    assert [(one.group, one.command) for one in given] == [
        ("datasets", "add"),
        ("jobs", "submit"),
        ("jobs", "watch"),
        ("jobs", "pull"),
        ("chat", ""),
    ]
    added, _, watched, pulled, asked = given
    training = job(TWO_MACHINES)["training_config"]
    assert isinstance(training, dict)
    assert training["data_config"]["dataset_id"] == added.dataset_id
    assert (REPOSITORY / added.file).is_file()
    assert {*watched.job_uuids, pulled.job_uuid, asked.model} == {job(TWO_MACHINES)["job_uuid"]}
