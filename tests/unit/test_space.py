"""Space: what clients order never takes what a training needs, and every function that writes asks for space."""

from __future__ import annotations

import ast
import errno
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.reader import Unfinished, unfinished, unfinished_job
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import LoraSpec
from llama_stack_provider_trl_remote.service import space as module
from llama_stack_provider_trl_remote.service.space import PIECE, Space, Use
from tests.fakes import FakeClock, job_spec
from tests.tiny import REPOSITORY

MIB = 1 << 20
MIN_FREE = 100 * MIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One of a million weights in fp32."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    with open(directory / "model.safetensors", "wb") as file:
        file.truncate(4_000_000)
    return directory


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are free, which a test changes."""
    found = [1 << 40]
    monkeypatch.setattr(module, "free_bytes", lambda path: found[0])
    monkeypatch.setattr(module, "_total", lambda path: 1 << 40)
    return found


def jobs(directory: Path, trained: Path, **changes: object) -> list[Unfinished]:
    job = Unfinished("trains", str(trained), None, "fp32", False, False, None, str(directory))
    return [job._replace(**changes)]


@pytest.mark.parametrize(
    ("changes", "per_weight"),
    [
        ({}, 16),  # a step checkpoint of 12 bytes per weight, and the export
        ({"dtype": "bf16"}, 14),
        ({"is_adapter": True}, 0.8),
        ({"is_adapter": True, "merges": True}, 4.8),
        ({"work": "merge"}, 4),
        ({"work": "export"}, 8),
        ({"work": "evaluate"}, 0),
        ({"work": "of-a-damaged-row"}, 0),
        ({"model": "org/not-on-this-machine"}, 0),
    ],
)
def test_a_client_leaves_the_space_of_the_largest_checkpoint(
    tmp_path: Path, model: Path, free: list[int], changes: dict[str, object], per_weight: float
) -> None:
    space = Space(MIN_FREE, lambda: jobs(tmp_path, model, **changes))
    line = MIN_FREE + int(per_weight * 1_000_000)
    free[0] = line + 1000
    space.require(Use.ordered, tmp_path, 1000)
    with pytest.raises(OSError, match="are needed") as full:
        space.require(Use.ordered, tmp_path, 1001)
    assert full.value.errno == errno.ENOSPC
    assert ("for the next checkpoint of job 'trains'" in str(full.value)) is bool(per_weight)


def test_checkpoints_events_and_logs_may_take_what_clients_leave(tmp_path: Path, model: Path, free: list[int]) -> None:
    space = Space(MIN_FREE, lambda: jobs(tmp_path, model))
    free[0] = MIN_FREE
    space.require(Use.checkpoint, tmp_path)
    free[0] = MIN_FREE // 2
    space.require(Use.report, tmp_path)
    for use, least in ((Use.checkpoint, MIN_FREE // 2 + 1), (Use.report, MIN_FREE + 2)):
        with pytest.raises(OSError, match="are needed"):
            space.require(use, tmp_path, least=least)


def test_jobs_on_other_disks_and_those_that_never_fit_reserve_nothing(
    tmp_path: Path, model: Path, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free[0] = MIN_FREE + 1
    Space(MIN_FREE, lambda: jobs(Path("/proc"), model)).require(Use.ordered, tmp_path)
    monkeypatch.setattr(module, "_total", lambda path: MIN_FREE + 1_000_000)
    Space(MIN_FREE, lambda: jobs(tmp_path, model)).require(Use.ordered, tmp_path)


def test_uploads_together_stay_above_the_line_however_many_arrive(tmp_path: Path, free: list[int]) -> None:
    space = Space(MIN_FREE)
    free[0] = MIN_FREE + 10 * PIECE
    written, refused = 0, 0
    with ExitStack() as stack:
        uploads = []
        for _ in range(20):
            try:
                uploads.append(stack.enter_context(space.arriving(Use.ordered, tmp_path)))
            except OSError:
                refused += 1
        assert (len(uploads), refused) == (10, 10)
        lasting = list(uploads)
        while lasting:
            for upload in list(lasting):
                free[0] -= MIB
                written += MIB
                assert free[0] >= MIN_FREE
                try:
                    upload(MIB)
                except OSError:
                    lasting.remove(upload)
    assert written >= PIECE
    with space.arriving(Use.ordered, tmp_path, 1000):
        pass


def test_a_body_whose_writes_are_not_counted_is_reserved_as_a_whole(tmp_path: Path, free: list[int]) -> None:
    space = Space(MIN_FREE)
    free[0] = MIN_FREE + 50 * MIB
    with space.arriving(Use.ordered, tmp_path, 32 * MIB, whole=True), pytest.raises(OSError, match="are needed"):
        space.require(Use.ordered, tmp_path, 19 * MIB)
    space.require(Use.ordered, tmp_path, 50 * MIB)


@pytest.mark.parametrize("announced", [0, PIECE + 1, 64 * MIB])
def test_an_upload_of_which_nothing_has_arrived_reserves_one_piece(
    tmp_path: Path, free: list[int], announced: int
) -> None:
    space = Space(MIN_FREE)
    free[0] = MIN_FREE + 200 * MIB
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(space.arriving(Use.ordered, tmp_path, announced))
        space.require(Use.ordered, tmp_path, 200 * MIB - 16 * PIECE)


def test_jobs_are_read_again_after_a_while_and_only_those_that_have_not_ended(
    tmp_path: Path, model: Path, free: list[int]
) -> None:
    clock = FakeClock()
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        space = Space(MIN_FREE, lambda: unfinished(store.database), clock)
        assert space.reserve(tmp_path) == (0, "")
        lora = LoraSpec(rank=4, alpha=8, target_modules=("q_proj",))
        for number in range(3):
            out = tmp_path / "out" / str(number)
            store.add_job(job_spec(f"adapter-{number}", model=str(model), lora=lora, checkpoint_dir=out), "digest")
        store.add_job(job_spec("whole", model=str(model), dtype="fp32", checkpoint_dir=tmp_path / "whole"), "digest")
        assert len(unfinished(store.database)) == 2
        clock.advance(60)
        space.refresh()
        assert space.reserve(tmp_path) == (16_000_000, "whole")
        assert store.request_cancel("whole").state is JobState.cancelled
        clock.advance(60)
        space.refresh()
        assert space.reserve(tmp_path) == (800_000, "adapter-0")


def test_a_job_that_is_submitted_counts_at_once_and_no_others_are_read_for_it(
    tmp_path: Path, model: Path, free: list[int]
) -> None:
    clock, read = FakeClock(), []
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        space = Space(MIN_FREE, lambda: read.append(1) or unfinished(store.database), clock)  # type: ignore[func-returns-value]
        assert space.reserve(tmp_path) == (0, "")
        for number, dtype in enumerate(("bf16", "fp32", "fp32")):
            spec = job_spec(f"job-{number}", model=str(model), dtype=dtype, checkpoint_dir=tmp_path / str(number))
            store.add_job(spec, "digest")
            assert [unfinished_job(spec)] == [one for one in unfinished(store.database) if one.dtype == dtype] or number
            space.note_job(unfinished_job(spec))
        assert space.reserve(tmp_path) == (16_000_000, "job-1")
        assert len(read) == 1
        clock.advance(60)
        space.refresh()
        assert space.reserve(tmp_path) == (16_000_000, "job-1")
        assert len(read) == 2


def test_a_process_that_does_not_supervise_reads_the_jobs_in_another_thread_and_once_at_a_time(
    tmp_path: Path, model: Path, free: list[int]
) -> None:
    clock, found, readers, may_end = FakeClock(), jobs(tmp_path, model), [], threading.Event()

    def unfinished() -> list[Unfinished]:
        readers.append(threading.current_thread())
        if len(readers) > 1:
            assert may_end.wait(20)
        return found

    space = Space(MIN_FREE, unfinished, clock)
    assert space.reserve(tmp_path) == (16_000_000, "trains")
    found = jobs(tmp_path, model, dtype="bf16", job_uuid="later")
    clock.advance(60)
    for _ in range(3):
        assert space.reserve(tmp_path) == (16_000_000, "trains")  # such as for the event loop, which waits for nothing
    may_end.set()
    for reader in readers[1:]:
        reader.join(20)
    assert space.reserve(tmp_path) == (14_000_000, "later")
    assert (readers[0], len(readers)) == (threading.current_thread(), 2)


def test_a_disk_that_hangs_holds_up_no_writes_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, other = tmp_path / "hung", tmp_path / "other"
    hung.mkdir(), other.mkdir()
    waits, answers = threading.Event(), threading.Event()

    def free_bytes(path: Path) -> int:
        if path == hung:
            waits.set()
            assert answers.wait(20)
        return 1 << 40

    monkeypatch.setattr(module, "free_bytes", free_bytes)
    space = Space(MIN_FREE)
    writer = threading.Thread(target=space.require, args=(Use.report, hung))
    writer.start()
    try:
        assert waits.wait(20)
        space.require(Use.ordered, other)
        with space.arriving(Use.ordered, other) as written:
            written(PIECE)
    finally:
        answers.set()
        writer.join(20)


def test_jobs_that_cannot_be_read_are_tried_again_later_and_not_by_each_writer(
    tmp_path: Path, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    clock, tries = FakeClock(), []

    def unfinished() -> list[Unfinished]:
        tries.append(1)
        raise StoreError("the database is locked")

    space = Space(MIN_FREE, unfinished, clock)
    for _ in range(3):
        space.require(Use.ordered, tmp_path)
    assert (len(tries), len(caplog.records)) == (1, 1)
    clock.advance(60)
    space.refresh()
    assert len(tries) == 2


# --- Every function of the service and of jobs that writes ------------------------------------------------------------

SERVICE = REPOSITORY / "llama_stack_provider_trl_remote" / "service"
JOBS = REPOSITORY / "llama_stack_provider_trl" / "jobs"
ASKS = "it asks"
"""The function itself asks for space."""
SMALL = "a small file of the service's own, whose size no client chooses"
WRITERS = {
    "cluster/node_answers.py _opened": "`UploadReceiver.add_answers` asks",
    "cluster/launcher.py start": SMALL,
    "cluster/logs.py _opened": "`UploadReceiver.add_log` asks",
    "cluster/logs.py append_log": SMALL,
    "cluster/logs.py write_all": "its callers ask: events, logs, answers, checkpoints",
    "cluster/models.py _keep": SMALL,
    "cluster/uploads.py _announce": "a list of files, within the size of its body",
    "cluster/uploads.py _opened": "its callers ask: events and checkpoints",
    "datasets/blobs.py _keep_verdict": ASKS,
    "datasets/blobs.py _staging": "an empty directory",
    "datasets/blobs.py _arriving": ASKS,
    "datasets/hub.py _keep_own_files": "the configurations of a card, which is there and at most 16 MiB",
    "datasets/hub.py _skeleton": "empty files, and the cards of a dataset, up to 16 MiB each",
    "datasets/hub.py read_hub": "the id of a commit; `_fetch` compares the space that is free with the files",
    "datasets/part_uploads.py _arriving": ASKS,
    "datasets/part_uploads.py _create": ASKS,
    "datasets/part_uploads.py _end": "a document of a few hundred KiB at most; `_create` asks",
    "datasets/reader.py convert": "an empty directory",
    "datasets/reader.py _stored": "a process of its own, which compares the space that is free as it writes",
    "datasets/registration.py _read": "a process of its own, for whose rows `Registration.parse` asks",
    "datasets/registration.py _spooled": ASKS,
    "datasets/registry.py _grown": ASKS,
    "datasets/registry.py _put": ASKS,
    "datasets/registry.py _write": "an entry of a few KiB; `register` asks",
    "datasets/registry.py register_made": ASKS,
    "security/audit.py _append": "bounded by audit_mb and audit_files",
    "security/audit.py _begin_file": "bounded by audit_mb and audit_files",
    "security/audit.py open": "bounded by audit_mb and audit_files",
    "security/sessions.py _write": SMALL,
    "serving/served.py copy_adapter": ASKS,
    "serving/process.py _start": "the specification of a process, a few KiB",
    "views/preflights.py _start": ASKS,
}
"""Module and function of the service -> why it may write."""
OF_JOBS = {
    "supervision/attempts.py _put": ASKS,
    "supervision/attempts.py _write_spec": SMALL,
    "store/related/cancels.py _slots": SMALL,
    "store/related/cancels.py _write": SMALL,
    "store/related/cancels.py prepare": SMALL,
    "store/database.py _create": "the database: a row per job and event, whose numbers have limits",
    "inputs/merges.py no_rows": "an empty file, once",
    "supervision/proposer_process.py __init__": SMALL,
    "inputs/resume_from.py _link": ASKS,
    "inputs/row_parts.py _into": "`Preflights` asks for both parts at once",
    "inputs/row_parts.py put": ASKS,
    "submission.py keep_rows": "of Llama Stack's own datasets, and on the command line: no client's token has a quota",
}
"""The same for modules of `jobs`."""
_WRITES = {
    *("write_bytes", "write_text", "mkstemp", "mkdtemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile"),
    *("pwrite", "copyfile", "copytree", "copy2", "copyfileobj", "atomic_write", "atomic_write_json", "put_rows"),
    *("put_lines", "posix_fallocate", "sendfile"),
}
_QUESTIONS = {"require", "arriving", "check_space", "_reserved", "writing", "written", "_check_disk"}


def writers(source: str) -> Iterator[tuple[str, bool]]:
    """Functions that write files, with whether they ask for space themselves."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        names = {name_of(call.func) for call in calls} | {name_of(value) for call in calls for value in call.args}
        if any(is_write(call) for call in calls) or names & _WRITES:
            yield function.name, bool(names & _QUESTIONS)


def is_write(call: ast.Call) -> bool:
    """Whether a call opens a file to write, or writes to a descriptor."""
    written = ast.unparse(call)
    if name_of(call.func) == "open":
        modes = [value.value for value in call.args[1:2] if isinstance(value, ast.Constant)]
        opens = any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes)
        flags = [value for value in call.args[1:] if not isinstance(value, ast.Constant)]
        return opens or "O_WRONLY" in written or "O_RDWR" in written or any(name_of(flag) == "flags" for flag in flags)
    return written.startswith(("os.write(", "shutil.copy(", "shutil.move("))


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(("root", "known"), [(SERVICE, WRITERS), (JOBS, OF_JOBS)], ids=["service", "jobs"])
def test_each_function_that_writes_asks_for_space_or_has_a_reason(root: Path, known: dict[str, str]) -> None:
    found = {
        f"{path.relative_to(root)} {name}": asks
        for path in sorted(root.rglob("*.py"))
        if path.name != "space.py"
        for name, asks in writers(path.read_text())
    }
    new = sorted(found.keys() - known.keys())
    assert not new, f"have these ask `Space`, and list them here: {new}"
    assert not known.keys() - found.keys(), "these no longer write"
    silent = [name for name, why in known.items() if why == ASKS and not found[name]]
    assert not silent, f"these do not ask any more: {silent}"


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'wb')",
        "open(path, 'r+')",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "os.write(file, data)",
        "path.write_text('x')",
        "tempfile.mkstemp()",
        "await asyncio.to_thread(atomic_write_json, path, {})",
        "shutil.copytree(a, b)",
    ],
)
def test_a_new_writer_is_found_whatever_it_writes_with(code: str) -> None:
    assert list(writers(f"async def write():\n    {code}\n")) == [("write", False)]
