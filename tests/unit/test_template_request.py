"""The options `chat_template` and `system_prompt` of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.chat_templates import CHATML
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec


def spec_of(tmp_path: Path, **options: Any) -> JobSpec:
    data = {"dataset_id": "rows", "batch_size": 2}
    body = {"job_uuid": "job", "model": "org/base", "training_config": {"n_epochs": 1, "data_config": data}}
    rows = DatasetRef(dataset_id="rows", path=Path("/rows.jsonl"), sha256="0" * 64, num_rows=10)
    request = SupervisedFineTuneRequest.model_validate(body)
    settings = Settings(data_dir=tmp_path, devices=("cpu",))
    return resolve(request, ProviderOptions.parse(options), settings).spec(rows, None)


def test_a_template_is_a_text_or_a_name(tmp_path: Path) -> None:
    assert spec_of(tmp_path).data.chat_template is None
    assert spec_of(tmp_path, chat_template="chatml").data.chat_template == CHATML
    assert spec_of(tmp_path, chat_template="qwen3").data.chat_template == "qwen3"  # read where TRL is installed
    assert spec_of(tmp_path, chat_template="{{ messages }}\n").data.chat_template == "{{ messages }}\n"


def test_a_system_prompt_goes_with_the_rows(tmp_path: Path) -> None:
    names = spec_of(tmp_path, system_prompt="Be brief.\n", roles={"user": "customer"}).data.dataset.names
    assert names is not None
    assert (names.system, names.roles) == ("Be brief.\n", {"customer": "user"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template": "chatlm"}, "the nearest is 'chatml', or the text of a template"),
        ({"chat_template": "qwen4"}, "; the nearest is 'qwen3', or the text of a template"),
        ({"chat_template": "qwen3_training"}, "expected one of chatml, cohere, "),
        ({"chat_template": " "}, "it is blank"),
        ({"system_prompt": ""}, "it is blank"),
        ({"system_prompt": "\ud800"}, "Input should be a valid string"),
        ({"system_prompt": "a" * 32_001}, "at most 32000 characters"),
    ],
)
def test_what_is_neither_is_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(tmp_path, **options)
    assert refused.value.field == f"provider_options.{next(iter(options))}"
    assert words in str(refused.value)
