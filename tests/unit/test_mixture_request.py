"""The option `mixture`: what it makes of a request, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import Resolution, resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import parts_of
from llama_stack_provider_trl.specs.job import DatasetRef, RowNames, ShareSpec


def resolved(
    tmp_path: Path, mixture: list[dict[str, Any]], method: dict[str, Any] | None = None, **more: Any
) -> Resolution:
    data = {"dataset_id": "chat", "batch_size": 2, **more.pop("data", {})}
    body: dict[str, Any] = {
        "job_uuid": "job",
        "model": "org/base",
        "training_config": {"n_epochs": 1, "data_config": data},
    }
    kind: Any = SupervisedFineTuneRequest
    if method is not None:
        body["algorithm_config"], kind = method, PreferenceOptimizeRequest
    options = ProviderOptions.parse({"mixture": mixture, **more})
    return resolve(kind.model_validate(body), options, Settings(data_dir=tmp_path, devices=("cpu",)))


def ref(dataset_id: str) -> DatasetRef:
    return DatasetRef(dataset_id=dataset_id, path=Path(f"/{dataset_id}.jsonl"), sha256=dataset_id, num_rows=10)


def test_the_job_has_every_dataset_with_its_names_and_share(tmp_path: Path) -> None:
    columns = {"prompt": "question"}
    mixture = [
        {"dataset_id": "chat", "weight": 3},
        {"dataset_id": "math", "weight": 0.5, "columns": columns, "roles": {"assistant": ["agent", "bot"]}},
    ]
    found = resolved(tmp_path, mixture, roles={"user": "customer"})
    spec = found.spec(ref("chat"), ref("chat"), (ref("math"), ref("math")))
    first, second = spec.data.mixed
    assert (first.dataset.dataset_id, first.share) == ("chat", ShareSpec(weight=3))
    assert (second.dataset.dataset_id, second.share) == ("math", ShareSpec(weight=0.5))
    others = RowNames(columns=columns, roles={"agent": "assistant", "bot": "assistant"})
    assert second.dataset.names == others
    assert second.validation is not None
    assert second.validation.names == others
    assert first.dataset.names == RowNames(roles={"customer": "user"})
    assert spec.data.dataset == first.dataset
    assert [one.dataset_id for _, one in parts_of(spec, DatasetRef)] == [
        "chat",
        "chat",
        "math",
        "math",
    ]


def test_a_request_without_it_has_one_dataset(tmp_path: Path) -> None:
    found = resolved(tmp_path, [{"dataset_id": "chat", "rows": 5}]).spec(ref("chat"), None)
    assert (found.data.share.rows, found.data.mixed_with) == (5, ())


REFUSED = [
    ([{"dataset_id": "math"}], {}, "0.dataset_id", "data_config names 'chat'"),
    ([{"dataset_id": "chat"}, {"dataset_id": "chat"}], {}, "1.dataset_id", "name each dataset once"),
    ([{"dataset_id": "chat", "weight": 1}], {}, "0.weight", "one dataset has all of an epoch"),
    ([{"dataset_id": "chat"}, {"dataset_id": "b", "weight": 1}], {}, "0", "one for each dataset, or for none"),
    ([{"dataset_id": "chat", "weight": 1, "rows": 2}], {}, "0", "it has a weight and rows"),
    ([{"dataset_id": "chat", "weights": 1}], {}, "0.weights", "there is no such option; the nearest is 'weight'"),
    ([{"dataset_id": "chat", "weight": 0}], {}, "0.weight", "greater than 0"),
    ([{"dataset_id": "chat", "columns": {"query": "q"}}], {}, "0.columns", "'query' is no column of a row shape"),
    ([{"dataset_id": "chat", "roles": {"user": "a", "tool": "a"}}], {}, "0.roles", "name it once"),
    ([{"dataset_id": "chat"}, {"dataset_id": "job:maker"}], {}, "1.dataset_id", "rows that a job makes"),
    ([], {}, "", "at least 1 item"),
    ([{"dataset_id": "chat"}], {"method": {"type": "grpo", "rewards": []}}, "", "takes the prompts of one dataset"),
]


@pytest.mark.parametrize(("mixture", "more", "field", "message"), REFUSED)
def test_what_cannot_be_mixed_is_refused_by_name(
    tmp_path: Path, mixture: list[dict[str, Any]], more: dict[str, Any], field: str, message: str
) -> None:
    if more:
        checks = [{"check": {"type": "regex", "pattern": "1"}}]
        more = {"method": {**more["method"], "rewards": checks}}
    with pytest.raises(InvalidRequest) as refused:
        resolved(tmp_path, mixture, **more)
    assert refused.value.field == ".".join(filter(None, ["provider_options.mixture", field]))
    assert message in str(refused.value)


def test_a_shard_of_a_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options\.shard=.* leave one of them out"):
        resolved(tmp_path, [{"dataset_id": "chat"}], shard={"index": 0, "count": 2})
