"""Jobs that do not train, on several ranks: the bytes and the numbers of one process, whichever rank is killed."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.distributed import replicas
from llama_stack_provider_trl.recipes.evaluation import evaluate
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import (
    Event,
    EventWriter,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Started,
)
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, ShardingSpec
from llama_stack_provider_trl.specs.work import (
    CheckedAnswering,
    EnsembleMember,
    EvaluateSpec,
    FurtherModel,
    GenerateSpec,
)
from llama_stack_provider_trl.system.files import RunDir
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec, of_kind, reference_to

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 7}
PROMPTS = [{"prompt": f"Count {'more ' * number}{number}"} for number in range(5)]
GENERATE = GenerateSpec(**SAMPLING, samples_per_prompt=3, output_dataset_id="answers")
"""15 answers, in batches of 2: the last round has 2 batches on 2 ranks, and 2 of 3 on 3; the last batch is not full."""
CHECKED = CheckedAnswering(
    **SAMPLING,
    samples_per_prompt=1,
    checks=(
        AnswerCheck.model_validate({"type": "regex", "pattern": "[aeiou]"}),
        AnswerCheck.model_validate({"type": "judge", "model": "m", "max_new_tokens": 4}),
    ),
    judges=(FurtherModel(model=str(tiny_model(tied=False))),),
)


def spec_of(root: Path, work: GenerateSpec | EvaluateSpec, ranks: int, **changes: Any) -> JobSpec:
    sharding = ShardingSpec(strategy="NO_SHARD") if ranks > 1 else None
    fields = {"rows": PROMPTS, "batch_size": 2, "num_threads": 1, "work": work, "ranks": ranks, "sharding": sharding}
    algorithm = changes.pop("algorithm", "sft")
    return job_spec(root, tiny_model(), algorithm, **{**fields, **changes})


def finished(ranks: Ranks, root: Path, spec: JobSpec) -> tuple[list[Event], dict[str, Any], dict[str, bytes]]:
    """Events, result and files of an attempt that ends well."""
    codes, events = ranks.run(root, spec)
    assert codes == [0] * spec.ranks, of_kind(events, Failed)
    (found,) = (event.result for event in of_kind(events, Finished))
    assert found is not None
    assert len(of_kind(events, Started)) == len(of_kind(events, Prepared)) == 1
    return events, found, files_of(spec)


def files_of(spec: JobSpec) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in spec.checkpoint_dir.glob("*.jsonl*")}


def without_path(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "answers": {name: value for name, value in result["answers"].items() if name != "path"}}


@pytest.fixture(scope="module")
def answered(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Result and files of the `generate` job in one process."""
    root = tmp_path_factory.mktemp("generated")
    _, *found = finished(ranks, root / "run", spec_of(root, GENERATE, 1))
    return found[0], found[1]


@pytest.fixture(scope="module")
def checked(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Result and files of the job with checks and a judge in one process."""
    root = tmp_path_factory.mktemp("checked")
    _, *found = finished(ranks, root / "run", spec_of(root, EvaluateSpec(answers=CHECKED), 1))
    return found[0], found[1]


@pytest.mark.parametrize("count", [3, *in_full(2)])
def test_ranks_answer_with_the_bytes_of_one_process(ranks: Ranks, answered: Any, tmp_path: Path, count: int) -> None:
    events, result, files = finished(ranks, tmp_path / "run", spec_of(tmp_path, GENERATE, count))
    assert (result, files) == answered
    steps = {2: [4, 8, 12, 15], 3: [6, 12, 15]}
    assert [event.step for event in of_kind(events, Progress)] == steps[count]


@pytest.mark.parametrize(
    ("fault", "kept", "steps"),
    [
        ("answering-6", 6, [10, 14, 15]),  # between the batches of two ranks, in the middle of the second
        *in_full(
            ("finishing", 15, []), ("started", 0, [4, 8, 12, 15]), ("answering-8", 8, [12, 15]), ("step-8", 8, [12, 15])
        ),
    ],
)
def test_answers_continue_exactly_after_sigkill_of_a_rank(
    ranks: Ranks, armed: Path, answered: Any, tmp_path: Path, fault: str, kept: int, steps: list[int]
) -> None:
    spec = spec_of(tmp_path, GENERATE, 2)
    (armed / fault).write_text("kill")
    codes, events = ranks.run(tmp_path / "killed", spec)
    assert -9 in codes
    assert not of_kind(events, Finished)
    events, result, files = finished(ranks, tmp_path / "again", spec)
    assert (result, files) == answered
    (prepared,) = of_kind(events, Prepared)
    assert (prepared.start_step, [event.step for event in of_kind(events, Progress)]) == (kept, steps)


def test_answers_of_one_process_are_continued_by_ranks_and_the_other_way_round(
    ranks: Ranks, answered: Any, tmp_path: Path
) -> None:
    content = answered[1]["answers.jsonl"]
    for first in (1, 2):
        root = tmp_path / str(first)
        spec = spec_of(root, GENERATE, 3 - first)
        spec.checkpoint_dir.mkdir(parents=True)
        (spec.checkpoint_dir / "answers.jsonl").write_bytes(content[: len(content) // 2])
        _, result, files = finished(ranks, root / "run", spec)
        assert (result, files) == answered


def test_a_pause_is_observed_by_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GENERATE, 2)
    codes, events = ranks.run(tmp_path / "run", spec, prepare=lambda paths: RunDir(paths.root).control.write_text("{}"))
    assert (codes, [event.step for event in of_kind(events, Paused)]) == ([0, 0], [0])


def test_ranks_check_and_judge_answers_with_the_bytes_of_one_process(
    ranks: Ranks, armed: Path, checked: Any, tmp_path: Path
) -> None:
    for fault in ("", "judging-2", *in_full("answering-2", "step-9", "verdicts-staged")):
        root = tmp_path / (fault or "undisturbed")
        spec = spec_of(root, EvaluateSpec(answers=CHECKED), 2)
        if fault:
            (armed / fault).write_text("kill")
            codes, _ = ranks.run(root / "killed", spec)
            assert -9 in codes, fault
        _, result, files = finished(ranks, root / "run", spec)
        assert (without_path(result), files) == (without_path(checked[0]), checked[1]), fault


@pytest.mark.parametrize(("algorithm", "members"), [("dpo", 0), ("sft", 2), *in_full(("sft", 0))])
def test_the_measures_of_ranks_are_those_of_one_process_to_the_last_bit(
    ranks: Ranks, tmp_path: Path, algorithm: str, members: int
) -> None:
    models = [EnsembleMember(model=str(tiny_model(tied=bool(one))), weight=0.5) for one in range(members)]
    rows = {"sft": SFT_ROWS, "dpo": DPO_ROWS}[algorithm][:5]  # the last of 3 batches is not full
    changes: dict[str, Any] = {"rows": rows, "algorithm": algorithm}
    if algorithm == "dpo":
        changes["method"] = DpoSpec(reference=reference_to(str(tiny_model(tied=False))))
    found = []
    for count in (1, 2, 4, *in_full(8)):  # of 4 ranks, one has nothing to do
        root = tmp_path / str(count)
        found.append(
            finished(ranks, root / "run", spec_of(root, EvaluateSpec(members=tuple(models)), count, **changes))
        )
    results = [result for _, result, _ in found]
    assert results == [results[0]] * len(results)
    assert results[0]["loss"] > 0


def test_each_rank_computes_as_if_it_were_alone_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}.items():
        monkeypatch.setenv(name, value)

    def compute() -> None:
        with replicas._alone():
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
            assert not ranks.keys() & os.environ.keys()
            raise MemoryError

    with pytest.raises(MemoryError):
        compute()
    assert {name: os.environ[name] for name in ranks} == ranks  # the failure is reported with the rank


def test_a_rank_beyond_the_first_writes_heartbeats_alone(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with closing(replicas.Heartbeats(EventWriter(file))) as writer:
        os.utime(file, (0, 0))
        writer.write(Paused(step=1), durable=True)
        assert (file.stat().st_size, file.stat().st_mtime) == (0, 0)
        writer.heartbeat()
        assert file.stat().st_mtime > 0


def test_sums_of_batches_are_added_without_rounding() -> None:
    batches = [[2.0**60, 1.0], [1.0, 1.0], [-(2.0**60), 1.0], [1.0, 1.0]]
    for ranks in ([batches], [batches[:1], batches[1:]], [batches[::2], batches[1::2], []]):
        assert evaluate._means([{"loss": of_rank} if of_rank else {} for of_rank in ranks]) == {"loss": 0.5}
