"""The quickstart's scoring and its table of times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs import module_of
from tests.tiny import REPOSITORY

Messages = list[dict[str, str]]

pytest.importorskip("torch", reason="the quickstart's scoring needs torch")


def _example(name: str) -> ModuleType:
    return module_of(REPOSITORY / "examples" / f"{name}.py")


def _prompt(text: str) -> Messages:
    return [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "")  # the module sets them
    module = _example("score")
    yield module
    sys.modules.pop(module.__name__)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_answers_come_in_the_order_of_their_prompts(
    score: ModuleType, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    batches: list[list[Messages]] = []

    def answer_batch(_model: object, _tokenizer: object, prompts: list[Messages]) -> list[str]:
        batches.append(prompts)
        return [f"to {prompt[-1]['content']}" for prompt in prompts]

    monkeypatch.setattr(score, "answer_batch", answer_batch)
    monkeypatch.setattr("torch.set_num_threads", lambda _number: None)
    texts = [f"{index} " + "x" * (37 * index % 11) for index in range(61)]

    assert score.answer(None, None, [_prompt(text) for text in texts], threads) == [f"to {text}" for text in texts]
    assert len(batches) >= threads
    assert all(len(batch) <= score.BATCH_SIZE for batch in batches)


def test_prompts_of_similar_length_share_a_batch(score: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[Messages]] = []
    monkeypatch.setattr(score, "answer_batch", lambda _model, _tokenizer, prompts: batches.append(prompts) or prompts)
    monkeypatch.setattr("torch.set_num_threads", lambda _number: None)

    score.answer(None, None, [_prompt(text) for text in ("xxxx", "x", "yyyy", "y")], threads=2)

    assert sorted(batches, key=str) == [[_prompt("x"), _prompt("y")], [_prompt("xxxx"), _prompt("yyyy")]]


def test_the_times_of_all_phases_are_printed_with_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    phases = _example("quickstart").Phases(["environment=100", "base model=20"])
    with phases.phase("SFT"):
        pass
    phases.report()

    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [["environment", "100"], ["base", "model", "20"], ["SFT", "0"], ["total", "120"]]


def test_a_followed_job_is_a_few_whole_lines_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = _example("quickstart")
    steps = [{"total_steps": 50, "step": step, "percent": 2.0 * step, "loss": 1.0} for step in range(51)]
    found = [{"status": "in_progress", "resources_allocated": {"progress": one}} for one in steps]
    answers = iter([*found, {"status": "completed", "resources_allocated": {"progress": steps[-1]}}])
    stack = quickstart.Stack("http://127.0.0.1:1")
    monkeypatch.setattr(stack, "call", lambda *_, **__: next(answers))
    monkeypatch.setattr(quickstart.time, "sleep", lambda _: None)
    stack._follow("sft-1")
    captured = capsys.readouterr()
    lines = (captured.out + captured.err).splitlines()
    assert "\r" not in captured.out + captured.err
    assert lines[0] == "sft-1  running    0% step 0/50  loss 1.000"
    assert lines[-1] == "sft-1  completed  100% step 50/50  loss 1.000"
    assert len(lines) == 12


def test_the_service_is_asked_for_the_configuration_that_its_status_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quickstart = _example("quickstart")
    losses = [0.693, 0.691, 0.688]

    def call(_: object, method: str, path: str, options: object = None, **given: Any) -> Any:
        if path.endswith("/metrics"):
            return {"data": [{"kind": "train", "metrics": {"loss": loss}} for loss in losses]}
        found: dict[str, Any] = {"progress": {}}
        if given.get("params", {}).get("config") == "true":
            found["effective_config"] = {"recipe": {"effective": {"sharding": {"strategy": "NO_SHARD"}}}}
        return {"status": "completed", "resources_allocated": found}

    for name, fake in (("call", call), ("wait_until_up", lambda *_: None), ("register", lambda *_: 1)):
        monkeypatch.setattr(quickstart.Stack, name, fake)
    monkeypatch.delenv("TRL_NPROC_PER_NODE", raising=False)
    events = [{"type": "progress", "metrics": {"loss": loss}} for loss in losses]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    reference = {"resources_allocated": {"log_path": str(tmp_path / "train.log")}}
    body = {"job_uuid": "dpo", "training_config": quickstart.DPO_TRAINING}
    quickstart.train_on_service("http://127.0.0.1:1", body, {}, reference)
    assert "first 3 steps: 1 process, and 2 ranks (NO_SHARD)" in capsys.readouterr().out
