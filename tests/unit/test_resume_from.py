"""A job resumes from another job's checkpoint, if it can, and from a copy that is its own."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import FULL, InvalidRequest, JobConflict, RowsRemoved, StoreError, shortage_of
from llama_stack_provider_trl.jobs import submission
from llama_stack_provider_trl.jobs.inputs.resume_from import copy_checkpoint
from llama_stack_provider_trl.jobs.inputs.row_parts import Allowance
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import ResolvedJob
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest, TrainingConfig
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import CheckpointSaved
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec, QatSpec, ResumeFrom
from llama_stack_provider_trl.specs.methods import DpoSpec, GrpoSpec, VllmSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.system.files import is_whole, write_manifest
from tests.fakes import job_spec

QAT = QatSpec(quantizer_name="Int4WeightOnlyQATQuantizer", group_size=32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """With job `first`, of four rows a step, whose checkpoints 2, 4 and 6 are listed; the last one is cut."""
    store = Store(tmp_path / "jobs.sqlite3")
    store.add_job(job_spec("first", batch_size=4, checkpoint_dir=tmp_path / "first"), "digest")
    store.launch("first", 1, "cpu", tmp_path / "run")
    saved = []
    for step in (2, 4, 6):
        path = tmp_path / "first" / f"checkpoint-{step}"
        (path / "optimizer").mkdir(parents=True)
        (path / "optimizer" / "shard").write_text(f"moments of step {step}")
        write_manifest(path)
        saved.append(CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=1.0))
    (path / "optimizer" / "shard").write_text("cut")
    saved.append(CheckpointSaved(kind="final", step=8, epoch=1, path=tmp_path / "first" / "final", train_loss=1.0))
    store.apply_events("first", 1, saved, 100)
    yield store
    store.close()


def asking(wanted: ResumeFrom, **changes: Any) -> JobSpec:
    return job_spec("second", resume_from=wanted, **{"batch_size": 4, **changes})


def with_rows(spec: JobSpec, tmp_path: Path) -> JobSpec:
    path = tmp_path / "rows.jsonl"
    path.touch()
    return spec.changed(dataset=spec.data.dataset.model_copy(update={"path": path}))


def copy_of(spec: JobSpec) -> Path:
    assert spec.resume_from is not None
    assert spec.resume_from.path is not None
    return spec.resume_from.path


@pytest.mark.parametrize(("checkpoint", "found"), [(None, "checkpoint-4"), ("checkpoint-2", "checkpoint-2")])
def test_the_copy_stays_whatever_becomes_of_the_other_job(
    store: Store, tmp_path: Path, checkpoint: str | None, found: str
) -> None:
    wanted = ResumeFrom(job_uuid="first", checkpoint=checkpoint)
    spec = copy_checkpoint(asking(wanted, n_epochs=9), store, tmp_path)
    shutil.rmtree(tmp_path / "first")
    path = copy_of(spec)
    assert path.is_relative_to(tmp_path / "jobs" / "second" / "resume")
    assert path.name == found
    assert is_whole(path)
    assert (path / "optimizer" / "shard").read_text() == f"moments of step {found[-1]}"


def test_a_request_that_is_sent_twice_at_once_leaves_the_job_its_checkpoint(store: Store, tmp_path: Path) -> None:
    spec = with_rows(asking(ResumeFrom(job_uuid="first")), tmp_path)
    assert submission._stored(ResolvedJob(spec, [], ()), "digest", store, tmp_path)
    kept = copy_of(store.get("second").spec)
    assert not submission._stored(
        ResolvedJob(spec, [], ()), "digest", store, tmp_path
    )  # the request came before the first was stored
    with pytest.raises(JobConflict, match="made from a different request"):
        submission._stored(
            ResolvedJob(asking(ResumeFrom(job_uuid="first", checkpoint="checkpoint-2")), [], ()), "new", store, tmp_path
        )
    assert copy_of(store.get("second").spec) == kept
    assert is_whole(kept)
    assert list((tmp_path / "jobs" / "second" / "resume").iterdir()) == [kept.parent]


def test_a_post_that_is_repeated_while_the_first_one_copies_waits_for_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def counted(spec: JobSpec, *arguments: Any) -> JobSpec:
        copied.append(spec.job_uuid)
        return copy_checkpoint(spec, *arguments)

    async def requested(*arguments: Any, **named: Any) -> ResolvedJob:
        return ResolvedJob(spec, [], ())

    spec = with_rows(asking(ResumeFrom(job_uuid="first")), tmp_path)
    monkeypatch.setattr(submission, "copy_checkpoint", counted)
    monkeypatch.setattr(submission, "resolved", requested)
    request = SupervisedFineTuneRequest(job_uuid="second", training_config=TrainingConfig(n_epochs=1))

    async def post() -> bool:
        settings = Settings(data_dir=tmp_path, devices=("cpu",))
        return await submission.submit(request, ProviderOptions(), "digest", settings, store, no_rows)

    async def twice() -> list[bool]:
        return await asyncio.gather(post(), post())

    assert asyncio.run(twice()) == [True, False]
    assert copied == ["second"]


async def no_rows(*arguments: Any) -> Any:
    raise AssertionError("no rows are requested here")


def test_a_job_whose_copy_was_taken_away_before_it_was_stored_is_not(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any) -> JobSpec:
        spec = copy_checkpoint(*arguments)
        shutil.rmtree(tmp_path / "jobs" / "second")  # by a DELETE of an earlier job of this name
        return spec

    monkeypatch.setattr(submission, "copy_checkpoint", late)
    spec = with_rows(asking(ResumeFrom(job_uuid="first")), tmp_path)
    with pytest.raises(RowsRemoved, match="was removed while job"):
        submission._stored(ResolvedJob(spec, [], ()), "digest", store, tmp_path)
    assert store.names() == ["first"]


def test_without_links_the_checkpoint_is_copied(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str, **options: bool) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert is_whole(copy_of(copy_checkpoint(asking(ResumeFrom(job_uuid="first")), store, tmp_path)))


def test_a_full_disk_ends_the_copy_and_is_answered_as_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Allowance):
        called = 0

        @contextmanager
        def writing(self, directory: Path) -> Iterator[Callable[[int], None]]:
            def written(count: int) -> None:
                self.called += 1
                raise OSError(errno.ENOSPC, "No space left on device")

            yield written

    def refuse(source: str, target: str, **options: bool) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    full = Full()
    with pytest.raises(StoreError, match="cannot be kept for job 'second'") as refused:
        copy_checkpoint(asking(ResumeFrom(job_uuid="first")), store, tmp_path, full)
    assert shortage_of(refused.value) is FULL
    assert full.called == 1


def test_a_checkpoint_that_goes_while_it_is_copied_is_not_taken(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(source: str, target: str, **options: bool) -> None:
        (tmp_path / "first" / "checkpoint-4" / "optimizer" / "shard").unlink(missing_ok=True)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(StoreError, match="cannot be kept for job 'second'"):
        copy_checkpoint(asking(ResumeFrom(job_uuid="first")), store, tmp_path)
    assert not list((tmp_path / "jobs" / "second" / "resume").iterdir())


def test_another_way_to_share_out_the_same_rows_is_taken(store: Store, tmp_path: Path) -> None:
    spec = asking(ResumeFrom(job_uuid="first"), batch_size=1, gradient_accumulation_steps=2, ranks=2)
    assert copy_checkpoint(spec, store, tmp_path).resume_from != spec.resume_from


def test_a_job_that_asks_for_nothing_is_as_it_was(store: Store, tmp_path: Path) -> None:
    spec = job_spec("second")
    assert copy_checkpoint(spec, store, tmp_path) is spec


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        (ResumeFrom(job_uuid="other"), {}, "this job does not exist"),
        (ResumeFrom(job_uuid="first", checkpoint="checkpoint-3"), {}, "has checkpoint-2, checkpoint-4"),
        (ResumeFrom(job_uuid="first", checkpoint="checkpoint-6"), {}, "has checkpoint-2, checkpoint-4"),
        (ResumeFrom(job_uuid="first"), {"model": "org/another"}, "model is"),
        (ResumeFrom(job_uuid="first"), {"method": DpoSpec()}, "algorithm is 'sft' in that job and 'dpo' in this one"),
        (ResumeFrom(job_uuid="first"), {"lora": LoraSpec(target_modules=("q",), rank=1, alpha=1)}, "lora is None"),
        (ResumeFrom(job_uuid="first"), {"optimizer": OptimizerSpec(name="sgd", learning_rate=1)}, "optimizer is"),
        (ResumeFrom(job_uuid="first"), {"packed": True}, "packed is False in that job and True in this one"),
        (ResumeFrom(job_uuid="first"), {"truncation_side": "left"}, "truncation_side is 'right' in that job"),
        (ResumeFrom(job_uuid="first"), {"qat": QAT}, "qat is None in that job"),
        (ResumeFrom(job_uuid="first"), {"seed": 7}, "seed is 42 in that job and 7 in this one"),
        (ResumeFrom(job_uuid="first"), {"batch_size": 3}, "x nproc_per_node / context_parallel_size = 4"),
        (ResumeFrom(job_uuid="first"), {"sha256": "f" * 64}, "dataset"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_by_name(
    store: Store, tmp_path: Path, wanted: ResumeFrom, changes: dict[str, Any], message: str
) -> None:
    digest = changes.pop("sha256", None)
    spec = asking(wanted, **changes)
    if digest:
        spec = spec.changed(dataset=spec.data.dataset.model_copy(update={"sha256": digest}))
    with pytest.raises(InvalidRequest) as refused:
        copy_checkpoint(spec, store, tmp_path)
    assert refused.value.field == "provider_options.resume_from"
    assert message in str(refused.value)
    assert not (tmp_path / "jobs").exists()


def test_a_grpo_job_resumes_with_another_interpreter_of_vllm_and_other_devices_for_it(
    store: Store, tmp_path: Path
) -> None:
    """As the message of a job that ran out of memory advises."""

    def answered_by(vllm: VllmSpec) -> dict[str, Any]:
        rewards = (RewardSource(name="a", check=AnswerCheck(type="regex", pattern="a")),)
        return {"method": GrpoSpec(rewards=rewards, vllm=vllm)}

    earlier = answered_by(VllmSpec(python=Path("/vllm-1"), gpu_memory_utilization=0.5))
    directory = tmp_path / "grpo"
    store.add_job(job_spec("grpo", batch_size=4, checkpoint_dir=directory, **earlier), "digest of grpo")
    store.launch("grpo", 1, "cpu", tmp_path / "run-grpo")
    shutil.copytree(tmp_path / "first" / "checkpoint-2", directory / "checkpoint-2")
    saved = CheckpointSaved(kind="step", step=2, epoch=1, path=directory / "checkpoint-2", train_loss=1.0)
    store.apply_events("grpo", 1, [saved], 100)
    wanted = ResumeFrom(job_uuid="grpo")
    less = VllmSpec(python=Path("/vllm-2"), gpu_memory_utilization=0.3, mode="server", tensor_parallel_size=2)
    spec = copy_checkpoint(asking(wanted, **answered_by(less)), store, tmp_path)
    assert copy_of(spec).name == "checkpoint-2"
    assert isinstance(spec.method, GrpoSpec)
    assert spec.method.vllm == less
    for other in (None, less.model_copy(update={"importance_sampling_mode": "token_mask"})):
        with pytest.raises(InvalidRequest, match="method is"):
            copy_checkpoint(asking(wanted, **answered_by(other)), store, tmp_path)  # type: ignore[arg-type]
