"""OpenAI's graders: templates, formulas, and what each grader gives an answer."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobFailure, LimitReached
from llama_stack_provider_trl.requests.bodies import GRPOConfig
from llama_stack_provider_trl.requests.graders import refuse_python_graders
from llama_stack_provider_trl.requests.grpo import resolve_grpo
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, passes, refuse_unusable
from llama_stack_provider_trl.specs.answer_rows import read_checked_rows
from llama_stack_provider_trl.specs.grading import grading, isolated
from llama_stack_provider_trl.specs.grading.formula import parsed
from llama_stack_provider_trl.specs.grading.graders import Grader
from llama_stack_provider_trl.specs.grading.grading import Graded, graded
from llama_stack_provider_trl.specs.grading.similarity import problem_of_metric, similarity
from llama_stack_provider_trl.specs.grading.templates import names_of, rendered
from llama_stack_provider_trl.system import limited
from llama_stack_provider_trl.system.limited import Limited, TooLate
from llama_stack_provider_trl.system.offload import Account
from llama_stack_provider_trl_remote.service.serving.graders import refuse_grader
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

ITEM = {"answer": "Paris", "more": {"tags": ["a", "b"], "count": 2}, "none": None, "sneaky": "{{item.answer}}"}
ADAPTER: TypeAdapter[Any] = TypeAdapter(Grader)
TEXT = "{{sample.output_text}}"
PYTHON = {"type": "python", "name": "own", "source": "def grade(sample, item): return 1.0"}


def check(operation: str, reference: str = "{{item.answer}}", text: str = TEXT) -> dict[str, Any]:
    return {"type": "string_check", "name": "same", "operation": operation, "input": text, "reference": reference}


def similar(metric: str, reference: str = "the cat sat on the mat") -> dict[str, Any]:
    named = {"type": "text_similarity", "name": "similar", "evaluation_metric": metric}
    return {**named, "input": TEXT, "reference": reference}


def multi(formula: str, **graders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "multi", "name": "all", "graders": graders, "calculate_output": formula}


def given(grader: dict[str, Any], text: str, item: dict[str, Any] = ITEM) -> Graded:
    return graded(ADAPTER.validate_python(grader), text, item)


@pytest.mark.parametrize(
    ("operation", "text", "expected"),
    [
        *[("eq", "Paris", 1.0), ("eq", "paris", 0.0), ("eq", "Paris ", 0.0)],
        *[("ne", "Paris", 0.0), ("ne", "paris", 1.0)],
        *[("like", "It is Paris.", 1.0), ("like", "It is paris.", 0.0), ("like", "Par", 0.0)],
        *[("ilike", "IT IS PARIS.", 1.0), ("ilike", "Rome", 0.0)],
    ],
)
def test_a_string_check_gives_1_or_0(operation: str, text: str, expected: float) -> None:
    assert given(check(operation), text) == Graded(expected, None, {"same": expected})


@pytest.mark.parametrize(
    ("metric", "text", "expected"),
    [
        # The input has 5 of the 6 words of the reference, 3 of its 5 pairs of words, and 1 of its 4 runs of three.
        *[("rouge_1", "the cat is on the mat", 5 / 6), ("rouge_2", "The cat is on the mat!", 3 / 5)],
        *[("rouge_3", "the cat is on the mat", 1 / 4), ("rouge_4", "the cat is on the mat", 0.0)],
        *[("rouge_5", "the cat sat on the mat", 1.0), ("rouge_l", "the cat is on the mat", 5 / 6)],
        *[("rouge_1", "", 0.0), ("rouge_1", "dog", 0.0)],
    ],
)
def test_rouge_is_the_f_measure_of_common_words(metric: str, text: str, expected: float) -> None:
    if problem := problem_of_metric(metric):
        pytest.skip(problem)
    assert given(similar(metric), text).reward == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("fuzzy_match", 40 / 43),  # 20 common characters of 21 and 22, twice
        ("bleu", (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25),  # no run of four: half of one in 3, as sacrebleu smooths
        ("gleu", 9 / 18),  # runs of one to four words
    ],
)
def test_metrics_of_libraries_are_between_0_and_1(metric: str, expected: float) -> None:
    if problem := problem_of_metric(metric):
        pytest.skip(problem)
    assert given(similar(metric), "the cat is on the mat").reward == pytest.approx(expected)
    assert [given(similar(metric), text).reward for text in ("the cat sat on the mat", "")] == [pytest.approx(1), 0]


def test_a_metric_that_cannot_be_computed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="the metric cosine needs an embedding model"):
        ADAPTER.validate_python(similar("cosine"))
    monkeypatch.setattr("llama_stack_provider_trl.specs.grading.similarity.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest) as refused:
        refuse_unusable([AnswerCheck.model_validate({"type": "grader", "grader": similar("bleu")})], "checks")
    assert refused.value.field == "checks.0.grader.evaluation_metric"
    assert "bleu needs sacrebleu, which is not installed: install the extra `graders`" in refused.value.hint
    assert given(similar("bleu"), "a").error is not None
    with pytest.raises(ValueError, match="found 100001 characters"):
        similarity("rouge_1", "a" * 100_001, "a")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *[("{{item.answer}}", "Paris"), ("<{{ item.more.count }}>", "<2>"), ("{{item.more.tags.1}}", "b")],
        *[("{{item.more.tags}}", '["a", "b"]'), ("{{sample.output_text}}!", '{"x": {"y": 1}}!')],
        *[("{{sample.output_json.x}}", '{"y": 1}'), ("{{sample.output_json.x.y}}", "1"), ("{x} }}", "{x} }}")],
        ("{{item.sneaky}}", "{{item.answer}}"),  # what a row brings is replaced by nothing
    ],
)
def test_a_template_is_replaced_once(template: str, expected: str) -> None:
    sample = {"output_text": '{"x": {"y": 1}}', "output_json": {"x": {"y": 1}}}
    assert rendered(template, {"item": ITEM, "sample": sample}) == expected


def test_a_value_is_written_out_once_however_often_a_template_names_it() -> None:
    class Counted:
        written = 0

        def __str__(self) -> str:
            Counted.written += 1
            return "a"

    assert rendered("{{item.x}}" * 3, {"item": {"x": [Counted()]}, "sample": {}}) == '["a"]' * 3
    assert Counted.written == 1
    with pytest.raises(ValueError, match="more than 1048576 characters"):
        rendered("{{item.x}}" * 3, {"item": {"x": "a" * (1 << 19)}, "sample": {}})


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        *[("{{item.a{b}}", "without }}"), ("{{" * 8192, "without }}")],
        *[("{{answer}}", "found {{answer}}"), ("{{item}}", "found {{item}}"), ("{{item.a + 1}}", "letters, digits")],
        *[("{{item.a|upper}}", "found"), ("{{item.__class__()}}", "found"), ("{% if %}{{", "without }}")],
        *[("{{sample.text}}", "expected one of sample.output_text"), ("{{sample.output_text.x}}", "has no parts")],
        *[("{{item.a}}" * 65, "65 names"), ("a" * 16385, "16385 characters")],
    ],
)
def test_a_template_that_names_something_else_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("|", "[|]")):
        names_of(template)


@pytest.mark.parametrize(
    ("text", "item", "kind", "sentence"),
    [
        ("no JSON", ITEM, "sample_parse_error", "same: sample has no 'output_json': it has output_text"),
        ('{"b": 1}', ITEM, "sample_parse_error", "same: sample.output_json has no 'a': it has b"),
        ('{"a": 1}', {}, "invalid_variable_error", "same: item has no 'answer': it has nothing"),
        ('{"a": 1}', {"answer": None}, "invalid_variable_error", "same: item.answer is null, expected a value"),
    ],
)
def test_what_is_missing_gives_0_and_a_sentence(text: str, item: dict[str, Any], kind: str, sentence: str) -> None:
    found = given(check("eq", text="{{sample.output_json.a}}"), text, item)
    assert found.reward == 0.0
    assert found.error is not None
    assert (found.error.kind, found.error.sentence) == (kind, sentence)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        *[("0.5 * a + b ** 2", 4.25), ("-a ** 2", -0.25), ("2 ** 3 ** 2", 512.0), ("2^-1", 0.5), ("7 / 2 / 7", 0.5)],
        *[("min(a, b, 0.25)", 0.25), ("max(a, b)", 2.0), ("abs(a - b)", 1.5), ("floor(2.7) + ceil(2.1)", 5.0)],
        *[("exp(0) + log(1) + sqrt(4)", 3.0), ("((1e1)) - .5", 9.5), ("1 - -1", 2.0), ("min + 1", 4.0)],
    ],
)
def test_a_formula_is_arithmetic(formula: str, expected: float) -> None:
    assert parsed(formula).value({"a": 0.5, "b": 2.0, "min": 3.0}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        *[("a b", "found 'b' behind"), ("a +", "it ends"), ("(a", r"expected \)|it ends"), ("a.b", "found '.b'")],
        *[("__import__('os')", "found"), ("eval(a)", "it calls 'eval'"), ("a if b else a", "behind the end")],
        *[("floor(1, 2)", "floor has 2 arguments, expected 1"), ("min(1)", "expected 2 or more"), ("", "it ends")],
        *[("(" * 60 + "1" + ")" * 60, "at most 50"), ("2**" * 60 + "1", "more than 50"), ("1e400", "too large")],
        *[("1+" * 1500 + "1", "3001 characters"), ("[a]", "found"), ("a @ b", "found")],
    ],
)
def test_another_formula_is_refused(formula: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parsed(formula)


@pytest.mark.parametrize(
    "formula",
    ["1 / (a - a)", "log(-a)", "9 ** 9 ** 9", "(0 - 8) ** 0.5", "abs((0 - 8) ** 0.5)", "exp(1e9)", "1e10 * a"],
)
def test_a_formula_without_a_finite_value_gives_0(formula: str) -> None:
    found = given(multi(formula, a=check("eq")), "Paris")
    assert found.reward == 0.0
    assert found.error is not None
    assert dict(found.scores) == {"a": 1.0}


def test_a_multi_grader_combines_its_graders() -> None:
    both = multi("0.75 * right + 0.25 * short", right=check("like"), short=check("eq", "Paris"))
    assert given(both, "Paris!") == Graded(0.75, None, {"right": 1.0, "short": 0.0})
    one = {"type": "multi", "name": "all", "graders": check("eq"), "calculate_output": "2 * same"}
    assert given(one, "Paris").reward == 2.0
    wrong = multi("a + b", a=check("eq"), b=check("eq", "{{item.missing}}"))
    assert given(wrong, "Paris").error is not None
    assert given(wrong, "Paris").reward == 0.0


@pytest.mark.parametrize(
    ("grader", "problem"),
    [
        ({"type": "endpoint", "name": "x"}, "a grader at an address of its own is not supported; use one of"),
        ({"type": "other"}, "there is no such grader"),
        (multi("a", a=multi("b", b=check("eq"))), "'a' is of type multi"),
        (multi("a", a={"type": "endpoint"}), "a grader at an address"),
        ({**check("eq"), "image_tag": "x"}, "Extra inputs"),
        ({"type": "python", "name": "x", "source": "a", "image_tag": "2025-05-08"}, "without images"),
        (check("regex"), "'eq', 'ne', 'like' or 'ilike'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(grader: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ADAPTER.validate_python(grader)


@pytest.mark.parametrize(
    ("fields", "field", "hint"),
    [
        ({"grader": multi("a + c", a=check("eq"))}, "grader.calculate_output", "it names 'c', expected one of its"),
        ({}, "grader", "a check of type grader needs one"),
        ({"grader": check("eq", "{{sample.output_tools}}")}, "grader", "answers are texts here"),
        ({"grader": check("eq"), "column": "answer"}, "column", "a check of type grader has grader, at_least"),
        ({"grader": check("eq"), "normalize": True}, "normalize", "leave it out"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(fields: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        refuse_unusable([AnswerCheck.model_validate({"type": "grader", **fields})], "checks")
    assert (refused.value.field, hint in refused.value.hint) == (f"checks.0.{field}", True)


def test_a_check_passes_from_its_least_reward_on_and_reads_all_columns(tmp_path: Any) -> None:
    half = multi("a / 2", a=check("eq"))
    passing = AnswerCheck.model_validate({"type": "grader", "grader": half, "at_least": 0.5})
    failing = AnswerCheck.model_validate_json(passing.model_copy(update={"at_least": None}).model_dump_json())
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Capital of France?", "answer": "Paris"}\n{"prompt": "Of Italy?"}\n')
    read = read_checked_rows(rows, [passing, failing])
    references = next(read).references
    found = [passes(one, "Paris", item) for one, item in zip((passing, failing), references, strict=True)]
    assert found == [True, False]
    with pytest.raises(InvalidRows, match=r"checks.0.grader: item has no 'answer': it has prompt"):
        next(read)


@pytest.mark.parametrize("grader", [PYTHON, multi("a", a=PYTHON)])
def test_source_runs_only_where_the_operator_allows_it(grader: dict[str, Any], tmp_path: Any) -> None:
    check = AnswerCheck.model_validate({"type": "grader", "grader": grader})
    for settings in (TrlConfig(data_dir=tmp_path), ServiceSettings(data_dir=tmp_path)):
        with pytest.raises(InvalidRequest, match="the operator allows it by the setting python_graders") as refused:
            refuse_python_graders([("checks.0", check)], settings)
        assert refused.value.field == "checks.0.grader.type"
        refuse_python_graders([("checks.0", check)], settings.model_copy(update={"python_graders": True}))
    with pytest.raises(InvalidRequest, match="python_graders"):
        refuse_grader(ADAPTER.validate_python(grader), ServiceSettings(data_dir=tmp_path))


def test_a_reward_of_a_grader_has_no_threshold() -> None:
    config = {"type": "grpo", "rewards": [{"check": {"type": "grader", "grader": check("eq"), "at_least": 1}}]}
    with pytest.raises(InvalidRequest, match="is not compared with a threshold"):
        resolve_grpo(GRPOConfig.model_validate(config), ProviderOptions(), "algorithm_config")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = 1\ndef grade(:\n", "line 2: invalid syntax"),
        ("import re\nimport os\ndef grade(sample, item): return 1.0", "line 2: it imports 'os'"),
        ("def score(sample, item): return 1.0", "defines no function grade"),
        (
            "import json.nothing\ndef grade(sample, item): return 1.0",
            "line 1: it imports 'json.nothing', which is not there",
        ),
        ("from math import nothing\ndef grade(sample, item): return 1.0", "line 1: it imports nothing of 'math'"),
        ("import json.__main__\ndef grade(sample, item): return 1.0", "line 1: it imports 'json.__main__', expected"),
        ("from json import __main__\ndef grade(sample, item): return 1.0", "line 1: it imports 'json', expected"),
        ("async def grade(sample, item): return 1.0", "defines no function grade"),
    ],
)
def test_a_source_that_can_never_grade_is_refused(source: str, problem: str) -> None:
    grader = {**PYTHON, "source": source}
    with pytest.raises(InvalidRequest) as refused:
        refuse_unusable([AnswerCheck.model_validate({"type": "grader", "grader": grader})], "checks")
    assert (refused.value.field, problem in refused.value.hint) == ("checks.0.grader.source", True)


def test_a_source_takes_modules_below_others() -> None:
    source = (
        "from collections import abc\nfrom json import decoder\nimport os.path"
        + "\ndef grade(sample, item): return 1.0"
    )
    with pytest.raises(InvalidRequest, match=r"line 3: it imports 'os\.path', expected"):
        refuse_unusable(
            [AnswerCheck.model_validate({"type": "grader", "grader": {**PYTHON, "source": source}})], "checks"
        )
    body = "return float(isinstance([], abc.Sized) and decoder.JSONDecoder().decode('1') == 1)"
    source = f"from collections import abc\nfrom json import decoder\ndef grade(sample, item): {body}"
    assert given({**PYTHON, "source": source}, "").reward == 1.0


def test_a_value_that_json_lacks_is_read_as_its_text() -> None:
    item = {"day": date(2026, 11, 29)}
    assert given(check("eq", "{{item.day}}"), "2026-11-29", item).reward == 1.0
    own = {**PYTHON, "source": "def grade(sample, item): return float(item['day'] == '2026-11-29')"}
    assert given(own, "", item) == Graded(1.0, None, {"own": 1.0})


@pytest.mark.parametrize("error", [LimitReached("busy"), OSError("busy")])
def test_a_job_fails_where_an_answer_cannot_be_graded(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def call(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise error

    monkeypatch.setattr(isolated.LIMITS, "call", call)
    monkeypatch.setattr(grading, "_WAITS_S", (0.0, 0.0))
    with pytest.raises(JobFailure, match=r"the grader 'own' cannot be run, after 3 tries in 0 s: (own: )?busy"):
        given(PYTHON, "")
    assert len(tries) == 3


def test_graders_behind_one_that_is_too_late_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def call(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise TooLate("busy")

    monkeypatch.setattr(isolated.LIMITS, "call", call)
    found = given(multi("a + b", a=PYTHON, b=PYTHON), "")
    assert found.error is not None
    assert (found.error.kind, len(tries)) == ("python_grader_runtime_error", 1)
    assert "it has not ended in 10 s" in found.error.sentence


def test_the_time_for_which_a_source_waits_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []

    class Budget:
        def require(self, user: str) -> None:
            pass

        def charge(self, seconds: float, user: str) -> None:
            charged.append(seconds)

    monkeypatch.setattr(limited, "charged_account", lambda: Account(Budget(), "ann"))  # type: ignore[arg-type]
    monkeypatch.setattr(isolated, "LIMITS", Limited(seconds=1, memory=512 << 20))
    monkeypatch.setattr(grading, "WALL_S", 2.0)
    lock = "lock = collections._sys.modules['_thread'].allocate_lock()"  # sleep is not permitted
    source = f"import collections\n{lock}\ndef grade(sample, item): lock.acquire(), lock.acquire()"
    found = given({**PYTHON, "source": source}, "")
    assert found.is_late
    assert 1.8 < sum(charged) < 10  # 1 s of CPU time, which it may have used, and the rest of its 2 s
