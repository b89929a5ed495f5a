"""The inline provider inside Llama Stack under the tricks that the service withstands: sentences, and a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.stack import DPO, SFT, LlamaStack, poll, serving
from tests.security import held_calls
from tests.security.bad_names import BAD
from tests.security.harmful_text import HARMFUL

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

OURS = (
    *("jobs.sqlite3", "jobs.sqlite3-wal", "jobs", "datasets", "logs", "checkpoints", "tokens", "reference"),
    *("audit", "sessions.json", "trackers", "supervisor.lock"),
)
"""Names of our own files and directories in a data directory."""


class Holding(LlamaStack):
    """A Llama Stack in which a test can hold what requests order."""

    programs = (*LlamaStack.programs, Path(held_calls.__file__))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaStack]:
    with serving(Holding(tmp_path_factory.mktemp("tricked"))) as stack:
        stack.register("tricks-questions", QUESTIONS)
        stack.register("tricks-pairs", PAIRS)
        yield stack
        assert not _tracebacks_of_ours(stack.log)


def _tracebacks_of_ours(log: Path) -> list[str]:
    """Errors in the log that our code has raised and did not mean for a client."""
    blocks = log.read_text(errors="replace").split("Traceback")[1:]
    # An error that is the cause of a refusal is logged before it.
    meant = (
        "The above exception was the direct cause",
        "InvalidRequest",
        "InvalidRows",
        "JobNotFound",
        "JobConflict",
        "_JobNotFound",
        "_JobConflict",
        "LimitReached",
    )
    # Lines of the log that follow a traceback name our modules, too.
    ours = (" ".join(block.split()) for block in blocks if re.search(r'File "[^"]*/llama_stack_provider_trl', block))
    return [text[:6000] for text in ours if not any(word in text for word in meant)]


def answers_others(stack: LlamaStack) -> None:
    assert stack.get("/health").status_code == 200
    assert stack.get("/post-training/jobs").status_code == 200


def submitted(stack: LlamaStack, path: str, body: Any) -> requests.Response:
    """The answer to a job of which a part is costly to check: others are answered while that part is held."""
    stack.arm(held_calls.POINT, "hold")
    with ThreadPoolExecutor(1) as threads:
        try:
            costly = threads.submit(requests.post, f"{stack.url}/v1{path}", json=body, timeout=120)
            poll(lambda: stack.taken(held_calls.POINT) or costly.done(), "the costly part begins", timeout=60)
            answers_others(stack)
            assert not costly.done(), f"nothing of it was held: {costly.result().text[:500]}"
        finally:
            stack.go(held_calls.POINT)
        answer = costly.result()
    answers_others(stack)
    return answer


def sentence(answer: requests.Response) -> str:
    """The text of a refusal of ours."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert len(answer.text) > 20, answer.text
    return answer.text


FIELDS = (
    *("job_uuid", "model", "checkpoint_dir"),
    *("training_config.dtype", "training_config.data_config.dataset_id", "logger_config.KEY"),
    *("training_config.data_config.validation_dataset_id", "algorithm_config.type"),
)
OPTIONS: dict[str, Any] = {
    "resume_from": "BAD",
    "device": "BAD",
    "after": ["BAD"],
    "reference_model": "BAD",
    "best_checkpoint": "BAD",
    "early_stopping": {"patience": 1, "metric": "BAD"},
    "resources": {"labels": {"BAD": "x"}},
    "method": {"type": "BAD"},
    "lora": {"type": "LoRA", "lora_attn_modules": ["BAD"]},
}


def _with(body: dict[str, Any], path: str, value: str) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    if first == "KEY":
        return {value: True}
    return {**body, first: _with(body.get(first) or {}, rest, value) if rest else value}


def test_names_that_are_not_printed_are_refused_by_name(stack: LlamaStack) -> None:
    wrong = []
    for path in FIELDS:
        for kind, value in BAD.items():
            answer = stack.post(SFT, _with(sft("tricked", "tricks-questions"), path, value))
            name = path.removesuffix(".KEY").rpartition(".")[2]
            if not 400 <= answer.status_code < 500 or name not in answer.text or HARMFUL.search(answer.text):
                wrong.append(f"{path}, {kind}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join(wrong)
    answers_others(stack)


def test_options_that_are_not_printed_are_refused_by_name(stack: LlamaStack) -> None:
    wrong = []
    for name, template in OPTIONS.items():
        for kind, value in BAD.items():
            bad = json.loads(json.dumps(template).replace("BAD", json.dumps(value)[1:-1]))
            body = (
                promised("tricked", "tricks-pairs")
                if name in ("method", "lora")
                else sft("tricked", "tricks-questions")
            )
            answer = stack.post(DPO if name in ("method", "lora") else SFT, body, options={name: bad})
            if not 400 <= answer.status_code < 500 or name not in answer.text:
                wrong.append(f"{name}, {kind}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join(wrong)


HEADERS = {
    "deep lists": '{"trl": ' + "[" * 20_000 + "]" * 20_000 + "}",
    "deep objects": '{"trl": ' + '{"a": ' * 8_000 + "1" + "}" * 8_000 + "}",
    "deep blocks": '{"trl": {"resources": ' + '{"labels": ' * 500 + "1" + "}" * 501 + "}",
    **{
        f"{depth} lists in {name}": f'{{"trl": {{"{name}": ' + "[" * depth + "]" * depth + "}}"
        for depth in (100, 700, 900)
        for name in ("seed", "after", "evaluate", "method")
    },
    "no object": '{"trl": [1, 2]}',
    "a number": '{"trl": 7}',
    "infinity": '{"trl": {"max_grad_norm": 1e999}}',
    "NaN": '{"trl": {"max_grad_norm": NaN}}',
    "a long integer": '{"trl": {"seed": ' + "9" * 5000 + "}}",
    "half a surrogate pair": '{"trl": {"device": "\\ud800"}}',
    "control characters": '{"trl": {"\\u001b[2J": 1}}',
    "a long key": '{"trl": {"' + "k" * 30_000 + '": 1}}',
}


TOO_DEEP_FOR_LLAMA_STACK = ("deep lists", "deep objects")


@pytest.mark.parametrize("name", HEADERS)
def test_options_of_any_form_are_one_sentence(stack: LlamaStack, name: str) -> None:
    answer = requests.post(
        f"{stack.url}/v1{SFT}",
        json=sft(f"options-{name.replace(' ', '-')}", "tricks-questions"),
        headers={"X-LlamaStack-Provider-Data": HEADERS[name]},
        timeout=60,
    )
    answers_others(stack)
    if answer.status_code == 500:
        # Llama Stack reads the header itself, and has no sentence for what is deeper than Python's stack.
        assert name in TOO_DEEP_FOR_LLAMA_STACK
        return
    sentence(answer)
    assert not HARMFUL.search(answer.text)


@pytest.mark.parametrize("name", OURS)
def test_jobs_named_like_our_own_files_leave_them_alone(stack: LlamaStack, name: str) -> None:
    """What the data directory is made of stays what it is, whatever a job and its directory are called."""
    before = {path.name: path.is_dir() for path in stack.data_dir.iterdir()}
    for place in (name, f"{name}/x", f"../{name}", f"./{name}/../{name}", str(stack.data_dir / name)):
        body = {**sft(name, "tricks-questions"), "checkpoint_dir": place}
        answer = stack.post(SFT, body, options={"max_duration": 1})
        if answer.status_code == 200:
            stack.post("/post-training/job/cancel?job_uuid=" + name, {"job_uuid": name})
        else:
            sentence(answer)
        assert stack.get("/post-training/jobs").status_code == 200
    after = {path.name: path.is_dir() for path in stack.data_dir.iterdir()}
    assert before.items() <= after.items()


def test_directories_outside_are_refused(stack: LlamaStack) -> None:
    for place in (
        "/etc",
        "..",
        "../../x",
        "/",
        "~",
        "a/../../../b",
        "/proc/self/cwd",
        "x" * 5000,
        "a//b/../../..",
    ):
        answer = stack.post(SFT, {**sft("outside", "tricks-questions"), "checkpoint_dir": place})
        assert answer.status_code != 200, place
        assert "checkpoint_dir" in sentence(answer), place


ROWS: dict[str, Any] = {
    "many empty objects": [{"prompt": "a", "completion": "b", "more": [{} for _ in range(300_000)]}],
    "a long text": [{"prompt": "a" * 20_000_000, "completion": "b"}],
    "control characters": [{"prompt\x1b[2J": "a"}],
    "no text": [{"prompt": 1, "completion": [None]}],
    "deep": None,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_any_form_are_taken_or_refused_while_others_are_answered(stack: LlamaStack, name: str) -> None:
    dataset_id = f"tricks-{name.replace(' ', '-')}"
    body: Any = {
        "dataset_id": dataset_id,
        "purpose": "post-training/messages",
        "source": {"type": "rows", "rows": ROWS[name]},
    }
    text = json.dumps(body)
    if name == "deep":
        deep = '{"prompt": "a", "completion": "b", "more": ' + "[" * 900 + "]" * 900 + "}"
        text = text.replace('"rows": null', f'"rows": [{deep}]')
    answer = requests.post(
        f"{stack.url}/v1/datasets", data=text, headers={"Content-Type": "application/json"}, timeout=120
    )
    if answer.status_code >= 400:
        return  # Llama Stack itself refuses them
    found = submitted(stack, SFT, sft(dataset_id, dataset_id))
    if found.status_code == 200:
        stack.post(f"/post-training/job/cancel?job_uuid={dataset_id}", {"job_uuid": dataset_id})
    else:
        assert not HARMFUL.search(sentence(found))


PATTERNS = ("(a+)+$", "(?R)?", "(a|a?)+b", "x" * 4000 + "(", "(?:a{1,99}){1,99}", "\\p{L}{1,9999}{1,9999}")


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_others_are_answered_while_costly_patterns_of_rewards_are_checked(stack: LlamaStack, number: int) -> None:
    stack.register("tricks-answers", [{"prompt": "a", "answer": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}])
    rewards = [{"check": {"type": "regex", "pattern": PATTERNS[number]}}]
    name = f"pattern-{number}"
    body = {**promised(name, "tricks-answers"), "algorithm_config": {"type": "grpo", "rewards": rewards}}
    answer = submitted(stack, DPO, body)
    if answer.status_code == 200:
        stack.post(f"/post-training/job/cancel?job_uuid={name}", {"job_uuid": name})
    else:
        sentence(answer)


def test_names_in_the_calls_that_ask_for_jobs_are_one_sentence(stack: LlamaStack) -> None:
    for value in (*BAD.values(), "../../etc/passwd", "%2e%2e", "a/b", "", " "):
        if "\ud800" in value:
            continue  # no URL has it
        for call in ("status", "artifacts"):
            answer = stack.get(f"/post-training/job/{call}", job_uuid=value)
            assert 400 <= answer.status_code < 500, (value[:20], answer.text)
        answer = stack.post("/post-training/job/cancel", {"job_uuid": value})
        assert 400 <= answer.status_code < 500, (value[:20], answer.text)
