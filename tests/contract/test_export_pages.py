"""The pages of an export, and of the training that it exports."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.events import CheckpointSaved, Event, Finished, Prepared, Started
from llama_stack_provider_trl.specs.exports import ExportSpec
from llama_stack_provider_trl.specs.promotion import PromotionCondition
from llama_stack_provider_trl.specs.work import ExportWork
from llama_stack_provider_trl_remote.service.pages.export_view import commands
from tests.contract.in_process import InProcess
from tests.fakes import job_spec
from tests.security.in_process_calls import answer_of

pytestmark = pytest.mark.contract
CONDITION = PromotionCondition(evaluation="after", metric="loss", against="before", at_most_change=0.02)
RESULT: dict[str, Any] = {
    "target": "ollama",
    "type": "f16",
    "parameters": 123456,
    "bytes": 3000,
    "adapter_difference": 0.25,
    "read_by": "llama.cpp <b7>",
    "prompts": 5,
    "prompt_tokens": 140,
    "stop_tokens": [{"id": 2, "text": "<|im_end|>"}],
    "logits_bound": 0.01,
    "logits_difference": 0.0021,
    "largest_logits_difference": 0.0123,
    "greedy_tokens": 300,
    "equal_greedy_tokens": 287,
    "differing": [
        {
            "prompt": 3,
            "token": 17,
            "trained": {"id": 5, "text": "<b>", "probability": 0.31, "probability_in_export": 0.3},
            "export": {"id": 6, "text": " cat", "probability": 0.305, "probability_in_export": None},
        }
    ],
    "gates": [{**CONDITION.model_dump(exclude_none=True), "found": 0.52, "before": 0.5}],
    "of_another_release": 7,
}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[InProcess]:
    made = InProcess(tmp_path)
    yield made
    made.service.close()


def add(here: InProcess, name: str, **changes: Any) -> Path:
    """Store a job; returns its checkpoint `final`, which has no files."""
    spec = job_spec(name, checkpoint_dir=here.service.settings.data_dir / "checkpoints" / name, **changes)
    here.service.store.add_job(spec, name)
    return spec.checkpoint_dir / "final"


def complete(here: InProcess, name: str, result: dict[str, Any] | None = None) -> None:
    store, final = here.service.store, here.service.store.get(name).spec.checkpoint_dir / "final"
    final.mkdir(parents=True)
    store.launch(name, 1, "cpu", here.service.settings.data_dir / name)
    counts: dict[str, Any] = {"num_rows": 8, "trainable_parameters": 0, "total_parameters": 1, "effective": {}}
    events: list[Event] = [
        Started(pid=1, device="cpu", versions={}),
        Prepared(total_steps=1, **counts),
        CheckpointSaved(kind="final", step=1, epoch=1, path=final, train_loss=None, verified="logits"),
        Finished(step=1, result=result),
    ]
    assert store.apply_events(name, 1, events, 1)
    assert store.transition(name, 1, JobState.in_progress, JobState.completed)


def text_of(here: InProcess, path: str) -> str:
    answer = asyncio.run(answer_of(here.app, "GET", path, b""))
    assert answer.status == 200, answer.text
    return answer.text


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the page's tables."""
    found = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", row)] for row in found
    ]


def test_the_page_of_an_export_has_its_proof_and_that_of_the_training_leads_to_it(here: InProcess) -> None:
    final = add(here, "tune")
    assert 'id="exports-title"' not in text_of(here, "/jobs/tune")
    made_by = BaseJob(job_uuid="tune", checkpoint="final")
    source: dict[str, Any] = {"model": str(final), "made_by": made_by}
    work = ExportWork(export=ExportSpec(target="ollama"), promote_if=(CONDITION,))
    add(here, "out", **source, work=work, after=("tune",))
    add(here, "next", **source, after=("tune",))
    complete(here, "tune")
    tune = text_of(here, "/jobs/tune")
    assert "trl-remote export tune --to gguf --pull tune-gguf --url http://" in tune
    assert ["out", "ollama", "final", "waiting"] in rows(tune)
    assert '<a href="/jobs/out">out</a>' in tune
    assert not [row for row in rows(tune) if row[0] == "next"]
    waiting = text_of(here, "/jobs/out")
    condition = ["loss of after against before", "", "a change of at most 0.02"]
    assert condition in rows(waiting)
    assert "What was compared" not in waiting
    assert "ollama create" not in waiting

    complete(here, "out", RESULT)
    (final.parents[1] / "out" / "final" / "model.gguf").write_bytes(bytes(2048))
    out = text_of(here, "/jobs/out")
    condition[1] = "0.52 against 0.5"
    assert condition in rows(out)
    for row in (
        ["model.gguf", "2.0 KiB"],
        ["Tokens of 5 prompts", "140 are equal", "all"],
        ["Tokens that end an answer", "&lt;|im_end|&gt; (2)", "equal"],
        ["Logits, median of the worst prompt", "0.0021", "at most 0.01"],
        ["Logits, the worst token", "0.0123", "at most 0.04"],
        ["Equal greedy tokens, up to the first other one", "287 of 300", "all that rounding does not explain"],
        ["What the adapter changes in the logits", "0.25", "more than 0"],
        ["3", "17", "&#39;&lt;b&gt;&#39;: 0.31, 0.3", "&#39; cat&#39;: 0.305, not known"],
        ["of_another_release", "7"],
    ):
        assert row in rows(out)
    assert "trl-remote jobs pull out out --url http://" in out
    assert "cd out &amp;&amp; ollama create out -f Modelfile &amp;&amp; ollama run out" in out
    assert "<b>" not in out + tune
    assert not re.search(r"<script>|<script [^>]*>[^<{\[]|\son\w+=|style=", out)
    add(here, "alone", **source, work=ExportWork(export=ExportSpec(target="lora-gguf")), after=("tune",))
    upload = {"to": "hf://team/alone", "files": 5, "bytes": 3000, "commit": "c0ffee"}
    command = 'llama-server -m "$BASE" --lora adapter.gguf'
    own = {"rank": 4, "alpha": 8, "modules": 2, "change_difference": 0.000002, "command": command, "upload": upload}
    complete(here, "alone", {**RESULT, "target": "lora-gguf", **own})
    alone = text_of(here, "/jobs/alone")
    assert "hf://team/alone: 5 files, commit c0ffee" in alone
    assert "cd alone\nllama-server -m &#34;$BASE&#34; --lora adapter.gguf" in alone
    assert ["Changes of weights, the largest difference", "2e-06", "the rounding of its type"] in rows(alone)
    assert not {"command", "upload", "rank"} & {row[0] for row in rows(alone)}
    add(here, "odd", **source, work=work, after=("tune",))
    complete(here, "odd", {**RESULT, "differing": 5, "logits_bound": "much"})
    odd = rows(text_of(here, "/jobs/odd"))
    assert ["differing", "5"] in odd
    assert ["logits_bound", "much"] in odd
    # A model's own code may report anything, and people copy it into a shell.
    for command in ("vllm serve . && curl http://127.0.0.1:9 | sh", "vllm serve $(id)", "sh", "vllm serve .\nid"):
        assert "vllm" not in " ".join(commands("own", "vllm", "http://h", command))
    assert commands("own", "vllm", "http://h", "vllm serve . --served-model-name 'a b'")[1:] == [
        "cd own",
        "vllm serve . --served-model-name 'a b'",
    ]
    assert ["out", "ollama", "final", "completed"] in rows(text_of(here, "/jobs/tune"))
