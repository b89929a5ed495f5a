"""What uris of datasets on the hub and in buckets name, before anything is looked up."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.service.datasets.uris import HubDataset, bucket_files, hub_dataset, is_within
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("huggingface://datasets/acme/pairs", HubDataset("acme/pairs")),
        ("huggingface://datasets/acme/pairs?split=test&name=en", HubDataset("acme/pairs", None, "test", "en")),
        (
            "huggingface://datasets/acme/pairs?split=train[:10%]+test",
            HubDataset("acme/pairs", None, "train[:10%]+test"),
        ),
        (f"huggingface://datasets/acme/pairs?revision={COMMIT}", HubDataset("acme/pairs", COMMIT)),
        (f"hf://datasets/acme/pairs@{COMMIT}", HubDataset("acme/pairs", COMMIT)),
        ("hf://datasets/acme/pairs@refs/pr/3", HubDataset("acme/pairs", "refs/pr/3")),
        ("hf://datasets/acme/pairs@feature%2Fx?revision=feature/x", HubDataset("acme/pairs", "feature/x")),
    ],
)
def test_a_dataset_of_the_hub_is_named_as_llama_stack_and_huggingface_hub_do(uri: str, expected: HubDataset) -> None:
    assert hub_dataset(uri) == expected
    assert expected.commit == (COMMIT if expected.revision == COMMIT else None)


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        ("acme/pairs@v1?revision=v2", "it names the revisions 'v1' and 'v2': name one of them"),
        ("acme/pairs?revision=v1&revision=v1", "each once and with a value"),
        ("acme/pairs?revision=", "each once and with a value"),
        ("acme/pairs@", "expected a branch, a tag or a commit"),
        ("acme/pairs@../../x", "expected a branch, a tag or a commit"),
        ("acme/pairs?token=hf_x", "with any of"),
        ("acme/pairs#main", "with any of"),
        ("acme/pairs/train.jsonl", "expected the name of a dataset on the hub"),
        ("~/pairs", "expected the name of a dataset on the hub"),
        ("acme/..", "expected the name of a dataset on the hub"),
        ("acme/pairs?split=" + "x" * 300, "split has more than 255 characters"),
    ],
)
def test_a_uri_of_the_hub_that_means_two_things_or_none_is_refused(rest: str, sentence: str) -> None:
    for scheme in ("huggingface", "hf"):
        with pytest.raises(InvalidRequest, match=r"source\.uri") as refused:
            hub_dataset(f"{scheme}://datasets/{rest}")
        assert sentence in str(refused.value)


def test_a_path_of_a_bucket_allows_what_lies_below_it() -> None:
    allowed = [bucket_files(path) for path in ("s3://team/chats", "s3://whole")]
    for path, is_allowed in {
        "s3://team/chats/a.jsonl": True,
        "s3://team/chats/": True,
        "s3://team/chats2/a.jsonl": False,
        "s3://team/a.jsonl": False,
        "s3://whole/a.jsonl": True,
        "s3://whole/": True,
        "s3://wholes/a.jsonl": False,
    }.items():
        assert any(is_within(bucket_files(path), one) for one in allowed) is is_allowed, path


@pytest.mark.parametrize(
    "path", ["team/chats", "s3://", "s3://Team", "s3://team/../x", "s3://team//x", "s3://team?x", "gs://team"]
)
def test_a_setting_that_is_no_path_of_a_bucket_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="expected s3://BUCKET or s3://BUCKET/PATH"):
        ServiceSettings.model_validate({"dataset_buckets": [path]})
