"""GRPO whose answers vLLM computes: the correction is TRL's, every step's weights are sent, and it fails as it should.

CI compares two modes of the correction; `TRL_TESTS=full` compares all for 20 steps. Something plays vLLM
(tests/played_vllm); where `TRL_VLLM_PYTHON` names an interpreter with the real one, that reads adapters.
tests/contract/test_vllm_jobs.py has jobs of the service with it.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.memory.trace_cache import trace
from llama_stack_provider_trl.recipes.model.vllm_process import PROGRAM, VllmProcess
from llama_stack_provider_trl.recipes.trainer import vllm_policy
from llama_stack_provider_trl.recipes.trainer.grpo import GrpoRecipe
from llama_stack_provider_trl.recipes.trainer.vllm_policy import ScoredAnswer, VllmPolicy
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Failed, NullEventWriter, Progress, Reason
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec, VllmSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.system.process import VLLM_GPUS, alive, identify
from tests.played_vllm import REAL, played_vllm, saved
from tests.process.grpo_jobs import DIGITS, LETTER, MORE, ROWS, STEPS, given_answers, metric, spec_of, trl_history
from tests.process.waiting import until
from tests.required import FULL, in_full
from tests.tiny import tiny_model
from tests.training import LORA, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(900 if REAL else 300)]
MODES: dict[str, dict[str, Any]] = {
    "sequence_mask": {},
    "token_truncate": {"importance_sampling_clip_max": 1.5, "importance_sampling_clip_min": 0.6},
    "sequence_truncate": {"importance_sampling_clip_max": 2.0},
    "token_mask": {"importance_sampling_clip_min": 0.4},
}
SOME = [*MODES] if FULL else ["sequence_mask", "token_truncate"]
SAMPLING_METRICS = (
    *(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")),
)


def given_log_probs(answers: list[list[int]]) -> list[list[float]]:
    """Log-probabilities that follow from the tokens: about those of an untrained model, some of them unknown."""
    return [
        [math.nan if token % 11 == 0 else -6.9 + (token * 7 % 20 - 10) / 8 for token in answer] for answer in answers
    ]


def give_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs get given answers, four to each prompt, in place of vLLM's."""

    def answer(self: Any, prompts: list[list[int]], *_: Any) -> list[ScoredAnswer]:
        answers = given_answers(prompts[::4], 4)
        return list(map(ScoredAnswer, answers, given_log_probs(answers)))

    monkeypatch.setattr(VllmPolicy, "start", lambda self, model: None)
    monkeypatch.setattr(VllmPolicy, "answer", answer)


@pytest.mark.parametrize("mode", SOME)
def test_the_correction_of_given_log_probabilities_is_that_of_trl_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    vllm = VllmSpec(python=tmp_path, importance_sampling_mode=mode, **MODES[mode])  # type: ignore[arg-type]
    method = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=4, max_completion_length=8, beta=0.2, vllm=vllm)
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: None)
    further = {
        "use_vllm": True,
        **{f"vllm_{name}": value for name, value in vllm.model_dump(exclude={"python", "sync"}).items()},
    }
    expected = trl_history(tmp_path, method, given_log_probs, **further)

    give_answers(monkeypatch)
    spec = spec_of(tmp_path, method, batch_size=1, gradient_accumulation_steps=2, shuffle=False)
    status, events = run(tmp_path, spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert len(expected) == STEPS
    for name in ("loss", "grad_norm", "reward", *SAMPLING_METRICS):
        found = metric(events, name)
        assert found == pytest.approx([entry[name] for entry in expected], rel=1e-4, abs=1e-6), name
    most = vllm.importance_sampling_clip_max  # which has an effect
    found = metric(events, SAMPLING_METRICS[4 if mode.endswith("truncate") else 2])
    assert (most if mode.endswith("truncate") else 0.0) in [pytest.approx(value) for value in found]


def test_without_the_correction_the_loss_is_that_of_answers_of_the_policy_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_answers(monkeypatch)
    norms = {}
    for corrects in (False, True):
        vllm = VllmSpec(python=tmp_path, importance_sampling_correction=corrects)
        method = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=4, max_completion_length=8, vllm=vllm)
        events = run(tmp_path / str(corrects), spec_of(tmp_path / str(corrects), method, rows=ROWS[:4]))[1]
        norms[corrects] = metric(events, "grad_norm")
        assert (SAMPLING_METRICS[0] in of_kind(events, Progress)[0].metrics) is corrects
    plain = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=4, max_completion_length=8)
    monkeypatch.setattr(GrpoRecipe, "answer", lambda self, prompts, rows: given_answers(prompts, 4))
    assert metric(run(tmp_path / "plain", spec_of(tmp_path, plain, rows=ROWS[:4]))[1], "grad_norm") == norms[False]
    assert norms[True] != norms[False] != [0.0] * len(norms[False])


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRL_FAULTS", str(tmp_path))
    return played_vllm(tmp_path)


def plays(root: Path, **played: str) -> None:
    (root / "plays.json").write_text(json.dumps(played))


def job(root: Path, python: Path, **changes: Any) -> JobSpec:
    """4 prompts in each of its steps, in 2 micro batches. So many answers that their rewards differ."""
    some = RewardSource(name="some", check=AnswerCheck(type="regex", pattern="[a-zA-Z]"))
    method = GrpoSpec(rewards=(some,), num_generations=16, max_completion_length=6, vllm=VllmSpec(python=python))
    fields = {"rows": MORE[:4], "n_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 1}
    rate = OptimizerSpec(name="sgd", learning_rate=0.5, scheduler="constant")
    return spec_of(root, method, **{**fields, "optimizer": rate, **changes})


@pytest.mark.parametrize("adapters", [True, *in_full(False)])
def test_each_step_is_answered_by_its_weights_with_adapters_merged(
    tmp_path: Path, python: Path, adapters: bool
) -> None:
    """The process of vLLM reads its weights with torch itself here."""
    from safetensors.torch import load_file

    python = played_vllm(tmp_path, torch=True)
    plays(tmp_path, keep="last.safetensors")
    lora = {"lora": LORA, "merge_adapter": True} if adapters else {}
    status, events = run(tmp_path / "two", job(tmp_path / "two", python, **lora))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    sent = load_file(tmp_path / "last.safetensors")
    one = job(tmp_path / "one", python, n_epochs=1, **lora)
    assert run(tmp_path / "one", one)[0] == 0
    after_one_step = load_file(one.checkpoint_dir / ("merged" if adapters else "final") / "model.safetensors")
    at_first = load_file(tmp_path / "last.safetensors")
    assert sent.keys() == after_one_step.keys()
    assert all(bool((sent[name] == weight).all()) for name, weight in after_one_step.items())
    assert any(bool((sent[name] != weight).any()) for name, weight in at_first.items())
    assert_answered_by_the_policy(events)


def assert_answered_by_the_policy(events: list[Any]) -> None:
    """In each step vLLM has the log-probabilities of training."""
    assert len(of_kind(events, Progress)) >= 2
    assert max(metric(events, SAMPLING_METRICS[1])) < 1e-5
    assert min(metric(events, "grad_norm")) > 0  # so that each step has other weights


ALONE: dict[str, dict[str, Any]] = {
    "every linear layer": {"lora": LORA.model_copy(update={"mlp": True})},
    "rslora": {"lora": LORA.model_copy(update={"use_rslora": True, "rank": 9})},
    "beside its reference": {"beta": 0.1},
}


@pytest.mark.parametrize("name", ["rslora", *in_full("every linear layer", "beside its reference")])
def test_an_adapter_alone_is_sent_and_vllm_has_the_log_probabilities_of_training(tmp_path: Path, name: str) -> None:
    """What plays vLLM reads the files with PEFT: a tensor that is missing, another scale or an adapter of the step
    before has other log-probabilities."""
    plays(tmp_path)
    changes = dict(ALONE[name])
    python = Path(REAL) if REAL else played_vllm(tmp_path, torch=True)
    spec = job(tmp_path, python, lora=changes.pop("lora", LORA), n_epochs=3, max_seq_length=256)
    model = saved(tmp_path / "llama", tied=False) if REAL else spec.source.model
    method = of_adapter(spec).model_copy(update=changes)
    status, events = run(tmp_path / "run", spec.changed(method=method, model=model))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert_answered_by_the_policy(events)
    assert not [*spec.checkpoint_dir.glob("policy-*")]


def of_adapter(spec: JobSpec) -> GrpoSpec:
    assert isinstance(spec.method, GrpoSpec)
    assert spec.method.vllm is not None
    return spec.method.model_copy(update={"vllm": spec.method.vllm.model_copy(update={"sync": "adapter"})})


def test_a_layer_of_the_adapter_that_vllm_has_not_fails_the_job(tmp_path: Path, python: Path) -> None:
    """vLLM itself would answer without it."""
    plays(tmp_path, lack="model.layers.1.self_attn.q_proj")
    spec = job(tmp_path, played_vllm(tmp_path, torch=True), lora=LORA)
    status, events = run(tmp_path / "run", spec.changed(method=of_adapter(spec)))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.invalid_model)
    assert re.search(r"lacks 1 layers .*layers\.1\.self_attn\.q_proj.*vllm_sync", failed.message), failed.message
    assert not [*spec.checkpoint_dir.glob("policy-*")]


def test_an_adapter_that_a_full_disk_does_not_take_leaves_nothing_behind(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plays(tmp_path)
    monkeypatch.setattr(vllm_policy, "save_file", fail)
    spec = job(tmp_path, python, lora=LORA)
    status, events = run(tmp_path / "run", spec.changed(method=of_adapter(spec)))
    (failed,) = of_kind(events, Failed)
    assert status == 1
    assert os.strerror(errno.ENOSPC) in failed.message
    assert spec.checkpoint_dir.is_dir()
    assert not [*spec.checkpoint_dir.glob("policy-*")]


def test_a_job_that_continues_has_the_answers_and_weights_of_an_undisturbed_one(tmp_path: Path, python: Path) -> None:
    spec = job(tmp_path, python, n_epochs=4)
    status, events = run(tmp_path / "whole", spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    final = spec.checkpoint_dir / "final"
    weights = (final / "model.safetensors").read_bytes()
    final.rename(tmp_path / "first-final")
    resumed = run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-2")[1]
    for name in ("loss", "reward", *SAMPLING_METRICS):
        assert metric(resumed, name) == metric(events, name)[2:], name
    assert (final / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("played", "reason", "sentence"),
    [
        (
            {"load": "no such architecture"},
            Reason.invalid_model,
            "ValueError: no such architecture. .*Leave use_vllm out",
        ),
        ({"lack": "lm_head.bias"}, Reason.invalid_model, "1 weights are not among those of the model that trains"),
        (
            {"reload": "CUDA out of memory"},
            Reason.out_of_memory,
            "CUDA out of memory. Lower max_seq_length, raise vllm_gpu.*, lower that where",
        ),
        (
            {"load": "GiB KV cache is needed, which is larger than the available KV cache memory (1 GiB)."},
            Reason.out_of_memory,
            "raise vllm_gpu_memory_utilization where its cache lacks room",
        ),
        ({"answer": "device-side assert"}, Reason.rank_failed, "vLLM: ValueError: device-side assert"),
        ({"kill": "answer"}, Reason.out_of_memory, "vLLM was killed while it answered"),
        ({"kill worker": "load"}, Reason.out_of_memory, "one of its processes was killed, .* Lower max_seq_length"),
    ],
)
def test_vllm_that_fails_fails_the_job_with_one_sentence(
    tmp_path: Path, python: Path, played: dict[str, str], reason: Reason, sentence: str
) -> None:
    plays(tmp_path, **played)
    status, events = run(tmp_path / "run", job(tmp_path / "run", python))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, reason)
    assert re.search(sentence, failed.message), failed.message


@pytest.mark.parametrize("adapters", [False, *in_full(True)])
def test_on_a_gpu_vllm_sleeps_between_its_answers_and_gets_new_weights_when_it_wakes(
    tmp_path: Path, adapters: bool
) -> None:
    """Of adapters the base model is kept while it sleeps: the one that is played compares the level."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    spec = job(tmp_path, played_vllm(tmp_path, torch=adapters), **({"lora": LORA} if adapters else {}))
    method = of_adapter(spec) if adapters else spec.method
    assert isinstance(method, GrpoSpec)
    assert method.vllm is not None
    more = {"most": 6, "at_once": 2, "device": torch.device("cuda"), "writer": NullEventWriter()}
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32")
    if adapters:
        spec.checkpoint_dir.mkdir(parents=True)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    seeds = ["a", "b"]
    with VllmPolicy(spec, method.vllm, method, **more) as vllm:
        vllm.start(model)
        found = [vllm.answer([[5, 6], [7]], seeds, [2], lambda: None) for _ in range(2)]
        assert vllm.answer([], [], [2], lambda: None) == []  # a rank with fillers only
        with torch.no_grad():
            next(weight for weight in model.parameters() if weight.requires_grad).add_(1)
        found.append(vllm.answer([[5, 6], [7]], seeds, [2], lambda: None))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("is_own", "gpus"), [(False, "5,6"), (True, "7,8")])
def test_a_vllm_over_several_gpus_sees_those_of_its_ranks_or_its_own(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool, gpus: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv(VLLM_GPUS, "7,8")
    plays(tmp_path, loads="loads.jsonl")
    settings = {"model": str(tmp_path), "revision": None, "trust_remote_code": False, "dtype": "float32"}
    settings |= {"max_model_len": 8, "max_num_seqs": 1}
    device, more = torch.device("cuda", 1), {"devices": 2, "has_own_devices": is_own}
    process = VllmProcess(python, device, NullEventWriter(), todo="", less="", **more)  # type: ignore[arg-type]
    process.start(settings)
    process.close()
    assert json.loads((tmp_path / "loads.jsonl").read_text())[:2] == [2, gpus]
    monkeypatch.delenv(VLLM_GPUS)
    if is_own:
        with pytest.raises(JobFailure, match="no GPUs are set aside for vLLM"):
            process.start(settings)


def test_without_memory_for_the_weights_that_vllm_gets_no_descriptor_stays_open(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> None:
        opened.append(fd)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    opened: list[int] = []
    monkeypatch.setattr(mmap, "mmap", refuse)
    spec = job(tmp_path, python)
    assert isinstance(spec.method, GrpoSpec)
    assert spec.method.vllm is not None
    more = {"most": 6, "at_once": 2, "device": torch.device("cpu"), "writer": NullEventWriter()}
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(vllm_policy, "WeightGroups", lambda *_: SimpleNamespace(planned=[dict(model.state_dict())]))
    with (
        VllmPolicy(spec, spec.method.vllm, spec.method, **more) as vllm,
        pytest.raises(JobFailure, match=r"cannot be reserved .*leave use_vllm out") as failed,
    ):
        vllm.start(model)
    assert failed.value.reason is Reason.out_of_memory
    (fd,) = opened
    with suppress(FileNotFoundError):  # or it is another file's by now
        assert "weights" not in os.readlink(f"/proc/self/fd/{fd}")


def test_the_memory_check_counts_vllm_beside_the_training(tmp_path: Path, python: Path) -> None:
    with_vllm = job(tmp_path, python)
    assert isinstance(with_vllm.method, GrpoSpec)
    plain = with_vllm.changed(method=with_vllm.method.model_copy(update={"vllm": None}))
    batch = Batch(sequences=16, tokens=64)
    for device, beside, host in (("cpu", 3 << 30, 3 << 30), ("cuda", 768 << 20, 1 << 30)):
        ours, before = estimate(with_vllm, batch, device), estimate(plain, batch, device)
        assert before.vllm == 0
        weights = 4 * (trace(plain, batch, device).trainable)  # in the memory that both have, on a CPU in vLLM, too
        of_device = beside + (2 * weights if device == "cpu" else 0)
        of_machine = host + (2 * weights if device == "cpu" else weights)
        assert ours.total - before.total == ours.vllm == of_device
        assert ours.machine - before.machine == of_machine
        two, alone = (estimate(one.changed(ranks=2), batch, device) for one in (with_vllm, plain))
        # Each rank has a vLLM of its own; the memory with the weights is there once.
        assert two.machine - alone.machine == 2 * of_machine - weights
        # One for both ranks, over two devices, has a process for each, and one more.
        of_one = weights + (3 << 30) + (weights + (4 << 30) if device == "cpu" else 0)
        for mode in ("colocate", "server"):
            vllm = with_vllm.method.vllm.model_copy(update={"mode": mode, "tensor_parallel_size": 2})
            method = with_vllm.method.model_copy(update={"vllm": vllm})
            both = estimate(with_vllm.changed(ranks=2, method=method), batch, device)
            assert both.machine - alone.machine == of_one
            of_gpu = 0 if mode == "server" else beside
            assert both.vllm == (of_gpu if device == "cuda" else weights + (of_one - weights) // 2)
        adapted = with_vllm.changed(lora=LORA, method=of_adapter(with_vllm))
        adapter, alone = (estimate(one, batch, device) for one in (adapted, plain.changed(lora=LORA)))
        assert adapter.vllm == beside + (weights if device == "cpu" else 0)
        # Asleep on a GPU it has the weights in page-locked memory, which may take twice as much.
        assert adapter.machine - alone.machine == host + (weights if device == "cpu" else 2 * weights)


PARENT = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
settings = dict(json.loads(sys.argv[3]))
child.stdin.write((json.dumps(settings) + chr(10)).encode()); child.stdin.flush()
time.sleep(600)
"""


def test_vllm_ends_with_the_process_that_started_it_even_while_it_loads(tmp_path: Path, python: Path) -> None:
    plays(tmp_path, wait="load")
    settings = {"model": str(tmp_path), "revision": None, "trust_remote_code": False, "dtype": "float32"}
    settings |= {"max_model_len": 8, "max_num_seqs": 1, "is_cpu": True, "devices": 1}
    command = [sys.executable, "-c", PARENT, str(python), str(PROGRAM), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = identify(int(parent.stdout.readline()))
        assert child is not None
        assert any("vLLM is at load" in line for line in iter(parent.stderr.readline, ""))
        assert alive(child)
        parent.kill()
    until(lambda: not alive(child))
