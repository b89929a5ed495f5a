"""The models that the service lists for nodes, and what it sends of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.methods import DpoSpec
from llama_stack_provider_trl.specs.model_source import ModelSource, ReferenceSpec
from llama_stack_provider_trl_remote.service.cluster.models import ServedModels
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.wire import ModelFiles
from tests.fakes import job_spec
from tests.orders import write
from tests.unit.snapshots import COMMIT, snapshot

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"read me"}


class Served:
    """One process of a service whose machine has org/tiny in its cache."""

    def __init__(self, root: Path) -> None:
        self.root, self.news = root, threading.Event()
        self.environ = {"HF_HUB_CACHE": str(root / "hub")}
        self.start()

    def start(self) -> None:
        self.models = ServedModels(self.root / "data" / "model-manifests", self.news.set, self.environ)

    def listed(self, **job: Any) -> ModelFiles:
        """What the order of a job has."""
        given = job_spec(**{"model": "org/tiny", **job})
        self.news.clear()
        while (found := self.models.of_job(given)) is None:
            assert self.news.wait(60)
        return found[0]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    snapshot(tmp_path, FILES)
    served = Served(tmp_path)
    yield served
    served.models.close()


def blob(served: Served, name: str) -> Path:
    return (served.root / "hub" / "models--org--tiny" / "snapshots" / COMMIT / name).resolve()


def test_a_model_is_listed_in_the_background_and_read_from_its_list_after_a_restart(served: Served) -> None:
    listed = served.listed()
    assert [(file.path, file.size) for file in listed.files] == [("config.json", 2), ("model.safetensors", 7)]
    assert listed.commit == COMMIT
    assert served.listed() == listed
    served.models.close()
    served.start()
    opener, size = served.models.open(listed.sha256, "model.safetensors", listed.files[1].sha256)
    with opener() as file:
        assert (file.read(), size) == (b"weights", 7)


def test_digests_are_not_computed_again_for_the_next_attempt(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = served.listed()

    def refuse(*_: Any) -> None:
        raise AssertionError("the file is read again")

    monkeypatch.setattr("llama_stack_provider_trl.system.digests.KeptDigests._keep", refuse)
    assert served.listed().files == listed.files


def test_a_file_that_has_changed_is_listed_again_and_no_longer_sent_under_the_old_list(served: Served) -> None:
    before = served.listed()
    blob(served, "model.safetensors").write_bytes(b"other w")
    with pytest.raises(Conflict, match=r"model\.safetensors of the model in .* has changed on the service's machine"):
        served.models.open(before.sha256, "model.safetensors", before.files[1].sha256)
    after = served.listed()
    assert after.sha256 != before.sha256
    served.models.open(after.sha256, "model.safetensors", after.files[1].sha256)
    blob(served, "config.json").unlink()
    with pytest.raises(NotFound, match=r"config\.json of the model in .* cannot be read"):
        served.models.open(after.sha256, "config.json", after.files[0].sha256)
    with pytest.raises(NotFound, match="there is no model"):
        served.models.open("0" * 64, "config.json", after.files[0].sha256)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"model": "org/none"}, "its machine's cache lacks it"),
        ({"model": "/nowhere"}, "it is not a directory there"),
        ({"trust_remote_code": True}, "it comes with Python code of its own"),
    ],
)
def test_what_is_not_sent_has_a_reason(served: Served, job: Any, reason: str) -> None:
    listed = served.listed(**job)
    assert reason in listed.why_not
    assert (listed.sha256, listed.files) == ("", ())


def test_a_directory_is_sent_too_and_a_link_out_of_it_is_not(served: Served) -> None:
    plain = write(served.root / "plain" / "config.json", b"{}").parent
    (plain / "model.safetensors").symlink_to(write(served.root / "secret", b"s"))
    assert "the service cannot read it: model.safetensors" in served.listed(model=str(plain)).why_not
    (plain / "model.safetensors").unlink()
    write(plain / "model.safetensors", b"weights")
    assert len(served.listed(model=str(plain)).files) == 2


def test_the_reference_of_dpo_is_listed_as_well(served: Served) -> None:
    job = job_spec(model="org/tiny", method=DpoSpec(reference=ReferenceSpec(source=ModelSource(model="org/none"))))
    served.news.clear()
    while (found := served.models.of_job(job)) is None:
        assert served.news.wait(60)
        served.news.clear()
    assert [(one.model, bool(one.sha256)) for one in found] == [("org/tiny", True), ("org/none", False)]


def test_a_list_that_no_attempt_took_is_made_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    served.models._clock = lambda: now[0]
    assert served.models.of_job(job_spec(model="org/tiny")) is None  # the job is cancelled now
    assert served.news.wait(60)
    blob(served, "model.safetensors").write_bytes(b"other w")
    now[0] = 100.0
    fresh = served.listed()
    served.models.open(fresh.sha256, "model.safetensors", fresh.files[1].sha256)
