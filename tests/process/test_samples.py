"""Answers to fixed prompts while a job trains: what they are, when they are taken; the training does not change."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_stack_provider_trl.recipes.trainer.samples import PromptAnswers
from llama_stack_provider_trl.specs.events import Answer, CheckpointSaved, Failed, Paused, Reason, Sampled, Started
from llama_stack_provider_trl.specs.job import ResumeFrom, SampleMessage, SamplesSpec
from llama_stack_provider_trl.system.files import RunDir
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import LORA, SAMPLES, job_spec, of_kind, run, sampled

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def files(directory: Path) -> dict[str, str]:
    """Digests of an export, but for the record of its job."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("training_job.json", "manifest.json")
    }


def test_samples_come_before_each_checkpoint_and_change_no_byte_of_what_is_trained(tmp_path: Path) -> None:
    """Dropout is where a training would notice that random numbers were used, or that the model stayed in eval."""
    changes: dict[str, Any] = {"lora": LORA.model_copy(update={"dropout": 0.3}), "save_steps": 2}
    jobs = [
        job_spec(tmp_path / name, tiny_model(), "dpo", samples=samples, **changes)
        for name, samples in {"with": SAMPLES, "without": None}.items()
    ]
    (status, events), (_, others) = (run(tmp_path / f"run-{number}", job) for number, job in enumerate(jobs))
    assert status == 0
    assert not sampled(others)
    order = [(event.kind, event.step) for event in events if isinstance(event, Sampled | CheckpointSaved)]
    assert order == [("before", 0), ("checkpoint", 2), ("step", 2), ("after", 3), ("final", 3)]
    for name in ("checkpoint-2", "final"):
        ours, theirs = (files(job.checkpoint_dir / name) for job in jobs)
        assert ours == theirs
        assert len(ours) > 2
    # A job that begins with another one's checkpoint shows what it begins with.
    given = jobs[0].checkpoint_dir / "checkpoint-2"
    resume_from = ResumeFrom(job_uuid="job", checkpoint=given.name, path=given)
    second = jobs[0].model_copy(update={"checkpoint_dir": tmp_path / "second", "resume_from": resume_from})
    _, resumed = run(tmp_path / "run-2", second, given)
    assert sampled(resumed)[0] == ("before", *sampled(events)[1][1:])


@pytest.mark.parametrize(("save_steps", "kinds"), [(2, ["before"]), (1, ["before", "checkpoint"])])
def test_a_pause_waits_for_no_answers_but_those_that_the_job_has_at_this_step_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int, kinds: list[str]
) -> None:
    original = PromptAnswers.take_first

    def pause_then_take(self: PromptAnswers) -> list[Answer]:
        RunDir(tmp_path).control.write_text("{}")
        return original(self)

    monkeypatch.setattr(PromptAnswers, "take_first", pause_then_take)
    spec = job_spec(tmp_path, tiny_model(), n_epochs=3, batch_size=2, save_steps=save_steps, samples=SAMPLES)
    _, events = run(tmp_path, spec)
    assert [event.step for event in of_kind(events, Paused)] == [1]
    assert [kind for kind, *_ in sampled(events)] == kinds


def test_a_prompt_that_the_model_cannot_take_fails_the_job_before_its_model_is_loaded(tmp_path: Path) -> None:
    long = (SampleMessage(role="user", content="What is 3 plus 3? " * 300),)
    spec = job_spec(tmp_path, tiny_model(), samples=SamplesSpec(prompts=(*SAMPLES.prompts, long), max_new_tokens=500))
    _, events = run(tmp_path, spec)
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "provider_options.samples.prompts[3] has" in failed.message
    assert "the 2048 positions of the model" in failed.message
    assert [type(event) for event in events] == [Started, Failed]


class World:
    """A model as a trainer holds it, and prompts."""

    def __init__(self, model: Any, ends: int | None = None) -> None:
        self.heartbeats = 0
        tokenizer = tiny_tokenizer()
        if ends is not None:
            model.generation_config.eos_token_id = [ends]
        trainer: Any = SimpleNamespace(
            accelerator=SimpleNamespace(unwrap_model=lambda model: model),
            model=model,
            args=SimpleNamespace(device=torch.device("cpu")),
            spec=job_spec_of(),
            processing_class=tokenizer,
        )
        self.answers = PromptAnswers(trainer, [[5, 6, 7] * 6, [8, 9]], 5, self.count)

    def count(self) -> None:
        self.heartbeats += 1


def job_spec_of() -> Any:
    return SimpleNamespace(source=SimpleNamespace(model="tiny"), ranks=1, sharding=None, is_sharded=False)


def small(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **{**sizes, "max_position_embeddings": 8, **changes}))


def test_an_answer_ends_with_the_models_own_token_or_at_the_limit() -> None:
    model = small()
    world = World(model)
    first, second = world.answers.take()
    assert [(first.tokens, first.complete), (second.tokens, second.complete)] == [(5, False), (5, False)]
    assert world.heartbeats == 10
    ids = torch.tensor([[8, 9]])
    with torch.no_grad():
        token = int(model.eval()(input_ids=ids).logits[0, -1].argmax())
    found = World(model, ends=token).answers.take()[1]
    assert (found.tokens, found.complete) == (1, True)


def test_the_model_is_left_in_its_mode_and_with_its_rotary_embeddings() -> None:
    """A long sequence changes dynamic ones for all later sequences beyond the positions that the model knows."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = small(rope_parameters=rope)
    model.train()
    model.model.layers[0].eval()
    rotary = model.model.rotary_emb
    remembered, frequencies, random = rotary.max_seq_len_cached, rotary.inv_freq, torch.get_rng_state()
    seen: list[int] = []
    rotary.register_forward_hook(lambda module, *_: seen.append(module.max_seq_len_cached))
    World(model).answers.take()
    assert max(seen) > remembered
    assert (rotary.max_seq_len_cached, rotary.inv_freq is frequencies) == (remembered, True)
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, model.model.layers[0].training, model.model.layers[1].training) == (True, False, True)


def test_a_model_that_keeps_nothing_of_earlier_tokens_answers_the_same() -> None:
    model = small()
    expected = World(model).answers.take()
    forward = model.forward

    def without_cache(input_ids: Any, use_cache: bool, logits_to_keep: int) -> Any:
        return SimpleNamespace(logits=forward(input_ids=input_ids, use_cache=False).logits)

    model.forward = without_cache
    assert World(model).answers.take() == expected


def test_a_model_that_cannot_answer_is_named_before_the_first_step() -> None:
    model = small()

    def refuse(**_: Any) -> None:
        raise TypeError("unexpected keyword use_cache")

    model.forward = refuse
    with pytest.raises(Exception, match=r"samples: model 'tiny' cannot answer prompts while it trains \(TypeError"):
        World(model).answers.take_first()
