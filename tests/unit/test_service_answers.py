"""Answers that nodes send: appended by the current attempt alone, and complete before the end of the job is."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.answer_files import Whole
from llama_stack_provider_trl.specs.events import Finished
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.work import CheckedAnswering, EvaluateSpec, GenerateSpec
from llama_stack_provider_trl_remote.service import space
from llama_stack_provider_trl_remote.service.cluster import node_answers as module
from llama_stack_provider_trl_remote.service.cluster import uploads
from llama_stack_provider_trl_remote.service.cluster.node_answers import remove_results
from llama_stack_provider_trl_remote.service.cluster.uploads import UploadReceiver
from llama_stack_provider_trl_remote.service.http.errors import Gone, NotFound, WrongOffset
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests
from tests.fakes import job_spec
from tests.orders import write

SAMPLING: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1}
GENERATE = GenerateSpec(output_dataset_id="made", **SAMPLING)
CHECKED = EvaluateSpec(answers=CheckedAnswering(checks=(), **SAMPLING))


class Service:
    """A job of each kind, whose attempts are current on node b."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.digests = Store(root / "jobs.db"), Digests()
        self.uploads = UploadReceiver(self.store, self.digests)
        for name, work in (("ask", GENERATE), ("measure", CHECKED), ("train", None)):
            spec = job_spec(name, checkpoint_dir=root / name, min_free_bytes=1000, batch_size=2)
            rows = spec.data.dataset.model_copy(update={"num_rows": 5})
            self.store.add_job(spec.changed(work=work, dataset=rows), f"digest of {name}")
            self.launch(name, 1)

    def launch(self, name: str, attempt: int) -> None:
        """Its next attempt."""
        run_dir = self.root / "jobs" / name / "attempts" / str(attempt)
        run_dir.mkdir(parents=True)
        assert self.store.launch(name, attempt, "b/cpu", run_dir)
        self.spec(name).checkpoint_dir.mkdir(exist_ok=True)
        remove_results(self.spec(name))
        task = NodeTaskRecord(f"{name}-{attempt}", "b", name, attempt, 0, ("b/cpu",), "run", "{}", None, None, False)
        self.store.tasks.add([task])

    def spec(self, name: str) -> JobSpec:
        return self.store.get(name).spec

    def add(self, name: str, offset: int, data: bytes, file: str = "answers.jsonl", attempt: int = 1) -> int:
        return self.uploads.add_answers(f"{name}-{attempt}", "b", file, offset, data)

    def finish(self, name: str, result: Any) -> int:
        line = Finished(step=5, result=result).model_dump_json().encode() + b"\n"
        return self.uploads.add_events(f"{name}-1", "b", 0, line)

    def kept(self, name: str, file: str = "answers.jsonl") -> bytes:
        return (self.root / name / file).read_bytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.digests.close()
    service.store.close()


def test_parts_are_appended_once_in_their_order(service: Service) -> None:
    assert service.add("ask", 0, b"") == 0
    assert service.add("ask", 0, b"a\nb\n") == 4
    for offset in (0, 3, 5):
        with pytest.raises(WrongOffset) as refused:
            service.add("ask", offset, b"x\n")
        assert refused.value.offset == 4
    assert service.add("ask", 4, b"c\n") == 6
    assert service.kept("ask") == b"a\nb\nc\n"
    opener, size, digest = service.uploads.answers("ask-1", "b", "answers.jsonl")
    with opener() as file:
        assert (file.read(), size, digest) == (b"a\nb\nc\n", 6, sha256(b"a\nb\nc\n"))


def test_answers_are_sent_again_where_their_directory_was_removed(service: Service) -> None:
    service.add("ask", 0, b"a\nb\n")
    shutil.rmtree(service.root / "ask")
    with pytest.raises(WrongOffset) as refused:
        service.add("ask", 4, b"c\n")
    assert refused.value.offset == 0
    service.add("ask", 0, b"a\nb\nc\n")
    assert service.kept("ask") == b"a\nb\nc\n"


@pytest.mark.parametrize(
    ("name", "file"),
    [("ask", "final"), ("ask", "../answers.jsonl"), ("measure", "rows.jsonl"), ("train", "answers.jsonl")],
)
def test_only_the_files_of_the_job_are_written_and_read(service: Service, name: str, file: str) -> None:
    with pytest.raises(NotFound, match="of answers"):
        service.add(name, 0, b"a\n", file)
    with pytest.raises(NotFound, match="of answers"):
        service.uploads.answers(f"{name}-1", "b", file)
    with pytest.raises(Gone):
        service.uploads.add_answers(f"{name}-1", "c", "answers.jsonl", 0, b"a\n")


def test_an_attempt_that_was_replaced_adds_nothing_also_when_it_was_current_before(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.add("ask", 0, b"a\nb\n")
    append = uploads.append_answers

    def after_a_while(*arguments: Any) -> int:
        service.store.tasks.stop("ask-1", "{}")
        return append(*arguments)

    monkeypatch.setattr(uploads, "append_answers", after_a_while)
    with pytest.raises(Gone, match="was ended during the upload"):
        service.add("ask", 4, b"c\n")
    with pytest.raises(Gone):
        service.add("ask", 4, b"c\n")
    with pytest.raises(Gone):
        service.uploads.answers("ask-1", "b", "answers.jsonl")
    assert service.kept("ask") == b"a\nb\n"


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (None, b""),
        (b"a\nb\nc\nd", b"a\nb\n"),
        (b"a\nb\nc\nd\ne", b"a\nb\nc\nd\n"),
        (b"a\nb\nc\nd\ne\n", b"a\nb\nc\nd\ne\n"),
        (b"a\nb\nc\nd\ne\nf\n", b"a\nb\nc\nd\ne\n"),
    ],
)
def test_an_attempt_on_a_node_begins_with_whole_batches(service: Service, there: bytes | None, kept: bytes) -> None:
    if there is not None:
        write(service.root / "ask" / "answers.jsonl", there)
    for _ in range(2):
        begin = service.uploads.begin_answers("ask-1", "b")
        assert (begin.size, begin.sha256) == (len(kept), sha256(kept))
    assert service.kept("ask") == kept
    assert service.add("ask", len(kept), b"x\n") == len(kept) + 2
    with pytest.raises(NotFound, match="it answers no prompts"):
        service.uploads.begin_answers("train-1", "b")
    with pytest.raises(Gone):
        service.uploads.begin_answers("ask-1", "c")


def test_what_was_appended_while_answers_are_counted_stays(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was delayed, and is repeated, comes after the first parts."""
    service.add("ask", 0, b"a\nb\nc")
    count = module.whole_batches

    def meanwhile(*arguments: Any) -> Any:
        found = count(*arguments)
        service.add("ask", 5, b"\nd\n")
        return found

    monkeypatch.setattr(module, "whole_batches", meanwhile)
    assert service.uploads.begin_answers("ask-1", "b").size == 8

    def stopped(*arguments: Any) -> Whole:
        service.store.tasks.stop("ask-1", "{}")
        return Whole(2, 4)

    monkeypatch.setattr(module, "whole_batches", stopped)
    with pytest.raises(Gone, match="its answers are not changed"):
        service.uploads.begin_answers("ask-1", "b")
    assert service.kept("ask") == b"a\nb\nc\nd\n"


def test_rows_of_an_earlier_attempt_are_removed_before_one_on_a_node(service: Service) -> None:
    rows = write(service.root / "ask" / "rows.jsonl", b"half")
    other = write(service.root / "train" / "rows.jsonl", b"x")
    for name in ("ask", "measure", "train"):
        remove_results(service.spec(name))
    assert (rows.exists(), other.exists()) == (False, True)


def test_no_symbolic_link_is_followed(service: Service) -> None:
    """The training of an earlier attempt on this machine may have left it."""
    secret, file = write(service.root / "secret", b"a\nb\nc"), service.root / "ask" / "answers.jsonl"
    file.symlink_to(secret)
    with pytest.raises(OSError, match="Too many levels"):
        service.uploads.begin_answers("ask-1", "b")
    with pytest.raises(OSError, match="Too many levels"):
        service.add("ask", 5, b"d\n")
    with pytest.raises(NotFound):
        service.uploads.answers("ask-1", "b", "answers.jsonl")
    assert secret.read_bytes() == b"a\nb\nc"


def test_a_full_disk_keeps_the_reserve_and_no_part_of_a_part(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.add("ask", 0, b"a\nb\n")
    free = [1003]
    monkeypatch.setattr(space, "free_bytes", lambda directory: free[0])
    with pytest.raises(OSError, match="are needed") as full:
        service.add("ask", 4, b"c\nd\n")
    assert full.value.errno == errno.ENOSPC
    assert service.kept("ask") == b"a\nb\n"
    free[0] = 1004
    assert service.add("ask", 4, b"c\nd\n") == 8


def test_the_end_is_accepted_once_the_files_are_those_of_the_result(service: Service) -> None:
    answers, rows = b"a\nb\nc\n", b"rows\n"
    made = {"dataset": {"sha256": sha256(rows), "num_rows": 1}, "answers": {"count": 3}}
    measured = {"answers": {"sha256": sha256(answers), "path": str(service.root / "measure" / "answers.jsonl")}}
    elsewhere = {"answers": {**measured["answers"], "path": "/etc/passwd"}}
    service.add("ask", 0, answers)
    service.add("ask", 0, rows[:2], "rows.jsonl")
    service.add("measure", 0, answers[:4])
    for name, result in (("ask", made), ("measure", measured), ("ask", None), ("ask", {"dataset": []})):
        with pytest.raises(InvalidRequest, match="result"):
            service.finish(name, result)
    service.add("ask", 2, rows[2:], "rows.jsonl")
    service.add("measure", 4, answers[4:])
    with pytest.raises(InvalidRequest, match=r"result\.answers\.path='/etc/passwd'"):
        service.finish("measure", elsewhere)
    assert service.finish("ask", made)
    assert service.finish("measure", measured)
    assert service.finish("train", {"answers": 3})


def test_nothing_is_appended_to_files_of_a_job_that_has_finished(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those that the result names, until it is recorded and the task is ended."""
    answers = b"a\nb\nc\n"
    result = {"answers": {"sha256": sha256(answers), "path": str(service.root / "measure" / "answers.jsonl")}}
    service.add("measure", 0, answers)
    refused: list[str] = []

    def meanwhile(*given: Any) -> None:
        with pytest.raises(InvalidRequest, match="the final event of the job was sent") as caught:
            service.add("measure", 6, b"d\n")
        refused.append(str(caught.value))
        module.refuse_unfinished(*given)

    monkeypatch.setattr(uploads, "refuse_unfinished", meanwhile)
    assert service.finish("measure", result)
    meanwhile(Finished(step=5, result=result), service.spec("measure"), service.digests)
    assert len(refused) == 2
    assert service.kept("measure") == answers
    assert service.add("measure", 6, b"") == 6  # an agent that was started again asks for the size
    with pytest.raises(WrongOffset):
        service.add("measure", 0, answers)
    service.add("ask", 0, b"a\n")  # another job's


def test_a_final_event_that_is_sent_twice_is_not_undone_by_the_call_that_fails(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has waited too long for the answer to its first call, which then finds the event recorded."""
    answers = b"a\nb\nc\n"
    result = {"answers": {"sha256": sha256(answers), "path": str(service.root / "measure" / "answers.jsonl")}}
    service.add("measure", 0, answers)

    def again(*given: Any) -> None:
        monkeypatch.setattr(uploads, "refuse_unfinished", module.refuse_unfinished)
        assert service.finish("measure", result)
        module.refuse_unfinished(*given)

    monkeypatch.setattr(uploads, "refuse_unfinished", again)
    for _ in range(2):
        with pytest.raises(WrongOffset):
            service.finish("measure", result)
    with pytest.raises(InvalidRequest, match="the final event of the job was sent"):
        service.add("measure", 6, b"d\n")
    assert service.kept("measure") == answers


def test_answers_are_taken_again_after_a_final_event_that_was_refused(service: Service) -> None:
    service.add("measure", 0, b"a\nb\n")
    with pytest.raises(InvalidRequest, match="send the whole file before the event"):
        service.finish("measure", {"answers": {"sha256": sha256(b"a\nb\nc\n")}})
    assert service.add("measure", 4, b"c\n") == 6


def test_a_file_of_answers_is_not_larger_than_the_job_can_need(service: Service) -> None:
    spec = service.spec("ask")
    write(spec.data.dataset.path, b"x" * 100)
    most = module.most_bytes(spec)
    assert most == 8 * 100 + 5 * ((256 << 10) + 4 * (4 << 10))
    with pytest.raises(InvalidRequest, match=f"answers.jsonl of this job has at most {most} bytes"):
        service.add("ask", most - 1, b"xx")
    with pytest.raises(WrongOffset):  # it is no size that is refused
        service.add("ask", most - 2, b"xx")
