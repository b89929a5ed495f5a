"""OpenAI's calls on graders, by its own client: rewards, errors, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.service import TrainingService, running_service
from tests.judges import saying
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]
SAME = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{sample.output_json.city}}",
    "reference": "{{item.answer}}",
}
CLOSE = {
    "type": "text_similarity",
    "name": "close",
    "evaluation_metric": "rouge_1",
    "input": "{{sample.output_text}}",
    "reference": "city {{item.answer}}",
}


def python(body: str) -> dict[str, Any]:
    return {"type": "python", "name": "own", "source": f"def grade(sample, item):\n    {body}\n"}


SCORE = {
    "type": "score_model",
    "name": "score",
    "model": "judge",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Is {{sample.output_text}} right?"}]}],
    "sampling_params": {"max_completions_tokens": 8},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("graders")
    models = {"judge": {"model": str(saying(root / "judge", "1"))}, "plain": {"model": str(tiny_model())}}
    with running_service(root, python_graders=True, openai={"models": models}) as service:
        yield service


@pytest.fixture
def graders(service: TrainingService) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{service.url}/openai/v1", api_key="none", max_retries=0) as client:
        yield client.fine_tuning.alpha.graders


def test_openais_own_client_runs_graders(graders: Any) -> None:
    both = {
        "type": "multi",
        "name": "both",
        "graders": {"same": SAME, "close": CLOSE, "own": python("return len(item['answer']) / 10")},
        "calculate_output": "0.5 * same + 0.25 * close + own",
    }
    found = graders.run(grader=both, model_sample='{"city": "Paris"}', item={"answer": "Paris"})
    assert found.reward == pytest.approx(1.25)
    assert found.sub_rewards == found.metadata.scores == {"same": 1.0, "close": 1.0, "own": 0.5}
    assert (found.metadata.name, found.metadata.type, found.metadata.execution_time > 0) == ("both", "multi", True)
    assert not any(value for value in found.metadata.errors.to_dict().values())
    assert type(found).model_validate(found.to_dict(), strict=True)  # the client itself accepts anything
    assert graders.validate(grader=SAME).grader.to_dict() == SAME


@pytest.mark.parametrize(
    ("grader", "error", "details"),
    [
        (SAME, "sample_parse_error", ""),
        ({**SAME, "input": "{{item.other}}"}, "invalid_variable_error", ""),
        (python("return 1 / 0"), "python_grader_runtime_error", "own: line 2: ZeroDivisionError: division by zero"),
        (
            python("return open('/etc/hostname')"),
            "python_grader_runtime_error",
            "own: line 2: PermissionError: [Errno 1] Operation not permitted: '/etc/hostname'",
        ),
        (
            python("return ['a' * 10**6 for _ in range(10**6)]"),
            "python_grader_runtime_error",
            "own: it takes more than 5 s or 512 MiB, or has crashed",
        ),
        (
            {"type": "multi", "name": "m", "graders": {"a": CLOSE}, "calculate_output": "1 / (a - a)"},
            "formula_parse_error",
            "",
        ),
    ],
)
def test_what_goes_wrong_with_an_answer_is_a_reward_of_0(graders: Any, grader: Any, error: str, details: str) -> None:
    found = graders.run(grader=grader, model_sample="Rome", item={"answer": "Paris"})
    errors = found.metadata.errors.to_dict()
    assert (found.reward, [name for name, value in errors.items() if value is True]) == (0.0, [error])
    assert errors[f"{error}_details"] == details if details else True


@pytest.mark.parametrize(
    ("grader", "sentence"),
    [
        ({**SCORE, "input": []}, "at least 1 item"),
        ({**SCORE, "model": "ft:gone"}, "gone"),
        ({**SCORE, "model": "/gone"}, "or name a model id; names of openai.models"),
        (
            {"type": "multi", "name": "m", "graders": {"a": {**SCORE, "model": "/gone"}}, "calculate_output": "a"},
            "a.model",
        ),
        ({**CLOSE, "evaluation_metric": "cosine"}, "the metric cosine needs an embedding model"),
        (python("return ("), "line 2: '(' was never closed"),
        ({**SAME, "input": "{{answer}}"}, "found {{answer}}, expected"),
        ({"type": "multi", "name": "m", "graders": {"a": SAME}, "calculate_output": "b"}, "it names 'b'"),
    ],
)
def test_a_grader_that_cannot_be_used_is_refused(graders: Any, grader: Any, sentence: str) -> None:
    from openai import BadRequestError

    for call in (graders.validate, lambda grader: graders.run(grader=grader, model_sample="a")):
        with pytest.raises(BadRequestError) as refused:
            call(grader=grader)
        assert sentence in refused.value.message


def test_a_model_grades_an_answer(graders: Any) -> None:
    """By the process that answers chats."""
    found = graders.run(grader={**SCORE, "range": [-1, 0.5]}, model_sample="Rome", item={})
    assert (found.reward, found.metadata.scores) == (0.5, {"score": 0.5})  # of 1, which is beyond the range
    assert not any(value for value in found.metadata.errors.to_dict().values())
    assert found.metadata.sampled_model_name == "judge"
    assert found.model_grader_token_usage_per_model == {"judge": found.metadata.token_usage}
    assert found.metadata.token_usage > 20
    assert type(found).model_validate(found.to_dict(), strict=True)
    label = {"type": "label_model", "name": "l", "model": "judge", "labels": ["0", "1"], "passing_labels": ["1"]}
    both = {
        "type": "multi",
        "name": "both",
        "graders": {"score": SCORE, "label": {**label, "input": SCORE["input"]}},
        "calculate_output": "score + 2 * label",
    }
    found = graders.run(grader=both, model_sample="Rome")
    assert (found.reward, found.sub_rewards) == (3.0, {"score": 1.0, "label": 1.0})
    assert graders.validate(grader=SCORE).grader.to_dict() == SCORE


def test_a_reply_without_a_number_and_a_question_without_room_are_errors(graders: Any) -> None:
    for changes, error in (
        ({"model": "plain"}, "model_grader_parse_error"),
        ({"sampling_params": {"max_completions_tokens": 10**5}}, "model_grader_server_error"),
        ({"input": [{"role": "user", "content": "{{item.gone}}"}]}, "invalid_variable_error"),
    ):
        found = graders.run(grader={**SCORE, **changes}, model_sample="Rome", item={})
        errors = found.metadata.errors.to_dict()
        assert (found.reward, [name for name, value in errors.items() if value is True]) == (0.0, [error])
    assert (
        "positions"
        in graders.run(
            grader={**SCORE, "sampling_params": {"max_completions_tokens": 10**5}}, model_sample="a"
        ).metadata.errors.model_grader_server_error_details
    )
