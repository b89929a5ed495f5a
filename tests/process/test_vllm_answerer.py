"""What a job and the process of its vLLM exchange, and how it ends where that fails."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import InvalidRequest, JobFailure
from llama_stack_provider_trl.launch.interpreter import check_vllm
from llama_stack_provider_trl.recipes.answers.by_transformers import TransformersAnswerer
from llama_stack_provider_trl.recipes.answers.by_vllm import VllmAnswerer
from llama_stack_provider_trl.recipes.model import vllm_process
from llama_stack_provider_trl.specs.events import NullEventWriter, Reason
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.work import Answering
from tests.played_vllm import played_vllm
from tests.tiny import tiny_model

pytestmark = pytest.mark.process
PROMPTS = [[5, 6, 7], [9]]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRL_FAULTS", str(tmp_path))
    return played_vllm(tmp_path)


OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
)


def answerer_of(root: Path, python: Path, model: Path | None = None, batch: int = 4, **changes: Any) -> VllmAnswerer:
    rows = DatasetRef(dataset_id="r", path=root / "r", sha256="", num_rows=3)
    spec = JobSpec.of(
        **{"job_uuid": "g", "model": str(model or tiny_model()), "output_name": "g"},
        **{"checkpoint_dir": root, "dataset": rows, "n_epochs": 1, "batch_size": 4, "dtype": "fp32"},
        optimizer=OptimizerSpec(learning_rate=1e-3),
    )
    work = {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1, **changes}
    answering = Answering.model_validate({**work, "engine": "vllm", "vllm_python": python})
    return VllmAnswerer(spec, answering, torch.device("cpu"), batch, NullEventWriter())


def plays(root: Path, **wrong: str) -> None:
    (root / "plays.json").write_text(json.dumps(wrong))


def test_a_batch_is_answered_in_its_order_with_a_seed_of_its_own_for_each(tmp_path: Path, python: Path) -> None:
    advanced = 0

    def on_token() -> None:
        nonlocal advanced
        advanced += 1

    with answerer_of(tmp_path, python) as answerer:
        answerer.prepare(PROMPTS)
        found = [
            answerer.answer(PROMPTS, [random.Random(text) for text in seeds], on_token) for seeds in ("ab", "ab", "xb")
        ]
        assert answerer.answer([], [], on_token) == []
    assert found[0] == found[1]
    assert (found[2][0] != found[0][0], found[2][1] == found[0][1]) == (True, True)
    assert [(answer.tokens, answer.complete) for answer in found[0]] == [(6, True)] * 2
    assert advanced >= 3
    with answerer_of(tmp_path, python, temperature=0.0) as greedy:
        greedy.prepare(PROMPTS)
        ids = [3 + (sum(PROMPTS[1]) + number) % 256 for number in range(5)]
        (_, answer) = greedy.answer(PROMPTS, [random.Random("a")] * 2, on_token)
        assert answer.text == greedy.tokenizer.decode(ids)


def test_answers_end_where_those_of_transformers_do_without_a_generation_configuration(
    tmp_path: Path, python: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 77]}))
    with answerer_of(tmp_path, python, model) as answerer:
        plain = TransformersAnswerer(answerer.spec, answerer.work, torch.device("cpu"))
        assert answerer.ends == plain.ends
        assert 77 in answerer.ends


@pytest.mark.parametrize(
    ("wrong", "reason", "sentence"),
    [
        ({"load": "no such\narchitecture"}, Reason.invalid_model, "ValueError: no such architecture. .*transformers"),
        ({"load": "CUDA out of memory. Tried"}, Reason.out_of_memory, "out of memory. Tried. Use fewer prompts"),
        ({"kill": "load"}, Reason.out_of_memory, "vLLM was killed while it loaded the model"),
    ],
)
def test_a_model_that_vllm_cannot_load_fails_the_job_with_one_sentence(
    tmp_path: Path, python: Path, wrong: dict[str, str], reason: Reason, sentence: str
) -> None:
    plays(tmp_path, **wrong)
    with answerer_of(tmp_path, python) as answerer, pytest.raises(JobFailure, match=sentence) as failed:
        answerer.prepare(PROMPTS)
    assert failed.value.reason is reason


def test_vllm_that_fails_at_an_answer_fails_the_attempt(tmp_path: Path, python: Path) -> None:
    for wrong, kind, sentence in (
        ({"answer": "device-side assert"}, RuntimeError, "vLLM: ValueError: device-side assert"),
        ({"answer": "out of memory"}, JobFailure, "Use fewer prompts per batch_size"),
        ({"kill": "answer"}, JobFailure, "vLLM was killed while it answered"),
    ):
        plays(tmp_path, **wrong)
        with answerer_of(tmp_path, python) as answerer:
            answerer.prepare(PROMPTS)
            with pytest.raises(kind, match=sentence):
                answerer.answer(PROMPTS, [random.Random("a")] * 2, lambda: None)


def test_a_batch_may_be_larger_than_what_vllm_has_in_progress(tmp_path: Path, python: Path) -> None:
    with answerer_of(tmp_path, python, batch=5000) as answerer:
        answerer.prepare(PROMPTS)
        assert len(answerer.answer(PROMPTS * 2500, [random.Random("a")] * 5000, lambda: None)) == 5000


def test_vllm_gets_neither_the_modules_of_our_own_interpreter_nor_the_ranks_of_torchrun(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    wrapper = tmp_path / "observed"
    wrapper.write_text(f'#!/bin/sh\nenv >> {seen}\nunset PYTHONHOME\nexec {python} "$@"\n')
    wrapper.chmod(0o755)
    for name in ("PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(name, "/ours")
    assert check_vllm(wrapper) == "vllm 0.1"
    for name in OF_TORCHRUN:
        monkeypatch.setenv(name, "True")
    with answerer_of(tmp_path, wrapper) as answerer:
        answerer.prepare(PROMPTS)
    names = [line.partition("=")[0] for line in seen.read_text().splitlines()]
    assert names.count("TRL_FAULTS") == 2
    assert not {"PYTHONPATH", "PYTHONHOME", *OF_TORCHRUN} & {*names}


def test_vllm_that_closes_its_output_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is not awaited without a limit."""
    monkeypatch.setattr(vllm_process, "_END_SECONDS", 0.0)
    wrapper = tmp_path / "closed"
    wrapper.write_text("#!/bin/sh\nexec sleep 600 >&-\n")
    wrapper.chmod(0o755)
    with answerer_of(tmp_path, wrapper) as answerer:
        with pytest.raises(RuntimeError, match="vLLM has closed its output while it loaded the model"):
            answerer.prepare(PROMPTS)
        child = answerer._vllm._child
    assert child is not None
    assert child.wait(60) == -9


def test_vllm_that_is_killed_within_a_message_is_reported_as_killed(tmp_path: Path) -> None:
    """A pipe takes a part of a long line at a time."""
    wrapper = tmp_path / "killed"
    wrapper.write_text("#!/bin/sh\nread settings\nprintf '{\"ready\": tr'\nkill -9 $$\n")
    wrapper.chmod(0o755)
    with answerer_of(tmp_path, wrapper) as answerer, pytest.raises(JobFailure, match="vLLM was killed") as failed:
        answerer.prepare(PROMPTS)
    assert failed.value.reason is Reason.out_of_memory


def test_vllm_ends_by_itself_where_another_process_still_has_its_pipe(tmp_path: Path, python: Path) -> None:
    """As a loader worker has it, which is forked: vLLM gets no end of file."""
    with answerer_of(tmp_path, python) as answerer:
        answerer.prepare(PROMPTS)
        child = answerer._vllm._child
        assert child is not None
        assert child.stdin is not None
        worker = subprocess.Popen(["sleep", "600"], pass_fds=[child.stdin.fileno()])
    with worker:
        worker.kill()
    assert child.returncode == 0


def test_the_release_of_vllm_is_found_under_another_name_too(tmp_path: Path, python: Path) -> None:
    assert check_vllm(python) == "vllm 0.1"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    own = tmp_path / "quick_llm-2.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: quick-llm\nVersion: 2.0\n")
    (own / "top_level.txt").write_text("vllm\n")
    renamed = tmp_path / "renamed"
    renamed.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    renamed.chmod(0o755)
    assert check_vllm(renamed) == "vllm 2.0"


def test_an_interpreter_without_vllm_is_refused_by_name(tmp_path: Path, python: Path) -> None:
    assert check_vllm(None) == ""
    empty = tmp_path / "empty"
    empty.write_text("#!/bin/sh\necho '\"\"'\n")
    for program, sentence in (
        (tmp_path / "none", "cannot be started"),
        (Path("/bin/echo"), "is not a working Python"),
        (empty, "has no vllm"),
    ):
        empty.chmod(0o755)
        with pytest.raises(InvalidRequest, match=f"vllm_python=.*{sentence}.*pip install vllm"):
            check_vllm(program)
    with answerer_of(tmp_path, tmp_path / "none") as gone, pytest.raises(JobFailure, match="correct vllm_python"):
        gone.prepare(PROMPTS)
