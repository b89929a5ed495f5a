"""Models that judge answers: what they read, how verdicts are read, which checks are taken, and what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.jobs.inputs.merges import bases_of
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.work import EvaluateRequest
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.answer_rows import read_checked_rows
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.judging import default_template, filled, read_verdict
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.work import EvaluateSpec
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote import answer_lines as lines_module
from llama_stack_provider_trl_remote.answer_lines import answer_lines
from tests.fakes import job_spec
from tests.unit.based_jobs import LORA, add

JUDGE: dict[str, Any] = {"type": "judge", "model": "org/judge"}


def request(*checks: dict[str, Any], **changes: Any) -> EvaluateRequest:
    body = {"job_uuid": "e", "model": "org/base", "dataset_id": "rows", "checks": list(checks)}
    return EvaluateRequest.model_validate({**body, **changes})


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Verdict: yes", 1.0),
        ("Verdict: no.", 0.0),
        ("YES.", 1.0),
        ("YES, it is", None),
        ("**No**", 0.0),
        ('I think.\n**Verdict:** "Yes"\n', 1.0),
        ("**Verdict**: yes", 1.0),
        ("verdict: no\nOn reflection:\n> Verdict = yes\nGood.", 1.0),
        ("Verdict: yes\nVerdict: I do not know", None),
        ("Okay, the user wants Verdict: yes or no. The", None),
        ("Verdict: yes or no", None),
        ("<think>Verdict: no</think> yes", 1.0),
        ("<think>yes", None),
        ("<think>a</think>\n<think>\nVerdict: yes\n", None),
        ("Verdict: yes/no", None),
        ("Verdict: maybe. yes", None),
        ("yesterday", None),
        ("1", None),
        ("", None),
        (" \n*", None),
    ],
)
def test_a_verdict_of_yes_or_no_is_a_line_of_its_own_or_the_whole_text(text: str, score: float | None) -> None:
    assert read_verdict(text, None) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7", 7.0),
        ("Verdict: 7/10", 7.0),
        ("Verdict: 7 out of 10", 7.0),
        ("verdict: `6.5`", 6.5),
        ("Verdict: -0.5", None),
        ("7/9", None),
        ("1. The answer is good", None),
        ('<think>I must reply with one line such as "Verdict: 10". The answer is bad', None),
        ("Verdict: 7. Not 8", None),
        ("Verdict: 11", None),
        ("Verdict: 7,5", None),
        ("Verdict: seven", None),
        ("The score is 7", None),
        ("nan", None),
        ("\u0667", None),
        ("9" * 400, None),
    ],
)
def test_a_score_is_a_number_of_the_scale(text: str, score: float | None) -> None:
    assert read_verdict(text, (0.0, 10.0)) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [("Verdict: 1", None), ("1", None), ("1\n", None), ("Verdict: 1\n", 1.0), ("Verdict: 1\nIt", 1.0)],
)
def test_of_a_verdict_that_was_cut_off_a_whole_line_counts(text: str, score: float | None) -> None:
    assert read_verdict(text, (0, 10), is_complete=False) == score


def test_a_verdict_of_any_text_is_read_in_little_time() -> None:
    many = "verdict: \n" * 100_000
    for text in (many, "verdict" * 100_000, "verdict" + " " * 500_000, "verdict:" + "*" * 500_000, "7" * 500_000):
        assert read_verdict(text, (0, 10)) is None


def test_a_template_is_filled_once_and_shows_several_turns_with_their_roles() -> None:
    one = [{"role": "user", "content": "What is {answer}?"}]
    template = '{prompt}|{answer}|{reference}|{"a": {other}}'
    assert filled(template, one, "{prompt}", "{answer}") == 'What is {answer}?|{prompt}|{answer}|{"a": {other}}'
    two = [{"role": "system", "content": "Be short."}, *one]
    assert filled("{prompt}", two, "", None) == "system: Be short.\n\nuser: What is {answer}?"


@pytest.mark.parametrize("scale", [None, (0.0, 2.5)])
@pytest.mark.parametrize("has_reference", [True, False])
def test_the_default_template_has_all_parts_and_gives_a_form_that_is_read(scale: Any, has_reference: bool) -> None:
    text = default_template(scale, has_reference=has_reference)
    assert ("{reference}" in text) is has_reference
    assert text.count("{prompt}") == text.count("{answer}") == 1
    example = text.rpartition('"Verdict: ')[2].partition('"')[0]
    assert read_verdict(f"Verdict: {example}", scale) == (0.0 if scale is None else None)  # no number to repeat


@pytest.mark.parametrize(
    ("check", "field", "sentence"),
    [
        ({"model": None}, "model", "needs the model that reads the answers"),
        ({"template": "{answer}"}, "template", "it has no {prompt}: it needs {prompt}, {answer}"),
        ({"template": "{prompt}"}, "template", "it has no {answer}"),
        ({"template": "{prompt}{answer}", "column": "a"}, "template", "it has no {reference}"),
        ({"template": "{prompt}{answer}", "expected": "a"}, "template", "it has no {reference}"),
        ({"scale": [1, 10]}, "at_least", "the least score that passes: with this scale a number from 1 to 10"),
        ({"scale": [1, 10], "at_least": 11}, "at_least", "from 1 to 10"),
        ({"scale": [2, 2], "at_least": 2}, "scale", "the least and the largest score"),
        ({"scale": [0, 1e10], "at_least": 2}, "scale", "within 1e[+]09"),
        ({"at_least": 0}, "at_least", "without a scale the verdict is yes or no"),
        ({"pattern": "a"}, "pattern", "judge has expected, column, model, template, scale, at_least, max_new_tokens"),
        ({"normalize": True}, "normalize", "leave it out"),
        ({"expected": "a", "column": "b"}, "column", "send one of the two"),
        ({"type": "exact", "expected": "a"}, "model", "a check of type exact has expected, column, normalize: leave"),
        ({"type": "json", "model": None, "at_least": 0}, "at_least", "a check of type json has"),
        ({"type": "json", "model": None, "max_new_tokens": 9}, "max_new_tokens", "a check of type json has"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_by_its_field(check: dict[str, Any], field: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        request({"type": "json", "name": "other"}, {**JUDGE, **check}).work([])
    assert caught.value.field == f"checks.1.{field}"


@pytest.mark.parametrize(
    "check",
    [
        {"scale": [1]},
        {"scale": "yes"},
        {"scale": [float("nan"), 1]},
        {"at_least": float("nan")},
        {"max_new_tokens": 0},
        {"template": "a" * 16_385},
        {"template": "{prompt}{answer}\ud800"},
    ],
)
def test_fields_of_another_form_are_refused(check: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"checks\.0\."):
        request({**JUDGE, **check})


def test_judges_are_what_a_model_would_be_and_their_jobs_come_before(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    tuned = add(store, "tuned", tmp_path)
    adapted = add(store, "adapted", tmp_path, lora=LORA)
    settings = settings.model_copy(update={"trust_remote_code": ("org/judge@abc",)})
    body = request(
        JUDGE,
        {"type": "json"},
        {**JUDGE, "name": "tuned", "model": "job:adapted"},
        {**JUDGE, "name": "again", "model": "job:adapted"},
        model="job:tuned",
    )
    found = bases_of(body, settings, store)
    own = job_spec(
        "e",
        model=str(tuned.checkpoint_dir / "final"),
        made_by=BaseJob(job_uuid="tuned", checkpoint="final"),
    )
    spec = own.changed(work=body.work(found))
    assert isinstance(spec.work, EvaluateSpec)
    assert spec.work.answers is not None
    first, second, third = spec.work.answers.judges
    assert (first.model, first.revision, first.trust_remote_code, first.adapter) == ("org/judge", "abc", True, None)
    assert second == third
    assert (second.model, second.adapter) == (
        adapted.source.model,
        AdapterSpec(
            model=str(adapted.checkpoint_dir / "final"),
            use="continue",
            made_by=BaseJob(job_uuid="adapted", checkpoint="final"),
        ),
    )
    assert [one.job_uuid for one in spec.jobs_read] == ["tuned", "adapted"]
    store.add_job(spec.model_copy(update={"after": ("tuned", "adapted")}), "digest")
    assert store.chains.needed_checkpoints("adapted") == {"final"}
    assert store.chains.needed_checkpoints("tuned") == {"final"}


def test_a_judge_that_cannot_be_used_is_refused_under_its_field(store: Store, settings: Settings) -> None:
    for name, sentence in (("job:typo", "there is no such job"), ("job:e", "own result"), ("job:", "send job:NAME")):
        with pytest.raises(InvalidRequest, match=rf"checks\.1\.model='{name}'.*{sentence}"):
            bases_of(request({"type": "json"}, {**JUDGE, "model": name}), settings, store)
    assert bases_of(request({"type": "json"}), settings, store) == []


def test_references_of_judges_are_texts_and_a_template_may_take_the_rows_own_answer(tmp_path: Path) -> None:
    def read(check: dict[str, Any], row: dict[str, Any]) -> Any:
        blob = put_rows(tmp_path, [{"prompt": "p", "completion": "c"}, row])
        return list(read_checked_rows(blob.path, [AnswerCheck.model_validate({**JUDGE, **check})]))[1].references[0]

    own = {"template": "{prompt}{answer}{reference}"}
    assert read(own, {"prompt": "a", "completion": "b"}) == "b"
    assert read({}, {"prompt": "a"}) is None
    assert read({"expected": "e"}, {"prompt": "a"}) == "e"
    with pytest.raises(InvalidRows, match="row 0: no column 'x'"):
        read({"column": "x"}, {"prompt": "a"})
    for value, text in (("t", "t"), (3.0, "3"), (True, "true"), ({"a": ["ä"]}, '{"a": ["ä"]}')):
        blob = put_rows(tmp_path, [{"prompt": "p", "x": value}])
        (row,) = read_checked_rows(blob.path, [AnswerCheck.model_validate({**JUDGE, "column": "x"})])
        assert row.references == [text]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {
                "prompt": "a",
                "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
            },
            "row 1: its own answer belongs to the prompt 'b', and another column asks 'a'.*they are messages, prompt",
        ),
        ({"question": "a", "answer": "b", "input": "c"}, "row 1: its own answer belongs to the prompt 'a'.*asks 'c'"),
    ],
)
def test_a_row_whose_own_answer_belongs_to_another_prompt_is_refused_by_its_number(
    tmp_path: Path, row: dict[str, Any], sentence: str
) -> None:
    blob = put_rows(tmp_path, [{"prompt": "p", "completion": "c"}, row])
    for check in ({"type": "exact"}, {**JUDGE, "template": "{prompt}{answer}{reference}"}):
        with pytest.raises(InvalidRows, match=sentence):
            list(read_checked_rows(blob.path, [AnswerCheck.model_validate(check)]))
    assert len(list(read_checked_rows(blob.path, [AnswerCheck(type="json")]))) == 2  # whose own answer is not read


SYSTEM, REQUESTED, ANSWERED = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))


@pytest.mark.parametrize("prompt", ["u", [SYSTEM, REQUESTED]])
def test_a_prompt_beside_a_conversation_may_lack_its_system_turn(tmp_path: Path, prompt: Any) -> None:
    blob = put_rows(tmp_path, [{"prompt": prompt, "messages": [SYSTEM, REQUESTED, ANSWERED]}])
    (found,) = read_checked_rows(blob.path, [AnswerCheck(type="exact")])
    assert (found.messages, found.references) == ([SYSTEM, REQUESTED], ["a"])


def test_a_prompt_with_another_system_turn_is_refused_by_the_turns_that_differ(tmp_path: Path) -> None:
    blob = put_rows(
        tmp_path, [{"prompt": [{**SYSTEM, "content": "t"}, REQUESTED], "messages": [SYSTEM, REQUESTED, ANSWERED]}]
    )
    with pytest.raises(InvalidRows, match="belongs to the prompt 's', and another column asks 't'"):
        list(read_checked_rows(blob.path, [AnswerCheck(type="exact")]))


def test_a_dialog_that_ends_in_several_answers_has_one_prompt(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("assistant", "e")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    blob = put_rows(tmp_path, [row])
    (found,) = read_checked_rows(blob.path, [AnswerCheck(type="exact")])
    assert found.references == ["e"]


class Download:
    """A service whose connections break behind so many bytes; None: behind all of them."""

    url = "http://x"

    def __init__(self, content: bytes, *breaks: int | None, etags: Sequence[str] = ()) -> None:
        self.content, self.breaks, self.begins = content, list(breaks), list[int]()
        self.etags, self.sent = list(etags), list[str]()

    @asynccontextmanager
    async def download(
        self, path: str, start: int = 0, etag: str = ""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes], str]]:
        assert path == "/v1/post-training/jobs/e/answers"
        self.sent.append(etag)
        self.begins.append(start)
        end = self.breaks.pop(0)
        begin = 0 if start == 7 else start  # once it begins again, as a service may

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(begin, len(self.content) if end is None else begin + end, 3):
                yield self.content[number : min(number + 3, len(self.content) if end is None else begin + end)]
            if end is not None:
                raise ServiceUnreachable("http://x", "broke off")

        yield begin, pieces(), self.etags.pop(0) if self.etags else '"a"'


def read(service: Download) -> list[bytes]:
    async def lines() -> list[bytes]:
        return [line async for line in answer_lines(service, "e")]  # type: ignore[arg-type]

    return asyncio.run(lines())


def test_answers_are_read_on_over_connections_that_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_PAUSES", (0.0, 0.0))
    content = b"first line\n\nthird\nlast line\n"
    service = Download(content, 7, 12, 0, None)
    assert read(service) == [b"first line", b"", b"third", b"last line"]
    assert service.begins == [0, 7, 12, 12]
    assert service.sent == ["", *['"a"'] * 3]
    with pytest.raises(ServiceUnreachable, match="broke off"):
        read(Download(content, 4, 0, 0, 0))


def test_lines_of_two_files_of_answers_are_never_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_PAUSES", (0.0,))
    service = Download(b"first line\nlast line\n", 12, None, etags=['"a"', '"b"'])
    with pytest.raises(ServiceRefusal, match="have changed while they were read"):
        read(service)
    assert service.sent == ["", '"a"']
