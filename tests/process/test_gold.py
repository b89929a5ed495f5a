"""Distillation from a teacher with another vocabulary: losses are those of TRL's GOLDTrainer on given answers; it
learns, resumes and fails as it should.

CI compares one loss for 20 steps and the others in few; `TRL_TESTS=full` compares every one for 20 steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.data.pieces import pieces_of
from llama_stack_provider_trl.recipes.fast.support import with_batches
from llama_stack_provider_trl.recipes.memory.trace import Batch, trace_model
from llama_stack_provider_trl.recipes.memory.trace_cache import trace
from llama_stack_provider_trl.recipes.trainer import uld
from llama_stack_provider_trl.recipes.trainer.alignment import Aligned
from llama_stack_provider_trl.recipes.trainer.gold import NOTHING_COMPARED, GoldRecipe
from llama_stack_provider_trl.recipes.trainer.uld import UniversalDistance, Vocabularies
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import DistillationSpec
from tests.process.distillation_jobs import MORE, answered, built, ended, held, loaded, rows_of, spec_of
from tests.process.gold_jobs import FEWER, given_answers, method_of, student_tokenizer, teacher_model, teacher_tokenizer
from tests.process.grpo_jobs import answering_arguments, metric
from tests.process.peaks import most
from tests.required import FULL, in_full
from tests.tiny import EOS, VOCABULARY, tiny_model, tiny_tokenizer
from tests.training import LORA, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
CASES: dict[str, dict[str, Any]] = {
    "ranks": {"student_temperature": 0.9, "teacher_temperature": 1.2},
    "hybrid": {"hybrid": True, "distillation_weight": 0.5},
    "weights": {"hybrid": True, "matched_weight": 0.7, "unmatched_weight": 2.0},
    "ends": {"hybrid": True, "skip_end": False},
}


def steps_of(name: str) -> int:
    return 20 if FULL or name == "hybrid" else 4


def trl_history(root: Path, method: DistillationSpec, rows: list[dict[str, str]]) -> list[dict[str, float]]:
    """What TRL's own trainer reports of the same rows and answers, in order."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    how = method.uld
    assert how is not None

    class Given(GOLDTrainer):  # type: ignore[misc]
        def generate_on_policy_outputs(self, model: Any, inputs: Any, generation_config: Any) -> Any:
            real = inputs["prompt_attention_mask"].bool()
            prompts = [row[mask].tolist() for row, mask in zip(inputs["prompts"], real, strict=True)]
            answers = given_answers(prompts)
            width = max(map(len, answers))
            filled = torch.tensor([ids + [self.pad_token_id] * (width - len(ids)) for ids in answers])
            given = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in answers])
            labels = torch.cat([torch.full_like(inputs["prompts"], -100), filled.masked_fill(given == 0, -100)], dim=1)
            return (
                torch.cat([inputs["prompts"], filled], dim=1),
                torch.cat([inputs["prompt_attention_mask"], given], dim=1),
                labels,
                [self.processing_class.decode(ids, skip_special_tokens=False) for ids in prompts],
                [self.processing_class.decode(ids, skip_special_tokens=False) for ids in answers],
            )

    arguments = GOLDConfig(
        # With more micro steps it sums their losses (docs/reference/methods.md).
        **answering_arguments(root, gradient_accumulation_steps=1, per_device_train_batch_size=2, learning_rate=0.5),
        lr_scheduler_type="linear",
        lmbda=1.0,
        max_length=256,
        max_completion_length=method.max_completion_length,
        beta=method.beta,
        use_uld_loss=True,
        uld_token_merge_strategy="bayesian",
        uld_use_hybrid_loss=how.hybrid,
        uld_hybrid_matched_weight=how.matched_weight,
        uld_hybrid_unmatched_weight=how.unmatched_weight,
        uld_distillation_weight=how.distillation_weight,
        uld_student_temperature=how.student_temperature,
        uld_teacher_temperature=how.teacher_temperature,
        uld_skip_student_eos=how.skip_end,
        uld_skip_teacher_eos=how.skip_end,
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32"),
        teacher_model=AutoModelForCausalLM.from_pretrained(method.teacher.model, dtype="float32"),
        args=arguments,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_list(
            [
                {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "."}]}
                for row in rows
            ]
        ),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["hybrid", "ends", *in_full("ranks", "weights")])
def test_given_answers_have_the_losses_of_trl_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = rows_of(steps_of(name))
    method = method_of(teacher_model(tmp_path / "teacher"), **CASES[name])
    expected = trl_history(tmp_path, method, rows)
    monkeypatch.setattr(GoldRecipe, "answer", lambda self, prompts, rows: given_answers(prompts))
    spec = spec_of(tmp_path, method, rows, batch_size=1, gradient_accumulation_steps=2, shuffle=False)
    events = ended(*run(tmp_path, spec))
    assert len(expected) == steps_of(name)
    # The gradient of an absolute difference jumps where it is 0: its norm is near TRL's, and exact for the same
    # weights (tests/process/test_uld.py).
    for metric_name, margin in (("loss", 1e-4), ("grad_norm", 1e-2)):
        found = metric(events, metric_name)
        assert found == pytest.approx([entry[metric_name] for entry in expected], rel=margin, abs=1e-6), metric_name
    losses = metric(events, "loss")
    assert min(losses) > 0.01
    assert max(losses) - min(losses) > 1e-3
    if name == "weights":  # TRL reports the parts of the last answer only
        parts = zip(metric(events, "matched_loss"), metric(events, "unmatched_loss"), strict=True)
        assert losses == pytest.approx([0.7 * matched + 2.0 * unmatched for matched, unmatched in parts], rel=1e-5)
    # The end of an answer is one of the tokens that are not compared.
    assert all((ratio == 1.0) == (name == "ends") for ratio in metric(events, "completions/compared_ratio"))


def test_steps_in_which_nothing_is_compared_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoldRecipe, "answer", lambda self, prompts, rows: given_answers(prompts))
    monkeypatch.setattr(GoldRecipe, "align", lambda self, prompt, ids: Aligned([5] * len(ids), []))
    method = method_of(teacher_model(tmp_path / "teacher"))
    events = ended(*run(tmp_path, spec_of(tmp_path, method, MORE, n_epochs=2)))
    ratios = metric(events, "completions/compared_ratio")
    assert len(ratios) > 1
    assert set(ratios) == {0.0}
    assert [event.message for event in of_kind(events, Warned)].count(NOTHING_COMPARED) == 1


def learning(root: Path, teacher: Path, how: dict[str, Any], **changes: Any) -> JobSpec:
    fields = {"n_epochs": 5, "optimizer": OptimizerSpec(learning_rate=1e-2), "save_steps": 10}
    return spec_of(root, method_of(teacher, **how), MORE, **{**fields, **changes})


def test_20_steps_lower_the_distance_and_a_job_that_continues_gives_the_same_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = learning(tmp_path, teacher_model(tmp_path / "teacher", is_constant=True), {"hybrid": True})
    events = ended(*run(tmp_path, spec, estimates=True))
    losses = metric(events, "loss")
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    names = {"matched_loss", "unmatched_loss", "completions/mean_length", "completions/compared_ratio"}
    assert names <= of_kind(events, Progress)[0].metrics.keys()
    assert all(0 < ratio <= 1 for ratio in metric(events, "completions/compared_ratio"))
    effective = of_kind(events, Prepared)[0].effective
    assert effective["memory"]["fits"]
    assert effective["memory"]["reference_bytes"] > 0
    final = spec.checkpoint_dir / "final"
    assert AutoModelForCausalLM.from_pretrained(final).config.model_type == "llama"
    weights = (final / "model.safetensors").read_bytes()
    final.rename(tmp_path / "first-final")
    resumed = ended(*run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-10"))
    for name in ("loss", "matched_loss", "completions/mean_length", "completions/compared_ratio"):
        assert metric(resumed, name) == metric(events, name)[10:], name
    assert (final / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("dtype", ["bf16", *in_full("fp32")])
def test_an_adapter_comes_closer_on_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr(GoldRecipe, "answer", lambda self, prompts, rows: given_answers(prompts))
    teacher = teacher_model(tmp_path / "teacher", is_constant=True)
    losses = metric(
        ended(*run(tmp_path, learning(tmp_path, teacher, {"hybrid": True}, lora=LORA, dtype=dtype))), "loss"
    )
    assert sum(losses[-4:]) < 0.99 * sum(losses[:4])  # of the last epoch and the first


def test_a_teacher_reads_the_prompt_by_its_own_template_and_long_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    teacher = teacher_model(tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    (teacher / "chat_template.jinja").unlink()
    read, answered = [], []
    align = GoldRecipe.align

    def noted(self: GoldRecipe, prompt: list[int], ids: list[int]) -> Any:
        read.append(tokenizer.decode(prompt))
        answered.extend(ids)
        return align(self, prompt, ids)

    monkeypatch.setattr(GoldRecipe, "align", noted)
    long = "Describe a process of making bread. First, mix the flour, the water and the salt. " * 2
    (of_student,) = student_tokenizer()([f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"])["input_ids"]
    assert len(of_student) < len(tokenizer(long)["input_ids"])
    # The student alone would have room for it.
    limit = len(of_student) + 16
    spec = spec_of(tmp_path, method_of(teacher), [{"prompt": "Why?"}, {"prompt": long}], max_seq_length=limit)
    events = ended(*run(tmp_path, spec))
    assert read == ["### User:\nWhy?\n\n### Assistant:\n"]
    assert max(answered) >= FEWER  # tokens that the teacher has no row for
    messages = [event.message for event in of_kind(events, Warned)]
    assert any("the teacher's tokenizer has no chat template" in message for message in messages)
    assert any(message.startswith("1 of 2 prompts were dropped") for message in messages)


def test_heads_that_leave_out_what_is_not_scored_give_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl.trainer.utils as utils

    monkeypatch.setattr(GoldRecipe, "answer", lambda self, prompts, rows: given_answers(prompts))
    teacher = teacher_model(tmp_path / "teacher")
    found = []
    for compact in (False, True):  # as on a GPU, whose kernels the comparison takes the place of
        monkeypatch.setattr(utils, "_use_triton", lambda device, compact=compact: compact)
        root = tmp_path / str(compact)
        spec = learning(root, teacher, {"hybrid": True, "skip_end": False}, n_epochs=1)
        events = ended(*run(root, spec))
        found.append(metric(events, "loss") + metric(events, "grad_norm"))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_special_token_that_an_answer_spells_out_is_text_for_the_teacher() -> None:
    tokenizer = teacher_tokenizer()
    ids = GoldRecipe._encode(SimpleNamespace(_teacher_tokenizer=tokenizer), f"a{EOS}b")  # type: ignore[arg-type]
    assert tokenizer.eos_token_id not in ids
    pieces = pieces_of(tokenizer)
    assert pieces is not None
    assert b"".join(pieces.of(ids)) == f"a{EOS}b".encode()


def test_a_teacher_whose_tokens_write_no_bytes_fails_the_job_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    teacher = teacher_model(tmp_path / "teacher")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(teacher)
    status, events = run(tmp_path, learning(tmp_path, teacher, {}))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_model")
    assert failed.message.startswith(f"algorithm_config.teacher '{teacher}': its tokens are not known to write bytes")


@pytest.mark.parametrize(
    ("name", "lora"), [("ranks", None), ("hybrid", LORA), *in_full(("ranks", LORA), ("hybrid", None))]
)
def test_what_is_traced_is_what_a_real_step_holds(tmp_path: Path, name: str, lora: Any) -> None:
    spec = spec_of(tmp_path, method_of(teacher_model(tmp_path / "teacher"), **CASES[name]), rows_of(1), lora=lora)
    spec, _ = with_batches(spec)  # padded ones
    batch = Batch(8, 64)
    traced = trace(spec, batch, "cpu")
    assert traced.reference is not None
    assert traced.reference.frozen == sum(weight.numel() for weight in loaded(spec.reference_source.model).parameters())
    of_step = held(sharing_most(spec), partial(spans_of_tokens, spec, batch))
    assert 0.99 < most(traced.windows) / most(of_step) < 1.05


def sharing_most(spec: JobSpec) -> Any:
    """The trainer of a job, with as many tokens of both vocabularies as can be."""
    import torch

    trainer, uld_spec = built(spec), spec.method.uld  # type: ignore[union-attr]
    if uld_spec.hybrid:
        pairs = [(number, number) for number in range(FEWER)]
        vocabularies = Vocabularies.of((VOCABULARY, FEWER), pairs, torch.device("cpu"))
        trainer._distance = UniversalDistance(uld_spec, spec.method.beta, vocabularies)
    return trainer


def spans_of_tokens(spec: JobSpec, batch: Batch) -> dict[str, Any]:
    """A batch of answers, each token a span of its own. The teacher's sequences are longer by an answer."""
    import torch

    sequences, answer = batch.sequences, spec.method.answer_tokens
    assert answer is not None
    read = answered(sequences, batch.tokens + answer, answer)
    spans = [(at, at + 1, at, at + 1, at // answer) for at in range(sequences * answer)]
    return {
        **answered(sequences, batch.tokens, answer),
        **{f"teacher_{name}": tensor for name, tensor in read.items()},
        "spans": torch.tensor(spans),
    }


def test_the_memory_of_a_large_vocabulary_is_that_of_a_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path, method_of(teacher_model(tmp_path / "teacher"), hybrid=True), rows_of(1))
    whole = max(window.logits for window in trace(spec, Batch(64, 64), "cuda").windows)
    monkeypatch.setattr(uld, "TILE_BYTES", 64 * 4 * VOCABULARY)
    in_tiles = max(window.logits for window in trace_model(spec, Batch(64, 64), "cuda").windows)
    assert whole > 64 * 16 * 4 * VOCABULARY  # of all answers at once
    assert in_tiles < whole / 8
