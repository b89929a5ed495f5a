"""Distillation: its losses are those of TRL's own trainer on given answers; it learns, resumes and fails as it should.

CI compares one divergence for 20 steps and the others in few; `TRL_TESTS=full` compares every one for 20 steps.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.checkpoint.step import Saver
from llama_stack_provider_trl.recipes.fast.support import with_batches
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.memory.trace_cache import trace
from llama_stack_provider_trl.recipes.model.generation import Sampler
from llama_stack_provider_trl.recipes.trainer.distillation import DistillationRecipe
from llama_stack_provider_trl.recipes.trainer.trl_patches import computing_heads
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress, RolledOut
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import DistillationSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from tests.process.distillation_jobs import (
    MORE,
    answered,
    built,
    ended,
    held,
    loaded,
    method_of,
    rows_of,
    spec_of,
    teacher_model,
)
from tests.process.grpo_jobs import answering_arguments, given_answers, metric
from tests.process.peaks import most
from tests.required import FULL, in_full
from tests.tiny import tiny_model
from tests.training import LORA, job_spec, of_kind, reference_to, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
CASES: dict[str, dict[str, Any]] = {
    "reverse": {},
    "forward": {"beta": 0.0, "temperature": 0.7},
    "between": {"beta": 0.4, "temperature": 1.3},
}


def steps_of(name: str) -> int:
    return 20 if FULL or name == "reverse" else 4


def trl_history(root: Path, method: DistillationSpec, rows: list[dict[str, str]]) -> list[dict[str, float]]:
    """What TRL's own trainer reports of the same rows and answers, in order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    class Given(DistillationTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return given_answers(prompt_ids, 1)

    arguments = DistillationConfig(
        **answering_arguments(root, per_device_train_batch_size=1, learning_rate=0.5),
        max_completion_length=method.max_completion_length,
        temperature=method.temperature,
        beta=method.beta,
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32"),
        teacher_model=AutoModelForCausalLM.from_pretrained(method.teacher.model, dtype="float32"),
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["reverse", "between", *in_full("forward")])
def test_given_answers_have_the_losses_of_trl_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows = rows_of(steps_of(name))
    method = method_of(teacher_model(tmp_path / "teacher"), **CASES[name])
    expected = trl_history(tmp_path, method, rows)
    monkeypatch.setattr(DistillationRecipe, "answer", lambda self, prompts, rows: given_answers(prompts, 1))
    spec = spec_of(tmp_path, method, rows, batch_size=1, gradient_accumulation_steps=2, shuffle=False)
    events = ended(*run(tmp_path, spec))
    assert len(expected) == steps_of(name)
    # TRL's `entropy` is a mean of the micro batches' means.
    for metric_name in ("loss", "grad_norm", "completions/mean_length"):
        found = metric(events, metric_name)
        assert found == pytest.approx([entry[metric_name] for entry in expected], rel=1e-4, abs=1e-6), metric_name
    losses = metric(events, "loss")
    assert min(losses) > 0.01
    assert max(losses) - min(losses) > 1e-3


def learning(root: Path, teacher: Path, **changes: Any) -> JobSpec:
    fields = {"n_epochs": 5, "optimizer": OptimizerSpec(learning_rate=1e-2), "save_steps": 10}
    return spec_of(root, method_of(teacher), MORE, **{**fields, **changes})


def test_20_steps_lower_the_divergence_and_a_job_that_continues_gives_the_same_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = learning(tmp_path, teacher_model(tmp_path / "teacher", is_constant=True))
    events = ended(*run(tmp_path, spec, estimates=True))
    losses = metric(events, "loss")
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    names = {"entropy", "completions/mean_length", "completions/clipped_ratio"}
    assert names <= of_kind(events, Progress)[0].metrics.keys()
    rollouts = [one.model_copy(update={"time": 0.0}) for one in of_kind(events, RolledOut)]
    assert [one.step for one in rollouts] == [*range(1, 21)]
    for one in rollouts:
        assert [(turn.role, turn.content) for turn in one.prompt] == [("user", MORE[one.row]["prompt"])]
        (answer,) = one.answers
        assert (0 < answer.tokens <= 8, answer.reward, answer.advantage, answer.rewards) == (True, None, None, {})
    effective = of_kind(events, Prepared)[0].effective
    assert effective["padding_free"] == "not used: it trains on answers that differ in each step"
    assert effective["memory"]["fits"]
    assert effective["memory"]["reference_bytes"] > 0
    final = spec.checkpoint_dir / "final"
    assert AutoModelForCausalLM.from_pretrained(final).config.model_type == "llama"
    weights = (final / "model.safetensors").read_bytes()
    final.rename(tmp_path / "first-final")
    resumed = ended(*run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-10"))
    for name in ("loss", "entropy", "completions/mean_length"):
        assert metric(resumed, name) == metric(events, name)[10:], name
    assert [one.model_copy(update={"time": 0.0}) for one in of_kind(resumed, RolledOut)] == rollouts[10:]
    assert (final / "model.safetensors").read_bytes() == weights


def test_a_checkpoint_that_is_written_while_prompts_are_answered_generates_as_the_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    spec = spec_of(tmp_path, method_of(teacher_model(tmp_path / "teacher")), rows_of(2), save_steps=1)
    is_due, is_answering, is_written = (threading.Event() for _ in range(3))
    save, write, choose = Saver.save, LlamaForCausalLM.save_pretrained, Sampler.__call__

    def save_beside(self: Any, *arguments: Any, **named: Any) -> None:
        is_due.set()
        save(self, *arguments, **named)

    def write_late(self: Any, *arguments: Any, **named: Any) -> None:
        if not is_due.is_set():  # the check before the training, of a model without weights
            return write(self, *arguments, **named)
        assert is_answering.wait(60)
        write(self, *arguments, **named)
        is_written.set()

    def choose_late(self: Any, *arguments: Any) -> Any:
        if is_due.is_set():
            is_answering.set()
            assert is_written.wait(60)
        return choose(self, *arguments)

    monkeypatch.setattr(Saver, "save", save_beside)
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", write_late)
    monkeypatch.setattr(Sampler, "__call__", choose_late)
    ended(*run(tmp_path, spec))
    found, own = (path / "generation_config.json" for path in (spec.checkpoint_dir / "checkpoint-1", tiny_model()))
    assert json.loads(found.read_text()) == json.loads(own.read_text())


@pytest.mark.parametrize("dtype", ["fp32", *in_full("bf16")])
def test_a_new_adapter_is_its_base_as_the_teacher_and_a_trained_one_returns_to_it(tmp_path: Path, dtype: Any) -> None:
    faster = {"lora": LORA, "dtype": dtype, "optimizer": OptimizerSpec(learning_rate=5e-2)}
    new = learning(tmp_path, tiny_model(), n_epochs=1, **faster)
    assert metric(ended(*run(tmp_path / "new", new)), "loss") == pytest.approx([0.0] * 4, abs=1e-6)
    other = teacher_model(tmp_path / "teacher", is_constant=True)
    trained = learning(tmp_path, other, job_uuid="trained", checkpoint_dir=tmp_path / "trained", **faster)
    ended(*run(tmp_path / "first", trained))
    adapter = AdapterSpec(model=str(trained.checkpoint_dir / "final"), use="continue")
    back = learning(
        tmp_path, tiny_model(), job_uuid="back", checkpoint_dir=tmp_path / "back", adapter=adapter, **faster
    )
    losses = metric(ended(*run(tmp_path / "second", back)), "loss")
    assert losses[0] > 0.01  # compared with the base model, and not with the adapter as it began
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])


@pytest.mark.parametrize("of_student", [False, True])
def test_rows_of_embeddings_without_a_token_are_left_out(tmp_path: Path, of_student: bool) -> None:
    wide = teacher_model(tmp_path / "wide", rows=200)
    narrow = teacher_model(tmp_path / "narrow")
    student, teacher = (wide, narrow) if of_student else (narrow, wide)
    spec = learning(tmp_path, teacher, n_epochs=1).changed(model=str(student))
    losses = metric(ended(*run(tmp_path, spec)), "loss")
    assert all(0 < loss < 100 for loss in losses)


def test_a_teacher_with_another_vocabulary_fails_the_job_by_name(tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    teacher = teacher_model(tmp_path / "teacher")
    tiny_tokenizer(vocabulary=300).save_pretrained(teacher)
    status, events = run(tmp_path, learning(tmp_path, teacher))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_model")
    assert failed.message.startswith(f"algorithm_config.teacher '{teacher}' does not fit the model")
    assert failed.message.endswith("or set algorithm_config.use_uld_loss: it compares others.")


def test_a_teacher_with_fewer_positions_fails_the_job_by_name(tmp_path: Path) -> None:
    teacher = teacher_model(tmp_path / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    status, events = run(tmp_path, learning(tmp_path, teacher))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_request")
    assert f"but the teacher '{teacher}' has 64 positions" in failed.message


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param(name, lora, id=f"{name}-{'adapters' if lora else 'whole'}")
        for name in CASES
        # A divergence computes the same with either.
        for lora in ([LORA, None] if FULL or name == "reverse" else [None])
    ],
)
def test_what_is_traced_is_what_a_real_step_holds(tmp_path: Path, name: str, lora: Any) -> None:
    spec = spec_of(tmp_path, method_of(teacher_model(tmp_path / "teacher"), **CASES[name]), rows_of(1), lora=lora)
    spec, _ = with_batches(spec)  # padded ones
    batch = Batch(8, 64)
    traced = trace(spec, batch, "cpu")
    assert traced.reference is not None
    assert traced.reference.frozen == sum(weight.numel() for weight in loaded(spec.reference_source.model).parameters())
    assert spec.method.answer_tokens is not None
    of_step = held(built(spec), partial(answered, batch.sequences, batch.tokens, spec.method.answer_tokens))
    assert 0.99 < most(traced.windows) / most(of_step) < 1.05


def test_kernels_of_a_gpu_hold_two_tiles_and_no_whole_logits(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, method_of(teacher_model(tmp_path / "teacher")), rows_of(1))
    logits = max(window.logits for window in trace(spec, Batch(8, 64), "cuda").windows)
    tiles = 2 * 8 * 8 * 32768 * 4  # of both models, for the answers' tokens, as wide as TRL makes them
    assert tiles <= logits < 1.2 * tiles


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_base_model_as_the_teacher_is_loaded_on_its_own(lora: LoraSpec | None, tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.model.adapters import has_reference_adapter
    from llama_stack_provider_trl.recipes.trainer.reference import is_needed

    method = DistillationSpec(reference=reference_to(str(tiny_model())))
    spec = job_spec(tmp_path, tiny_model(), "distillation", method=method, lora=lora, rows=rows_of(1))
    assert is_needed(spec)
    assert not has_reference_adapter(spec)


def test_what_a_head_computed_with_is_freed_when_the_head_is_trl_s_again() -> None:
    """A cycle of references would keep the teacher's states of every micro batch until Python collects cycles."""

    class Compare:
        def __call__(self, own: Any, targets: Any) -> Any: ...

    compare = Compare()
    kept = weakref.ref(compare)
    gc.disable()
    try:
        with computing_heads(compare):
            pass
        del compare
        assert kept() is None
    finally:
        gc.enable()
