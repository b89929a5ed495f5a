"""DatasetRegistry named by a uri: nothing outside the roots is read, and no file costs more memory than its limit."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs import row_verdicts
from llama_stack_provider_trl.system import beneath
from llama_stack_provider_trl_remote.service import space
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from tests.security.dataset_service import ROW, Service, put
from tests.security.dataset_service import service as service

pytestmark = pytest.mark.process
SECRET = json.dumps({"prompt": "root", "completion": "hunter2"}) + "\n"


def test_a_file_that_becomes_a_link_after_the_check_is_not_read_outside_the_roots(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = service.files / "rows.jsonl"
    path.write_text(ROW)
    (service.outside / "secret.jsonl").write_text(SECRET)
    convert = Blobs.convert

    async def swap_then_convert(blobs: Blobs, *arguments: object) -> tuple[str, int]:
        path.unlink()
        path.symlink_to(service.outside / "secret.jsonl")
        return await convert(blobs, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Blobs, "convert", swap_then_convert)
    assert json.loads(service.rows(path)) == json.loads(ROW)
    assert not any("hunter2" in text for text in service.stored())


def test_a_directory_that_becomes_a_link_before_the_file_is_opened_leads_nowhere(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = service.files / "a" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text(ROW)
    (service.outside / "rows.jsonl").write_text(SECRET)
    resolve = Path.resolve

    def resolve_then_swap(one: Path, strict: bool = False) -> Path:
        found = resolve(one, strict)
        if one == path and not path.parent.is_symlink():
            path.unlink()
            path.parent.rmdir()
            path.parent.symlink_to(service.outside)
        return found

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    with pytest.raises(InvalidRequest, match="below one of the configured dataset_roots"):
        service.register(path)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_link_that_stays_below_the_root_is_followed_where_the_system_can(
    service: Service, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(beneath, "_open_at_once", lambda *_: None)
    (service.files / "real").mkdir()
    (service.files / "real" / "rows.jsonl").write_text(ROW)
    (service.files / "link").symlink_to("real")
    assert json.loads(service.rows(service.files / "link" / "rows.jsonl")) == json.loads(ROW)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_not_a_regular_file_is_refused_by_its_kind_and_nothing_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(beneath, "_open_at_once", lambda *_: None)
    (service.files / "directory.jsonl").mkdir()
    os.mkfifo(service.files / "fifo.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(service.files)  # an address has 107 bytes at most
        try:
            listener.bind("socket.jsonl")
        finally:
            os.chdir(before)
        for name in ("directory", "fifo", "socket"):
            refused: list[str] = []

            def register(name: str = name, refused: list[str] = refused) -> None:
                with pytest.raises(InvalidRequest) as error:
                    service.register(service.files / f"{name}.jsonl")
                refused.append(str(error.value))

            thread = threading.Thread(target=register, daemon=True)
            thread.start()
            thread.join(20)
            assert refused, f"{name}: the service waits for it"
            assert name in refused[0].lower().replace("it is a ", ""), refused[0]


def test_a_file_with_a_line_of_more_than_16_mib_is_refused_with_its_row(service: Service) -> None:
    path = service.files / "long.jsonl"
    path.write_text(ROW + json.dumps({"prompt": "x" * (17 << 20), "completion": "4"}) + "\n")
    with pytest.raises(InvalidRows, match="row 1: has more than 16 MiB"):
        service.rows(path)
    (service.files / "long.csv").write_text("prompt,completion\n" + "x" * (17 << 20) + ",4\n")
    with pytest.raises(InvalidRows, match=r"more than 16 MiB|field larger than"):
        service.rows(service.files / "long.csv")


def test_a_small_file_that_takes_gigabytes_is_refused_with_the_limits_name(service: Service) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    value = "x" * (8 << 20)
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array([value]))
    table = pyarrow.table({"prompt": column, "completion": ["4"] * 1000})
    path = service.files / "bomb.parquet"
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    with pytest.raises(InvalidRows, match="more than 512 MiB of memory"):
        service.rows(path)


def test_a_json_list_that_does_not_fit_into_the_memory_limit_is_refused_with_its_name(service: Service) -> None:
    path = service.files / "list.json"
    with open(path, "w") as file:
        file.write("[" + "[],[]," * (6 << 20) + "{}]")
    with pytest.raises(InvalidRows, match=r"more than 512 MiB of memory \(reader_memory_mb\)"):
        service.rows(path)


def test_a_small_file_with_one_long_line_is_not_parsed_in_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_verdicts, "check_file", None)  # here; the fork has it
    data = b'{"prompt": "a", "completion": "b", "more": [' + b"[]," * 1_000_000 + b"[]]}\n"
    sha256 = put(service, data)
    ref, _ = asyncio.run(service.blobs.checked("d", sha256, "sft", None))
    assert ref.num_rows == 1


def test_an_upload_that_announces_no_size_ends_before_the_disk_is_full(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = 0
    free = (service.settings.min_free_disk_mb << 20) + (20 << 20)
    monkeypatch.setattr(space, "free_bytes", lambda path: free - received)

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal received
        for _ in range(100):
            received += 1 << 20
            yield b"x" * (1 << 20)

    with pytest.raises(OSError, match="are free on the disk of"):
        asyncio.run(service.blobs.receive("0" * 64, pieces(), 0))
    assert received <= 32 << 20
    assert not list(service.blobs.directory.glob(".incoming-*"))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 1
