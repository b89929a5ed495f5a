"""Evaluations decide whether a result is exported or registered."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobFailure, JobNotFound
from llama_stack_provider_trl.jobs.inputs.bases import find_base
from llama_stack_provider_trl.jobs.inputs.promotion import refuse_unusable_conditions, with_found_measures
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.untrained import resolve_work
from llama_stack_provider_trl.requests.work import ExportRequest
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Finished, Prepared, Reason, Started
from llama_stack_provider_trl.specs.harness import HarnessSpec
from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, ShardSpec
from llama_stack_provider_trl.specs.promotion import CheckedCondition, PromotionCondition
from llama_stack_provider_trl.specs.work import CheckedAnswering, EnsembleMember, EvaluateSpec
from llama_stack_provider_trl.stack.responses import status_response
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl_remote.cli import whole_jobs
from llama_stack_provider_trl_remote.cli.main import main, parser
from llama_stack_provider_trl_remote.cli.promotion import NotPromoted, check_promotion, condition
from llama_stack_provider_trl_remote.service.jobs.pipeline_steps import resolved, steps_of
from tests.fakes import FakeClock, FakeLauncher, job_spec
from tests.tiny import REPOSITORY

Json = dict[str, Any]
CHECKED = EvaluateSpec(
    answers=CheckedAnswering(
        max_new_tokens=8,
        temperature=0,
        top_p=1,
        seed=1,
        samples_per_prompt=1,
        checks=(AnswerCheck(type="json", name="right"), AnswerCheck(type="exact")),
    )
)


class World:
    """A trained job `tune`, evaluations of it and of its base, and a supervisor whose passes are made by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock, self.launcher = FakeClock(), FakeLauncher()
        self.store = Store(root / "jobs.db", self.clock)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], root)
        self.tuned = root / "checkpoints" / "tune" / "final"
        self.add("tune", model="/models/tiny")

    def add(self, name: str, **changes: Any) -> None:
        fields = {"checkpoint_dir": self.root / "checkpoints" / name, **changes}
        self.store.add_job(job_spec(name, **fields), "digest")

    def evaluate(self, name: str, model: Path | str | None = None, **changes: Any) -> None:
        self.add(name, **{"model": str(model or self.tuned), "work": EvaluateSpec(), **changes})

    def export(self, *conditions: Json) -> None:
        request = self.request(*conditions)
        refuse_unusable_conditions(request, self.settings, self.store)
        self.add("out", model=str(self.tuned), work=request.work(), after=request.work().evaluations)

    @property
    def settings(self) -> Settings:
        return Settings(data_dir=self.root, devices=("cpu",))

    def request(self, *conditions: Json, model: str = "job:tune") -> ExportRequest:
        body = {"job_uuid": "out", "model": model, "to": "gguf", "promote_if": [*conditions]}
        return ExportRequest.model_validate(body)

    def refused(self, *conditions: Json, **changes: str) -> str:
        with pytest.raises(InvalidRequest) as caught:
            refuse_unusable_conditions(self.request(*conditions, **changes), self.settings, self.store)
        return str(caught.value)

    def run(self, name: str, result: Json | None = None) -> None:
        """Let the next job that starts be `name`, and complete."""
        self.tick()
        self.launcher.emit(f"{name}-1", Started(pid=1, device="cpu", versions={}))
        counts = {"num_rows": 8, "trainable_parameters": 0, "total_parameters": 1}
        self.launcher.emit(f"{name}-1", Prepared(total_steps=1, effective={}, **counts))
        self.launcher.emit(f"{name}-1", Finished(step=1, result=result))
        self.launcher.exit(f"{name}-1", 0)
        self.tick()
        assert self.store.get(name).status == "completed"

    def tick(self) -> None:
        self.clock.advance(5)
        self.supervisor.tick()

    async def status(self, name: str) -> Json:
        """As the client of a service whose jobs these are."""
        return status_response(self.store.get(name), self.store.checkpoints(name)).model_dump(mode="json")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


ABOVE = {"evaluation": "after", "metric": "token_accuracy", "at_least": 0.8}
FORGETS = {"evaluation": "after", "metric": "loss", "against": "before", "at_most_change": 0.02}


def test_an_export_waits_for_its_evaluations_and_has_what_they_have_found(world: World) -> None:
    world.evaluate("after")
    world.evaluate("before", "/models/tiny")
    world.export(ABOVE, FORGETS)
    request = world.request(ABOVE, FORGETS)
    named = find_base(request.reads().model, world.store)
    resolution = resolve_work(request, request.work(), ProviderOptions(), world.settings, named)
    assert resolution.fields["after"] == ("after", "before", "tune")
    world.run("tune")
    world.run("after", {"loss": 0.52, "token_accuracy": 0.8})
    assert world.store.get("out").status == "scheduled"
    world.run("before", {"loss": 0.5, "token_accuracy": 0.7})
    world.tick()
    run_dir = world.store.get("out").run_dir
    assert run_dir is not None
    attempt = AttemptSpec.model_validate_json(RunDir(run_dir).spec.read_text())
    (above, forgets) = attempt.job.work.gates  # type: ignore[union-attr]
    assert (above.found, above.before) == (0.8, None)
    assert (forgets.found, forgets.before, forgets.change) == (0.52, 0.5, 0.02)
    assert forgets.sentence == (
        "loss of 'after' is 0.52, a change of 0.02 from the 0.5 of 'before', and a change of at most 0.02 was asked"
    )


def test_conditions_that_do_not_hold_fail_the_export_with_a_sentence_each_and_nothing_is_written(world: World) -> None:
    world.evaluate("after")
    world.evaluate("before", "/models/tiny")
    world.export(ABOVE, {**ABOVE, "metric": "rows", "at_least": 2}, FORGETS, {**ABOVE, "metric": "perplexity"})
    world.run("tune")
    world.run("after", {"loss": 1.0, "perplexity": None, "token_accuracy": 0.79999999, "rows": 2})
    world.run("before", {"loss": 0.5, "token_accuracy": 0.7, "rows": 2})
    world.tick()
    job = world.store.get("out")
    assert (job.status, job.reason) == ("failed", Reason.not_promoted)
    assert job.message == (
        "promote_if.0 does not hold: token_accuracy of 'after' is 0.79999999, and at least 0.8 was asked. "
        "promote_if.2 does not hold: loss of 'after' is 1.0, a change of 0.5 from the 0.5 of 'before', and a change "
        "of at most 0.02 was asked. "
        "promote_if.3 does not hold: perplexity of 'after' is no finite number, and at least 0.8 was asked. "
        "Nothing was written."
    )
    assert job.run_dir is not None
    assert not job.spec.checkpoint_dir.exists()
    assert not RunDir(job.run_dir).spec.exists()


@pytest.mark.parametrize(
    ("bound", "found", "before", "holds"),
    [
        ({"at_least": 0.5}, 0.5, None, True),
        ({"at_least": 0.5}, 0.4, None, False),
        ({"at_most": 0.5}, 0.5, None, True),
        ({"at_most": 0.5}, 0.6, None, False),
        ({"at_most": 0.5}, None, None, False),
        ({"at_most_change": 0.02}, 0.52, 0.5, True),  # 0.52 - 0.5 of floats is more than 0.02
        ({"at_most_change": 0.02}, 0.53, 0.5, False),
        ({"at_least_change": -0.01}, 0.79, 0.8, True),
        ({"at_least_change": -0.01}, 0.78, 0.8, False),
        ({"at_least_change": -0.01}, 0.8, None, False),
    ],
)
def test_a_bound_holds_where_it_is_reached(bound: Json, found: float | None, before: float | None, holds: bool) -> None:
    against = {"against": "b"} if "change" in next(iter(bound)) else {}
    one = CheckedCondition(evaluation="a", metric="loss", found=found, before=before, **against, **bound)
    assert one.holds is holds


def test_a_condition_that_says_nothing_about_the_export_is_refused_by_its_field(world: World) -> None:
    world.evaluate("after")
    world.evaluate("checked", work=CHECKED)
    world.evaluate("of-another", world.tuned.parent / "checkpoint-2")
    member = EnsembleMember(model=str(world.tuned), weight=1)
    world.evaluate("both", work=EvaluateSpec(members=(member, member)))
    rows = DatasetRef(dataset_id="others", path=Path("/blobs/others.jsonl"), sha256="1" * 64, num_rows=8)
    world.evaluate("other-rows", dataset=rows)
    for changes, sentence in (
        (
            {"at_least": None},
            "promote_if.0='no bound' is not supported: a condition without `against` has one of at_le",
        ),
        ({"at_most": 2}, "promote_if.0='at_least, at_most' is not supported"),
        ({"at_least": None, "at_most_change": 2}, "promote_if.0='at_most_change' is not supported"),
        (
            {"against": "checked"},
            "promote_if.0='at_least' is not supported: a condition with `against` has one of at_lea",
        ),
        ({"against": "after"}, "promote_if.0.against='after' is not supported: it is `evaluation` itself"),
        ({"evaluation": "typo"}, "promote_if.0.evaluation='typo' is not supported: there is no job 'typo' here"),
        ({"evaluation": "tune"}, "job 'tune' is no evaluation (it trains)"),
        ({"evaluation": "both"}, "it measures an ensemble of 2 models, and not "),
        (
            {"evaluation": "of-another"},
            f"it measures {world.tuned.parent}/checkpoint-2, and this is about {world.tuned}",
        ),
        ({"metric": "token_acuracy"}, "loss, perplexity, token_accuracy; the nearest is 'token_accuracy'"),
        ({"evaluation": "checked", "metric": "loss"}, "passed, timed_out, answers.count"),
        ({**FORGETS, "at_least": None, "against": "typo"}, "promote_if.0.against='typo' is not supported"),
        ({**FORGETS, "at_least": None, "against": "other-rows"}, "its rows are not those of 'after': evaluate both"),
        ({**FORGETS, "at_least": None, "against": "checked"}, "its checks are not those of 'after'"),
    ):
        assert sentence in world.refused({**ABOVE, **changes})
    assert "promote_if.1.metric" in world.refused(ABOVE, {**ABOVE, "metric": "bleu"})
    assert "and this is about org/other" in world.refused(ABOVE, model="org/other")
    right = {**ABOVE, "evaluation": "checked", "metric": "checks.right"}
    refuse_unusable_conditions(world.request(right, {**right, "metric": "checks.exact"}), world.settings, world.store)
    world.run("tune")
    world.store.request_cancel("after")
    world.tick()
    assert "promote_if.0.evaluation='after' is not supported: the evaluation is cancelled" in world.refused(ABOVE)


def test_an_evaluation_of_a_deleted_job_says_nothing_about_another_one_of_its_name(world: World) -> None:
    """The checkpoint has the same path, and another content."""
    world.evaluate("after")
    world.run("tune")
    world.run("after", {"token_accuracy": 0.9})
    again = {**ABOVE, "evaluation": "again"}
    world.export(ABOVE)
    world.store.request_cancel("out")
    world.tick()
    world.store.delete("tune")
    world.clock.advance(-3600)  # it was set back: the time of submission says that this job was there before
    world.add("tune", model="/models/other")
    world.tuned.mkdir(parents=True)
    (world.tuned / "config.json").write_text("{}")
    sentence = f"it was submitted before the job that makes {world.tuned}, so it measures a deleted job"
    assert f"promote_if.0.evaluation='after' is not supported: {sentence}" in world.refused(ABOVE)
    assert sentence in world.refused(ABOVE, model=str(world.tuned))
    client: Any = world
    with pytest.raises(InvalidRequest, match=r"--promote-if\.0\.evaluation='after'.* deleted job of the same name"):
        asyncio.run(check_promotion(client, "ft:tune", [condition("after:token_accuracy>=0.8")]))
    world.clock.advance(-3600)
    world.evaluate("again")
    refuse_unusable_conditions(world.request(again), world.settings, world.store)


def test_an_export_that_waits_finds_out_that_its_model_is_another_job_now(world: World) -> None:
    world.evaluate("after")
    world.run("tune")
    world.run("after", {"token_accuracy": 0.9})
    world.export(ABOVE)
    world.store.delete("tune")
    world.clock.advance(1)
    world.add("tune", model="/models/other")
    spec = world.store.get("out").spec
    with pytest.raises(JobFailure, match=r"deleted job of the same name.* Nothing was written") as caught:
        with_found_measures(spec, world.store)
    assert caught.value.reason is Reason.not_promoted


def test_both_evaluations_of_a_change_compute_in_one_dtype_and_read_the_same_part(world: World) -> None:
    rows = DatasetRef(dataset_id="job:made", path=Path(), sha256="", num_rows=0, of_job="made")
    half = rows.model_copy(update={"shard": ShardSpec(index=0, count=2)})
    world.evaluate("after", dtype="bf16")
    world.evaluate("before", "/models/tiny", dtype="fp32")
    assert "before' is not supported: it computes in fp32, and 'after' in bf16: evaluate both" in world.refused(FORGETS)
    # What a node decides is compared once it has.
    world.evaluate("by-node", "/models/tiny", dtype="fp32", dtype_by_device=True)
    refuse_unusable_conditions(world.request({**FORGETS, "against": "by-node"}), world.settings, world.store)
    world.evaluate("whole", dataset=rows)
    world.evaluate("part", "/models/tiny", dataset=half)
    found = world.refused({**FORGETS, "evaluation": "whole", "against": "part"})
    assert "promote_if.0.against='part' is not supported: its rows are not those of 'whole'" in found


def test_rows_of_a_deleted_job_are_not_those_of_another_one_of_its_name(world: World) -> None:
    rows = DatasetRef(dataset_id="job:made", path=Path(), sha256="", num_rows=0, of_job="made")
    world.evaluate("before", "/models/tiny", dataset=rows)
    world.clock.advance(-60)
    world.add("made")
    world.evaluate("after", dataset=rows)
    assert "promote_if.0.against='before' is not supported: its rows are not those of" in world.refused(FORGETS)


def test_a_measure_whose_name_two_have_decides_nothing(world: World) -> None:
    """A name may have dots: task `a.b` with `acc`, and task `a` with `b.acc`."""
    world.evaluate("after", work=EvaluateSpec(harness=HarnessSpec(tasks=("a", "a.b"))))
    world.run("tune")
    world.run("after", {"tasks": {"a.b": {"acc": 0.1, "f1": 0.9}, "a": {"b.acc": 0.9}}})
    accuracy = {"evaluation": "after", "metric": "tasks.a.b.acc", "at_least": 0.5}
    assert "'after' reports several measures of this name" in world.refused(accuracy)
    refuse_unusable_conditions(world.request({**accuracy, "metric": "tasks.a.b.f1"}), world.settings, world.store)


def test_measures_of_a_harness_are_known_when_it_has_completed(world: World) -> None:
    world.evaluate("after", work=EvaluateSpec(harness=HarnessSpec(tasks=("sums",))))
    accuracy = {"evaluation": "after", "metric": "tasks.sum.acc", "at_least": 0.5}
    world.export(accuracy)
    world.run("tune")
    world.run("after", {"tasks": {"sums": {"acc": 0.9}}})
    world.tick()
    job = world.store.get("out")
    assert (job.status, job.reason) == ("failed", Reason.not_promoted)
    assert "promote_if.0.metric='tasks.sum.acc' is not supported" in job.message
    assert "reports tasks.sums.acc; the nearest is 'tasks.sums.acc'. Nothing was written." in job.message
    assert "the nearest is 'tasks.sums.acc'" in world.refused(accuracy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval-1:passed>=0.8", {"evaluation": "eval-1", "metric": "passed", "at_least": 0.8}),
        ("e:checks.right <= 1e-3", {"evaluation": "e", "metric": "checks.right", "at_most": 1e-3}),
        ("e:margin>=-.5", {"evaluation": "e", "metric": "margin", "at_least": -0.5}),
        ("a:loss<=b", {"evaluation": "a", "metric": "loss", "against": "b", "at_most_change": 0.0}),
        ("a:loss<=b-1 + 0.02", {"evaluation": "a", "metric": "loss", "against": "b-1", "at_most_change": 0.02}),
        ("a:acc>=b - 0.01", {"evaluation": "a", "metric": "acc", "against": "b", "at_least_change": -0.01}),
    ],
)
def test_a_condition_on_the_command_line_is_that_of_a_request(text: str, expected: Json) -> None:
    assert condition(text) == expected
    PromotionCondition.model_validate(condition(text))


@pytest.mark.parametrize(
    "text", ["", "loss<=2", "e:loss", "e:loss<2", "e:loss=2", "e:loss<=", "e:loss<=b+ 2", "e:loss<=2 x"]
)
def test_a_condition_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected"):
        condition(text)


def test_a_result_is_registered_only_if_its_evaluations_allow_it(world: World) -> None:
    client: Any = world
    world.evaluate("after")
    above = condition("after:token_accuracy>=0.8")

    def check(model: str, *given: Json) -> None:
        asyncio.run(check_promotion(client, model, [*given]))

    with pytest.raises(InvalidRequest, match=r"--promote-if\.0\.evaluation='after'.*is scheduled: wait until it has"):
        check("ft:tune", above)
    world.run("tune")
    world.run("after", {"loss": 1.0, "token_accuracy": 0.9})
    check("ft:tune", above)
    check("job:tune/final", above)
    with pytest.raises(NotPromoted) as caught:
        check("ft:tune", above, condition("after:loss<=0.5"))
    assert str(caught.value) == (
        "--promote-if.1 does not hold: loss of 'after' is 1.0, and at most 0.5 was asked. ft:tune was not registered."
    )
    with pytest.raises(InvalidRequest, match=r"and this is about .*tune/merged"):
        check("job:tune/merged", above)
    with pytest.raises(InvalidRequest, match="org/base is no result of a job"):
        check("org/base", above)
    with pytest.raises(JobNotFound):
        check("ft:tune", condition("typo:loss<=0.5"))


def test_a_job_of_a_file_is_registered_once_its_evaluations_have_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[str] = []

    async def watch(client: World, names: list[str], *_: Any, **__: Any) -> list[Json]:
        """As the command follows jobs: until each has ended."""
        if names == ["after"]:
            world.run("after", {"loss": 1.0})
        return [await client.status(name) for name in names]

    async def register(client: World, stack: object, model: str, *_: Any, **__: Any) -> None:
        registered.append(model)

    monkeypatch.setattr(whole_jobs, "watch", watch)
    monkeypatch.setattr(whole_jobs, "show_registered", register)
    world.evaluate("after")
    world.run("tune")
    client: Any = world

    def follow(text: str) -> int:
        given = {"register": "", "pull": None, "interval": 1, "json": False, "promote_if": [condition(text)]}
        return asyncio.run(whole_jobs._follow(client, "tune", Namespace(**given)))

    assert follow("after:loss<=1") == 0
    world.run = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(NotPromoted, match=r"at most 0\.5 was asked\. ft:tune was not registered"):
        follow("after:loss<=0.5")
    assert registered == ["ft:tune"]
    file = tmp_path / "job.json"
    file.write_text("{}")
    assert main(["run", str(file), "--url", "http://127.0.0.1:9", "--promote-if", "after:loss<=1"]) == 1
    assert "--promote-if=['after'] is not supported: it decides on --register" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ({"prompt": "a", "completion": "b"}, {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"algorithm": "dpo", "reference_model": "org/base"}),
    ],
)
def test_a_training_makes_the_evaluation_that_decides_on_its_registration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: Json, more: Json
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    sent: list[tuple[Json, Namespace]] = []

    async def check_end(*_: Any) -> None: ...

    async def register_rows(client: object, blob: object, name: str) -> Any:
        return SimpleNamespace(dataset_id="held-out", num_rows=1)

    async def submit(client: object, body: Json, options: Namespace, *_: Any) -> int:
        sent.append((body, options))
        return 0

    for name, fake in (("_check_end", check_end), ("register_rows", register_rows), ("_submit_and_follow", submit)):
        monkeypatch.setattr(whole_jobs, name, fake)
    client: Any = SimpleNamespace(url="http://127.0.0.1:9")

    def train(*words: str) -> None:
        given = ["train", str(rows), "--model", "org/base", "--job", "tune", "--promote-if"]
        asyncio.run(whole_jobs.train(client, parser().parse_args([*given, *words])))

    held_out = ("--eval-data", str(rows))
    train("evaluation:loss<=before", *held_out, "--register")
    ((body, options),) = sent
    assert body["provider_options"]["evaluate"] == {"dataset_id": "held-out", **more}
    assert options.promote_if == [
        {"evaluation": "tune-evaluation", "metric": "loss", "against": "before", "at_most_change": 0}
    ]
    for words, sentence in (
        (("evaluation:loss<=1", *held_out), "it decides on --register"),
        (("evaluation:loss<=1", "--register"), "on the rows of --eval-data: name them there"),
        (("other:loss<=1", *held_out, "--register"), "--promote-if='other' is not supported: only 'evaluation'"),
        (("evaluation:loss<=1", *held_out, "--register", "--merge"), "--promote-if='--merge' is not supported"),
        (("evaluation:loss<=1", *held_out, "--register", "--method", "orpo"), "results of sft and dpo are evaluated"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            train(*words)
        assert sentence in str(caught.value)
    assert len(sent) == 1


def test_evaluations_in_a_pipeline_are_jobs_of_the_file() -> None:
    tune = {"model": "m", "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 4}}}
    jobs: Json = {
        "out": {"kind": "export", "model": "job:tune", "to": "gguf", "promote_if": [ABOVE, FORGETS]},
        "after": {"kind": "evaluate", "model": "job:tune", "dataset_id": "rows"},
        "before": {"kind": "evaluate", "model": "m", "dataset_id": "rows"},
        "tune": tune,
    }
    *_, last = steps_of({"jobs": jobs})
    assert (last.name, last.after) == ("out", ("tune", "after", "before"))
    found = resolved(last, "out-1", {name: f"{name}-1" for name in jobs})["promote_if"]
    assert [(one["evaluation"], one.get("against")) for one in found] == [("after-1", None), ("after-1", "before-1")]
    assert jobs["out"]["promote_if"] == [ABOVE, FORGETS]
    del jobs["before"]
    with pytest.raises(InvalidRequest, match=r"jobs\.out\.promote_if\.1\.against='before'.*no job of this file"):
        steps_of({"jobs": jobs})


def test_the_documented_fields_of_a_condition_are_its_own() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "export.md").read_text()
    table = text.split("<!-- promote_if -->")[1].split("<!-- /promote_if -->")[0]
    names = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert names == list(PromotionCondition.model_fields)
