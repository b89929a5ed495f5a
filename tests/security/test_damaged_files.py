"""Small files that the service reads back, damaged: everything else continues, and `doctor` lists them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from llama_stack_provider_trl.system.data_dir import DataDir, read_own
from llama_stack_provider_trl_remote.cli.doctor import _own_files
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import SFT
from tests.fake_trainer import fake_trainer
from tests.security.guarded import TOKENS, Guarded

pytestmark = pytest.mark.contract
DAMAGE = (b"", b"{", b"[]", b"{}", b"\xff\x00\xfe", b'{"dataset": 3, "key": "ab", "sessions": []}', b"[" * 100_000)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("damaged")
    with running(Guarded(root, train_python=str(fake_trainer(root)))) as service:
        service.register("stays", QUESTIONS)
        service.wait(service.submit(SFT, sft("first", "stays")), "completed")
        yield service


def login(service: Guarded) -> requests.Response:
    return service.session.post(
        f"{service.url}/login",
        {"token": TOKENS["admin"], "back": "/"},
        headers={"Origin": service.url},
        allow_redirects=False,
        timeout=30,
    )


def entry_of(service: Guarded, dataset_id: str) -> Path:
    (found,) = (
        path
        for path in DataDir(service.data_dir).registry.glob("*.json")
        if f'"identifier": "{dataset_id}"' in path.read_text(errors="replace")
    )
    return found


def small_files(data_dir: Path) -> list[Path]:
    """Of everything that the service has written and parses at a later call, or at its next start."""
    place = DataDir(data_dir)
    found = [place.sessions, place.identity, place.cancel_orders, *place.datasets.glob("*.json")]
    return [*found, *place.model_lists.glob("*.json")]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_one_damaged_entry_of_the_registry_hides_no_other_dataset(service: Guarded, damage: bytes) -> None:
    rows = [*QUESTIONS, {"prompt": "another", "completion": "row"}]
    service.register("spoilt", rows)
    path = entry_of(service, "spoilt")
    path.write_bytes(damage)
    listed = service.get("/datasets")
    assert listed.status_code == 200
    assert [one["identifier"] for one in listed.json()["data"]] == ["stays"]
    assert service.get("/datasets/spoilt").status_code == 404
    assert service.get("/data", prefix="").status_code == 200
    assert not path.exists()
    assert service.register("spoilt", rows) == "spoilt"
    assert service.delete("/datasets/spoilt").status_code in (200, 204)


@pytest.mark.parametrize("damage", DAMAGE[::3], ids=range(len(DAMAGE[::3])))
def test_a_service_works_on_whatever_is_in_its_small_files(service: Guarded, damage: bytes) -> None:
    assert login(service).status_code == 303
    service.stop()
    files = small_files(service.data_dir)
    assert {"sessions.json", "identity", "cancel-orders"} < {path.name for path in files}
    for path in files:
        path.write_bytes(damage)
    service.start()
    assert login(service).status_code == 303
    assert [one["identifier"] for one in service.get("/datasets").json()["data"]] == ["stays"]
    name = f"after-{DAMAGE.index(damage)}"
    service.wait(service.submit(SFT, sft(name, "stays")), "completed")
    assert service.delete(f"/post-training/jobs/{name}", checkpoints=True).status_code == 204
    assert not (service.data_dir / "checkpoints" / name).exists()
    assert service.state("first") == "completed"


def test_damage_is_logged_once_and_reported_until_it_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = DataDir(tmp_path)
    place.sessions.write_text("secret-text")
    found = [one.found for one in _own_files(ServiceSettings(data_dir=tmp_path))]
    assert found == [f"{place.sessions}: it cannot be parsed"]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert read_own(place.sessions, float) is None
    (line,) = caplog.messages
    assert "sessions.json is damaged (ValueError): it was set aside as" in line
    assert "secret-text" not in line
    found = [one.found for one in _own_files(ServiceSettings(data_dir=tmp_path))]
    assert found == [f"{place.sessions}.stale-1: it was set aside"]


def test_a_file_that_cannot_be_read_at_the_moment_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sessions.json"
    path.write_text("1")

    def fails(_: bytes) -> float:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        read_own(path, fails)
    assert path.exists()
