"""Graders that ask a model: what it reads, how its reply is read, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Response
from pydantic import TypeAdapter, ValidationError

from llama_stack_provider_trl.errors import InvalidRequest, NotServed
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, refuse_unusable
from llama_stack_provider_trl.specs.grading.asking import Question, Reply, Replying, replying_of
from llama_stack_provider_trl.specs.grading.errors import GradingError
from llama_stack_provider_trl.specs.grading.graders import Grader, asking_of, paths_of
from llama_stack_provider_trl.specs.grading.grading import graded, questions_of
from llama_stack_provider_trl.specs.serving import Answer, AnswerBegun, AnswerEnd, AnswerPart, ServeRequest
from llama_stack_provider_trl.system.offload import CostlyWork, in_work_thread, serving
from llama_stack_provider_trl_remote.openai.graders import with_local_models, with_named_models
from llama_stack_provider_trl_remote.service.http.errors import OpenAIRefused
from llama_stack_provider_trl_remote.service.http.grader_bodies import GraderRunBody
from llama_stack_provider_trl_remote.service.openai_settings import OpenAIModel
from llama_stack_provider_trl_remote.service.routes.graders import run_grader
from llama_stack_provider_trl_remote.service.serving.chats import Chats, unless_left
from llama_stack_provider_trl_remote.service.serving.graders import ask
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.unit.asking_graders import LABEL, SCORE, TEXT

ADAPTER: TypeAdapter[Any] = TypeAdapter(Grader)
ITEM = {"answer": "Paris"}


def given(grader: dict[str, Any], *replies: Reply | GradingError) -> Any:
    parsed = ADAPTER.validate_python(grader)
    return graded(parsed, "Rome", ITEM, dict(zip(asking_of(parsed), replies, strict=True)))


@pytest.mark.parametrize(
    ("changes", "reply", "expected"),
    [
        *[({}, '{"result": 0.25}', 0.25), ({}, '{"result": "0.5"}', 0.5), ({}, "0.75", 0.75), ({}, " **1**.\n", 1.0)],
        *[({}, '{"result": 7}', 1.0), ({}, '{"result": -1e3}', 0.0), ({"range": [-5, 5]}, "-2.5", -2.5)],
        # Of several, the last one; with steps, as OpenAI's models write them; in a block of code.
        ({}, '{"steps": [{"description": "a", "conclusion": "b"}], "result": 0.5}', 0.5),
        ({}, '{"a": {"result": 0.1}} and then {"result": 0.2}', 0.2),
        ({}, '```json\n{"result": 0.5}\n```', 0.5),
        ({}, 'It may be {"result": 1}.</think>{"result": 0}', 0.0),
        *[({}, "It is 1.", None), ({}, '{"result": true}', None), ({}, '{"result": NaN}', None)],
        *[({}, '{"score": 1}', None), ({}, "", None), ({}, '<think>{"result": 1}', None), ({}, "1e999", None)],
    ],
)
def test_a_score_is_the_number_of_the_reply_within_the_range(changes: Any, reply: str, expected: float | None) -> None:
    found = given({**SCORE, **changes}, Reply(reply, True))
    if expected is not None:
        assert (found.reward, found.error) == (expected, None)
        return
    assert (found.reward, found.error.kind) == (0.0, "model_grader_parse_error")
    assert "expected a number, as `result` of JSON or alone" in found.error.sentence


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        *[('{"result": "Good"}', 1.0), ('{"result": "bad"}', 0.0), ("good", 1.0), ('"Bad".', 0.0)],
        *[('{"result": 1}', 1.0), ("1", 1.0), ('{"result": "Good or bad"}', None), ("It is good", None), ("", None)],
    ],
)
def test_a_label_passes_or_not(reply: str, expected: float | None) -> None:
    found = given(LABEL, Reply(reply, True))
    assert (found.reward, found.error is None) == (expected or 0.0, expected is not None)
    assert found.error is None or "expected one of the labels" in found.error.sentence


def test_a_reply_of_true_is_the_label_true() -> None:
    grader = {**LABEL, "labels": ["true", "false"], "passing_labels": ["true"]}
    found = given(grader, Reply('{"result": true}', True))
    assert (found.reward, found.error) == (1.0, None)


def test_models_that_reply_too_late_are_not_waited_for() -> None:
    class Slow:
        async def reply(self, *_: Any) -> Any:
            await asyncio.sleep(60)

    grader, slow = ADAPTER.validate_python(LABEL), cast(Chats, Slow())
    with pytest.raises(NotServed, match=r"took more than 0.01 s \(chat_timeout"):
        asyncio.run(ask(grader, "Rome", ITEM, slow, {}, "a", 0.01))


def test_work_ends_with_its_client() -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    async def at_once() -> None:
        return

    assert asyncio.run(unless_left(forever(), at_once())) is None


def test_graders_that_wait_for_a_thread_are_dropped_with_their_clients() -> None:
    """Each would leave when its turn came, one after the other."""
    body = GraderRunBody.model_validate({"grader": SCORE, "model_sample": "Rome", "item": ITEM})
    work, may_end, caller = CostlyWork(threads=1, per_caller=1), threading.Event(), SimpleNamespace(name="ada")

    async def gone() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def run() -> list[int]:
        with serving(work, "ada"):
            busy = asyncio.ensure_future(in_work_thread(may_end.wait, 30))
            await asyncio.sleep(0)
            request: Any = SimpleNamespace(receive=gone)
            asks = [
                run_grader(ServiceSettings(), cast(Chats, None), body, cast(Any, caller), request) for _ in range(9)
            ]
            try:
                found = await asyncio.wait_for(asyncio.gather(*asks), 10)
            finally:
                may_end.set()
            assert await busy
            return [cast(Response, answer).status_code for answer in found]

    assert asyncio.run(run()) == [499] * 9
    work.close()


def test_a_reply_that_was_cut_off_counts_where_its_json_is_whole() -> None:
    assert given(SCORE, Reply('{"result": 0.5} and', False)).reward == 0.5
    found = given({**SCORE, "sampling_params": {"max_completions_tokens": 4}}, Reply("0.5", False))
    assert found.error.kind == "model_grader_parse_error"
    assert "the model replied '0.5', which ends after 4 tokens" in found.error.sentence


def test_multi_combines_models_with_other_graders() -> None:
    same = {"type": "string_check", "name": "same", "operation": "ne", "input": TEXT, "reference": "{{item.answer}}"}
    both = {
        "type": "multi",
        "name": "all",
        "graders": {"a": SCORE, "b": LABEL, "c": same},
        "calculate_output": "a + b + c",
    }
    found = given(both, Reply("0.5", True), Reply("good", True))
    assert (found.reward, found.scores) == (2.5, {"a": 0.5, "b": 1.0, "c": 1.0})
    found = given(both, GradingError("model_grader_server_error", "it is gone"), Reply("good", True))
    assert (found.reward, found.error.sentence, found.scores) == (0.0, "a: it is gone", {"b": 1.0, "c": 1.0})


class Speaking:
    """Serves a model that writes one text."""

    def __init__(self, text: str, opens_thought: bool) -> None:
        self.messages = [
            AnswerBegun(prompt_tokens=5, opens_thought=opens_thought),
            AnswerPart(text=text),
            AnswerEnd(reason="length", tokens=3),
        ]

    async def find(self, name: str) -> str:
        return name

    @asynccontextmanager
    async def counted(self, caller: str) -> AsyncIterator[None]:
        yield

    async def answer(self, served: Any, request: ServeRequest) -> AsyncGenerator[Answer]:
        for message in self.messages:
            yield message


@pytest.mark.parametrize(
    ("opens", "text", "reward"),
    [
        (True, 'It may be {"result": 1}', None),
        (True, 'Or 1.</think>{"result": 0.5}', 0.5),
        (False, '{"result": 1}', 1.0),
    ],
)
def test_a_call_reads_a_reply_within_the_thought_that_the_prompt_opens_as_a_training_does(
    tmp_path: Path, opens: bool, text: str, reward: float | None
) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu"})
    chats = Chats(settings, Speaking(text, opens), None)  # type: ignore[arg-type]
    reply, tokens = asyncio.run(chats.reply("judge", ServeRequest(prompt="a", seed="0"), "ada"))
    assert (reply, tokens) == (Reply(f"{'<think>' * opens}{text}", False), 8)
    found = given(SCORE, reply)
    assert (None if found.error is not None else found.reward) == reward


def test_a_model_reads_the_messages_and_the_form_of_a_reply() -> None:
    parts = [{"type": "input_text", "text": "{{item.answer}}"}, {"type": "output_text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be {{item.answer}}."}, {"role": "assistant", "content": parts}]
    grader = ADAPTER.validate_python({**SCORE, "input": messages, "range": [0, 10]})
    question = questions_of(grader, "Rome", ITEM)["score"]
    assert isinstance(question, Question)
    assert question.messages == [
        {"role": "system", "content": "Be Paris."},
        {"role": "assistant", "content": "Paris\nb"},
        {
            "role": "user",
            "content": 'Reply with JSON, {"result": NUMBER}, with a number from 0 to 10 in place of NUMBER.',
        },
    ]
    assert paths_of(grader) == [("item", "answer")]
    labelled = questions_of(ADAPTER.validate_python(LABEL), "Rome", ITEM)["label"]
    assert isinstance(labelled, Question)
    assert labelled.messages == [
        {
            "role": "user",
            "content": "Is Rome Paris?\n\n"
            'Reply with JSON, {"result": LABEL}, with one of these in place of LABEL: "Good", "bad", "1".',
        }
    ]
    missing = questions_of(ADAPTER.validate_python(SCORE), "Rome", {})["score"]
    assert isinstance(missing, GradingError)
    assert missing.kind == "invalid_variable_error"


def test_random_numbers_follow_from_the_seed_and_the_question() -> None:
    def seed(text: str, **params: Any) -> str:
        found = questions_of(ADAPTER.validate_python({**SCORE, "sampling_params": params}), text, ITEM)["score"]
        assert isinstance(found, Question)
        return found.seed

    assert seed("a", seed=1) == seed("a", seed=1, temperature=1) != seed("b", seed=1)
    assert seed("a") == seed("a", seed=0) != seed("a", seed=1)
    given = ADAPTER.validate_python({**SCORE, "sampling_params": {"temperature": 0.5, "top_p": 0.9}})
    assert (replying_of(given), replying_of(ADAPTER.validate_python(LABEL))) == (
        Replying(0.5, 0.9, 256),
        Replying(0.0, 1.0, 256),
    )


@pytest.mark.parametrize(
    ("grader", "problem"),
    [
        ({**SCORE, "range": [1, 1]}, "expected the least and the largest score"),
        ({**SCORE, "input": []}, "at least 1 item"),
        ({**SCORE, "input": [{"role": "tool", "content": "a"}]}, "'user', 'assistant', 'system' or 'developer'"),
        ({**SCORE, "input": [{"role": "user", "content": "{{answer}}"}]}, "found {{answer}}, expected"),
        (
            {**SCORE, "input": [{"role": "user", "content": {"type": "input_image", "image_url": "a"}}]},
            "a part has the type 'input_image': the model reads texts",
        ),
        ({**SCORE, "sampling_params": {"top_p": 0.5}}, "temperature 0, at which every token"),
        ({**SCORE, "sampling_params": {"reasoning_effort": "low"}}, "the model thinks as its chat template has it"),
        ({**SCORE, "sampling_params": {"frequency_penalty": 1}}, "Extra inputs"),
        ({**SCORE, "pass_threshold": 0.5}, "Extra inputs"),
        ({**LABEL, "labels": ["a", "A "], "passing_labels": ["a"]}, "'a' is empty, or there twice"),
        ({**LABEL, "passing_labels": ["other"]}, "passing_labels has 'other', expected some of the labels"),
        ({**LABEL, "range": [0, 1]}, "Extra inputs"),
    ],
)
def test_what_is_not_supported_of_model_graders_is_refused_by_name(grader: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ADAPTER.validate_python(grader)
    assert problem in str(refused.value)


def test_an_evaluation_has_judges_in_their_place() -> None:
    check = AnswerCheck.model_validate({"type": "grader", "grader": SCORE})
    with pytest.raises(InvalidRequest, match="an evaluation has checks of type judge") as refused:
        refuse_unusable([check], "checks")
    assert refused.value.field == "checks.0.grader.type"


def test_names_of_openais_models_stand_for_local_ones() -> None:
    models = {"gpt": OpenAIModel(model="/models/a")}
    both = {"type": "multi", "name": "m", "graders": {"a": {**SCORE, "model": "gpt"}, "b": {**LABEL, "model": "ft:j"}}}
    found, named = with_local_models(both, models)
    assert [one["model"] for one in found["graders"].values()] == ["/models/a", "ft:j"]
    assert named == ["gpt", "ft:j"]
    assert with_named_models(found, named) == both
    with pytest.raises(OpenAIRefused, match="name one of gpt, a fine-tuned model") as refused:
        with_local_models({**both, "graders": {"a": {**SCORE, "model": "gpt-9"}}}, models)
    assert (refused.value.param, refused.value.code) == (
        "method.reinforcement.grader.graders.a.model",
        "model_not_found",
    )
    assert with_local_models({"type": "multi", "graders": 3}, models) == ({"type": "multi", "graders": 3}, [])
