"""Every method trains every shape of rows: on one process as on two ranks, by every path to the same losses.

CI trains one dataset of all shapes with one method for each use of rows. `TRL_TESTS=full` trains each shape alone with
every method, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl

from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, OptimizerSpec, RowNames, ShardingSpec
from llama_stack_provider_trl.specs.methods import (
    METHODS,
    CpoSpec,
    DistillationSpec,
    GrpoSpec,
    KtoSpec,
    OrpoSpec,
    RewardSpec,
    UldSpec,
)
from llama_stack_provider_trl.specs.rewards import RewardSource
from tests.process import distillation_jobs, gold_jobs
from tests.ranks import Ranks
from tests.required import FULL, in_full
from tests.tiny import tiny_model
from tests.training import dataset, job_spec, of_kind, reference_to

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
"""Writes tools, calls and thoughts, and leaves out the thoughts of earlier rounds: a row is several sequences."""
GLOBAL_BATCH = 4
SAVED = 1
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NAMES = RowNames(
    columns={
        "messages": "talk",
        "tools": "apis",
        "prompt": "question",
        "chosen": "good",
        "rejected": "bad",
        "completion": "reply",
        "label": "liked",
    },
    roles={"client": "user", "agent": "assistant"},
)

Row = dict[str, Any]


def ask(n: int) -> Row:
    return {"role": "user", "content": f"What is {n} plus {n}?" + " Please." * (n % 3)}


def say(text: str, thought: str | None = None, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {}), **more}


def call(n: int, **more: Any) -> Row:
    function = {"name": "add", "arguments": json.dumps({"a": n})}
    calls = [{"id": f"c{n}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(n: int) -> Row:
    return {"role": "tool", "tool_call_id": f"c{n}", "content": json.dumps({"sum": 2 * n})}


def called(n: int) -> list[Row]:
    return [ask(n), call(n, reasoning_content="I add."), result(n)]


def thought_of(n: int) -> list[Row]:
    return [ask(n), say(f"It is {2 * n}.", f"{n} twice is {2 * n}."), ask(n + 1)]


def renamed(row: Row) -> Row:
    """The row with the dataset's own names of columns and roles."""
    roles = {role: name for name, role in NAMES.roles.items()}

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(one) for one in value]
        return (
            {**value, "role": roles.get(value["role"], value["role"])}
            if isinstance(value, dict) and "role" in value
            else value
        )

    columns = {column: name for column, name in NAMES.columns.items() if column in row}
    return {columns.get(column, column): named(value) for column, value in row.items()}


SHAPES: dict[str, dict[str, Callable[[int], Row]]] = {
    "sft": {
        "calls": lambda n: {"messages": [*called(n), say(f"{2 * n}.", "It says so.")], "tools": [TOOL]},
        "sharegpt": lambda n: {
            "conversations": [
                {"from": "human", "value": ask(n)["content"]},
                {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": n}})},
                {"from": "observation", "value": result(n)["content"]},
                {"from": "gpt", "value": f"<think>\nEasy.\n</think>\n\nIt is {2 * n}."},
            ],
            "tools": json.dumps([TOOL]),
        },
        "thoughts": lambda n: {"messages": [*thought_of(n), say(f"Now {2 * n + 2}.", "Two more.")]},
        "weights": lambda n: {
            "messages": [ask(n), say("No.", weight=0), ask(n), say(f"It is {2 * n}.", weight=1), ask(n), say("Yes.")]
        },
        "mapped": lambda n: renamed({"messages": [*called(n), say(f"It is {2 * n}.")], "tools": [TOOL]}),
    },
    "dpo": {
        "calls": lambda n: {"prompt": [ask(n)], "chosen": [call(n)], "rejected": "I cannot add.", "tools": [TOOL]},
        "several": lambda n: {
            "prompt": ask(n)["content"],
            "chosen": f"It is {2 * n}.",
            "rejected": [f"It is {n}.", "I would rather not." * (1 + n % 2)],
        },
        "openai": lambda n: {
            "input": {"messages": called(n), "tools": [TOOL]},
            "preferred_output": [say(f"It is {2 * n}.")],
            "non_preferred_output": [say("I do not know.")],
        },
        "scores": lambda n: {
            "prompt": ask(n)["content"],
            "responses": [f"It is {n}.", f"It is {2 * n}.", "No."],
            "scores": [0.1, 0.9, 0.4],
        },
        "thoughts": lambda n: {"prompt": thought_of(n), "chosen": [say("Yes.", "Two more.")], "rejected": "No, no."},
        "mapped": lambda n: renamed(
            {"prompt": called(n), "chosen": [say(f"It is {2 * n}.")], "rejected": [say("No.")], "tools": [TOOL]}
        ),
    },
    "kto": {
        "calls": lambda n: {"prompt": [ask(n)], "completion": [call(n)], "label": n % 3 > 0, "tools": [TOOL]},
        "thoughts": lambda n: {"messages": [*thought_of(n), say("Yes.", "Two more.")], "label": n % 2 > 0},
        "mapped": lambda n: renamed(
            {"prompt": called(n), "completion": [say(f"It is {2 * n}.")], "label": n % 2 == 0, "tools": [TOOL]}
        ),
    },
    "prompts": {
        "calls": lambda n: {"prompt": called(n), "tools": [TOOL]},
        "thoughts": lambda n: {"messages": thought_of(n)},
        "mapped": lambda n: renamed({"messages": [ask(n)], "tools": [TOOL]}),
    },
}
"""By the rows that a method reads: shape -> a row of it, by a number."""
REWARDS = tuple(
    RewardSource(name=name, check=AnswerCheck(type="regex", pattern=pattern))
    for name, pattern in (("digits", "[0-9]"), ("letter", "[ea]"))
)
TRAINED: dict[str, Any] = {
    "sft": None,
    "dpo": DpoSpec(),
    "orpo": OrpoSpec(),
    "cpo": CpoSpec(),
    "simpo": CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.0, gamma=0.5, alpha=0.0),
    "reward": RewardSpec(margin=True),
    "kto": KtoSpec(),
    "grpo": GrpoSpec(rewards=REWARDS, num_generations=3, max_completion_length=5, beta=0.2),
    "distillation": DistillationSpec(reference=reference_to("."), max_completion_length=5, beta=0.5),
    "gold": DistillationSpec(reference=reference_to("."), max_completion_length=5, uld=UldSpec(skip_end=False)),
}
ALGORITHMS = {**{name: name for name in TRAINED}, "gold": "distillation"}
CASES = [pytest.param(name, None, id=name) for name in TRAINED if FULL or name in ("sft", "dpo", "kto", "grpo")] + [
    pytest.param(name, shape, id=f"{name}-{shape}")
    for name in TRAINED
    for shape in SHAPES[METHODS[ALGORITHMS[name]].rows]
    if FULL
]


@pytest.fixture(autouse=True)
def without_the_notice_of_experimental_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def rows_of(use: str, shape: str | None) -> list[Row]:
    """Seven rows of a shape, or one or two of each, so that an epoch has several steps."""
    if shape is not None:
        return [SHAPES[use][shape](n) for n in range(1, 8)]  # with 0 both answers of a pair would be equal
    return [make(n) for n in ((3, 4) if len(SHAPES[use]) < GLOBAL_BATCH else (3,)) for make in SHAPES[use].values()]


def with_margin(row: Row, number: int) -> Row:
    """The pair with a margin, but for those that have scores."""
    if "scores" in row:
        return row
    several = isinstance(row.get("rejected"), list) and isinstance(row["rejected"][0], str)
    margin = number / 4
    return {**row, "margin": [margin, 2 * margin] if several else margin}


def spec_of(root: Path, name: str, shape: str | None, ranks: int = 1, **changes: Any) -> JobSpec:
    """The same job for any number of ranks: the same rows in each step."""
    algorithm, method = ALGORITHMS[name], TRAINED[name]
    use = METHODS[algorithm].rows
    rows, names = rows_of(use, shape), {"names": NAMES if shape in (None, "mapped") else None}
    if name == "reward":
        rows = [with_margin(row, number) for number, row in enumerate(rows)]
        names = {"names": (names["names"] or RowNames()).model_copy(update={"margins": True})}
    if algorithm == "distillation":
        method = method.model_copy(update={"reference": reference_to(teacher_of(root.parent / "teacher", name))})
    given = dataset(root, rows).model_copy(update=names)
    held_out = dataset(root, rows[:3]).model_copy(update=names) if FULL and use != "prompts" else None
    fields: dict[str, Any] = {
        "dataset": given,
        "validation": held_out,
        "chat_template": QWEN3,
        "n_epochs": 2 if FULL else 1,
        "ranks": ranks,
        "batch_size": GLOBAL_BATCH // ranks,
        "sharding": ShardingSpec() if ranks > 1 else None,
        "optimizer": OptimizerSpec(learning_rate=1e-3),
        "save_steps": SAVED,
        "method": method,
    }
    return job_spec(root, tiny_model(), algorithm, **{**fields, **changes})


def teacher_of(root: Path, name: str) -> Path:
    """A teacher that reads calls and thoughts, too; of `gold` with another vocabulary."""
    if not root.exists():
        (gold_jobs if name == "gold" else distillation_jobs).teacher_model(root)
        (root / "chat_template.jinja").write_text(QWEN3)
    return root


def trained(ranks: Ranks, run_dir: Path, spec: JobSpec, resume_from: Path | None = None) -> list[Any]:
    codes, events = ranks.run(run_dir, spec, resume_from)
    assert codes == [0] * spec.ranks, [event.message + event.traceback for event in of_kind(events, Failed)]
    return events


def numbers(events: list[Any], after: int = 0) -> list[dict[str, float]]:
    """Every metric point behind a step, without what the clock decides."""
    timed = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    points = [point for point in of_kind(events, Progress) + of_kind(events, Evaluated) if point.step > after]
    return [{name: value for name, value in point.metrics.items() if name not in timed} for point in points]


def without_ties(point: dict[str, float]) -> dict[str, float]:
    """A point without the accuracy of pairs whose rewards differ by rounding alone, as in a first step: it counts them
    as one or the other."""
    is_tie = abs(point.get("rewards/margins", 1.0)) < 1e-4
    return {name: value for name, value in point.items() if not (is_tie and name == "rewards/accuracies")}


def assert_same(name: str, found: list[Any], expected: list[Any]) -> None:
    """Metrics of two trainings agree. KTO's are differences of large log-probabilities; rewards are near 0 here."""
    assert len(numbers(found)) == len(numbers(expected)) > SAVED
    absolute = 1e-4 if name in ("kto", "reward") else 1e-5
    for point, other in zip(numbers(found), numbers(expected), strict=True):
        assert without_ties(point) == pytest.approx(
            without_ties(other), rel=1e-3 if name in ("grpo", "distillation", "gold") else 1e-4, abs=absolute
        )


def caches(events: list[Any]) -> set[str]:
    return {*of_kind(events, Prepared)[0].effective["token_cache"].values()}


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_method_trains_a_shape_by_every_path_to_the_same_losses(
    ranks: Ranks, tmp_path: Path, name: str, shape: str | None
) -> None:
    spec = spec_of(tmp_path / "alone", name, shape)
    alone = trained(ranks, tmp_path / "alone" / "run", spec)
    data = of_kind(alone, Prepared)[0].effective["data"]
    assert (data["dropped"], data["truncated"]) == (0, 0)
    assert data["num_rows"] == spec.data.dataset.num_rows
    assert not [event.message for event in of_kind(alone, Warned) if "leaves out" in event.message]
    assert caches(alone) == {"computed"}
    tokens = {"token_cache": spec.data.token_cache}

    if METHODS[spec.algorithm].rows != "prompts" and not METHODS[spec.algorithm].padded_because:
        padded = spec_of(tmp_path / "padded", name, shape, padding_free=False, **tokens)
        events = trained(ranks, tmp_path / "padded" / "run", padded)
        effective = [of_kind(one, Prepared)[0].effective.get("padding_free") for one in (alone, events)]
        assert effective[0] == "used" != effective[1]
        assert caches(events) == {"cache"}
        assert_same(name, events, alone)

    several = spec_of(tmp_path / "several", name, shape, ranks=2, **({} if FULL else tokens))
    events = trained(ranks, tmp_path / "several" / "run", several)
    assert caches(events) <= {"computed" if FULL else "cache", "cache"}  # one rank computes, the first one or the other
    assert_same(name, events, alone)
    (several.checkpoint_dir / "final").rename(tmp_path / "first-final")
    again = trained(ranks, tmp_path / "several" / "again", several, several.checkpoint_dir / f"checkpoint-{SAVED}")
    assert caches(again) == {"cache"}
    assert numbers(again, SAVED) == numbers(events, SAVED) != []


@pytest.mark.parametrize("shape", [None, *in_full(*SHAPES["sft"])])
def test_packed_rows_of_every_shape_have_the_losses_of_padded_ones(
    ranks: Ranks, tmp_path: Path, shape: str | None
) -> None:
    """In one step over all rows: then packing does not decide which rows are in it."""
    whole: dict[str, Any] = {"batch_size": 64, "n_epochs": 2, "max_seq_length": 2048}
    rows = trained(ranks, tmp_path / "rows" / "run", spec_of(tmp_path / "rows", "sft", shape, **whole))
    packed = spec_of(tmp_path / "packed", "sft", shape, packed=True, **whole)
    events = trained(ranks, tmp_path / "packed" / "run", packed)
    packing = of_kind(events, Prepared)[0].effective["packing"]
    assert packing["sequences"] < packing["rows"]
    measured = ("loss", "grad_norm", "num_tokens", "eval_loss")
    for point, other in zip(numbers(events), numbers(rows), strict=True):
        expected = {metric: other[metric] for metric in measured if metric in other}
        assert {metric: point[metric] for metric in expected} == pytest.approx(expected, rel=1e-4)
    several = spec_of(tmp_path / "several", "sft", shape, 2, packed=True, **{**whole, "batch_size": 32})
    for point, other in zip(
        numbers(trained(ranks, tmp_path / "several" / "run", several)), numbers(events), strict=True
    ):
        assert point == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_every_method_and_use_of_rows_is_here() -> None:
    assert {*ALGORITHMS.values()} == {name for name in METHODS if not name.startswith("custom")}
    assert {*SHAPES} == {method.rows for method in METHODS.values()}
