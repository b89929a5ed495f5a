"""Real trainings of a tiny model: what is learnt, reported and written is what the spec requests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.recipes.trainer import callbacks
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Evaluated,
    Failed,
    Finished,
    NullEventWriter,
    Prepared,
    Progress,
    Reason,
    Started,
    Warned,
)
from llama_stack_provider_trl.specs.job import DpoSpec, LoraSpec, OptimizerSpec
from tests.process.plain_trl import as_chat, load, logged_losses, plain_arguments
from tests.required import FULL, in_full
from tests.tiny import shared_dir, tiny_model, tiny_tokenizer
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, losses, of_kind, run

pytestmark = pytest.mark.process


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(3, 23)[None]).logits


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The events of a job of two epochs with a validation dataset."""
    root = tmp_path_factory.mktemp("evaluated")
    status, events = run(root, job_spec(root, tiny_model(), n_epochs=2, validation_rows=SFT_ROWS[:4]))
    assert status == 0
    return events


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The events of a job without any option."""
    root = tmp_path_factory.mktemp("plain")
    return run(root, job_spec(root, tiny_model()))[1]


def test_a_full_sft_job_reports_every_step_and_ends_in_a_checkpoint_that_transformers_loads(
    evaluated: list[Any],
) -> None:
    events = evaluated
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert of_kind(events, Prepared)[0].total_steps == 6
    assert [point.step for point in of_kind(events, Progress)] == [1, 2, 3, 4, 5, 6]
    assert losses(events)[-1] < losses(events)[0]
    seen = [point.tokens_seen for point in of_kind(events, Progress)]
    assert seen == [point.metrics["num_tokens"] for point in of_kind(events, Progress)]
    assert 0 < seen[0] < seen[1] < seen[2] == seen[5] - seen[2]
    step, final = of_kind(events, CheckpointSaved)
    assert (step.kind, step.step, step.epoch, step.path.name) == ("step", 3, 1, "checkpoint-3")
    assert (final.kind, final.step, final.epoch, final.path.name) == ("final", 6, 2, "final")
    for checkpoint in (step, final):
        load(checkpoint.path)


def test_metrics_of_a_checkpoint_are_measured_and_validation_is_the_given_dataset(evaluated: list[Any]) -> None:
    step, final = of_kind(evaluated, CheckpointSaved)
    evaluations = of_kind(evaluated, Evaluated)
    assert [evaluation.step for evaluation in evaluations] == [3, 6]
    for checkpoint, evaluation, points in ((step, evaluations[0], slice(0, 3)), (final, evaluations[1], slice(3, 6))):
        expected = losses(evaluated)[points]
        assert checkpoint.train_loss == pytest.approx(sum(expected) / 3)
        assert checkpoint.validation_loss == evaluation.metrics["eval_loss"]
        assert checkpoint.perplexity == pytest.approx(math.exp(evaluation.metrics["eval_loss"]))


def test_without_a_validation_dataset_nothing_is_split_off_and_no_validation_loss_is_invented(
    plain: list[Any],
) -> None:
    assert of_kind(plain, Prepared)[0].num_rows == len(SFT_ROWS)
    assert not of_kind(plain, Evaluated)
    assert of_kind(plain, CheckpointSaved)[-1].validation_loss is None


@pytest.mark.parametrize("algorithm", ["sft", *in_full("dpo")])
def test_an_adapter_loads_with_peft_and_gives_the_logits_of_the_merged_model(tmp_path: Path, algorithm: str) -> None:
    from peft import PeftModel

    spec = job_spec(tmp_path, tiny_model(), algorithm, lora=LORA, merge_adapter=True)
    _, events = run(tmp_path, spec)
    final, merged = of_kind(events, CheckpointSaved)
    assert (final.kind, merged.kind) == ("final", "merged")
    adapted = logits(PeftModel.from_pretrained(load(tiny_model()), final.path).eval())
    assert (logits(load(merged.path)) - adapted).abs().max() < 1e-5
    assert (logits(load(tiny_model())) - adapted).abs().max() > 1e-3


def test_sft_gives_the_losses_of_trl_called_directly(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            from torch.utils.data import SequentialSampler

            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=load(tiny_model()),
        args=SFTConfig(**plain_arguments(tmp_path)),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([as_chat(row, "completion") for row in SFT_ROWS]),
    )
    trainer.train()
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), shuffle=False))
    assert losses(events) == pytest.approx(logged_losses(trainer), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", *in_full("hinge", "ipo")])
def test_plain_dpo_gives_the_losses_of_trl_called_directly(tmp_path: Path, loss_type: Any) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            from torch.utils.data import SequentialSampler

            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=load(tiny_model()),
        args=DPOConfig(**plain_arguments(tmp_path), loss_type=[loss_type], beta=0.2),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([as_chat(row, "chosen", "rejected") for row in DPO_ROWS]),
    )
    trainer.train()
    spec = job_spec(tmp_path, tiny_model(), "dpo", shuffle=False, method=DpoSpec(beta=0.2, loss_type=loss_type))
    _, events = run(tmp_path, spec)
    assert losses(events) == pytest.approx(logged_losses(trainer), rel=1e-4)


def test_reward_scale_and_clip_shape_the_margin() -> None:
    import torch
    from torch.nn.functional import logsigmoid

    from llama_stack_provider_trl.recipes.trainer.dpo import preference_loss

    logratios = torch.tensor([30.0, 1.0, -30.0, 10.0, 2.0, 30.0])  # chosen x 3, then rejected x 3
    lengths = torch.tensor([5, 2, 3, 5, 1, 3])
    margins = torch.tensor([20.0, -1.0, -60.0])
    plain = preference_loss(logratios, lengths, DpoSpec(beta=0.1))
    assert torch.allclose(plain, -logsigmoid(0.1 * margins))
    clipped = preference_loss(logratios, lengths, DpoSpec(beta=0.1, reward_scale=2.0, reward_clip=3.0))
    assert torch.allclose(clipped, -logsigmoid(torch.tensor([3.0, -0.2, -3.0])))
    hinge = preference_loss(logratios, lengths, DpoSpec(beta=0.1, loss_type="hinge"))
    assert torch.allclose(hinge, torch.tensor([0.0, 1.1, 7.0]))
    ipo = preference_loss(logratios, lengths, DpoSpec(beta=0.5, loss_type="ipo"))
    assert torch.allclose(ipo, (torch.tensor([6.0 - 2.0, 0.5 - 2.0, -10.0 - 10.0]) - 1.0) ** 2)


def test_reward_fields_reach_the_training(tmp_path: Path) -> None:
    scaled = DpoSpec(beta=0.1, reward_scale=3.0, reward_clip=0.05)
    _, plain = run(tmp_path / "a", job_spec(tmp_path / "a", tiny_model(), "dpo", n_epochs=2))
    _, shaped = run(tmp_path / "b", job_spec(tmp_path / "b", tiny_model(), "dpo", n_epochs=2, method=scaled))
    assert losses(plain)[0] == losses(shaped)[0] == pytest.approx(math.log(2))
    assert losses(shaped)[-1] == pytest.approx(-math.log(1 / (1 + math.exp(-0.05))), rel=1e-3)


def test_a_capped_epoch_ends_early_and_the_next_one_sees_other_rows() -> None:
    from llama_stack_provider_trl.recipes.data.sampling import EpochSampler

    sampler = EpochSampler(100, 8, shuffle=True, seed=1)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert [len(rows) for rows in epochs] == [8, 8, 8]
    assert len({row for rows in epochs for row in rows}) > 16
    again = EpochSampler(100, 8, shuffle=True, seed=1)
    again.set_epoch(2)
    assert list(again) == epochs[2]
    assert list(EpochSampler(5, None, shuffle=False, seed=1)) == [0, 1, 2, 3, 4]


def test_three_epochs_of_two_steps_train_six_steps(tmp_path: Path) -> None:
    spec = job_spec(
        tmp_path, tiny_model(), n_epochs=3, max_steps_per_epoch=2, batch_size=1, gradient_accumulation_steps=2
    )
    _, events = run(tmp_path, spec)
    assert [point.step for point in of_kind(events, Progress)] == [1, 2, 3, 4, 5, 6]
    assert [checkpoint.step for checkpoint in of_kind(events, CheckpointSaved)] == [2, 4, 6]
    assert of_kind(events, Prepared)[0].effective["global_batch_size"] == 2


def test_save_steps_replaces_the_checkpoint_of_each_epoch(tmp_path: Path) -> None:
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), n_epochs=2, save_steps=2))
    assert [(saved.kind, saved.step) for saved in of_kind(events, CheckpointSaved)] == [
        ("step", 2),
        ("step", 4),
        ("final", 6),
    ]


class PlayedMalloc:
    """Notes its calls, and keeps everything."""

    keeps = is_ours = True

    def __init__(self) -> None:
        self.needs: list[int] = []
        self.polls = self.ends = 0

    def begin(self, need: int) -> None:
        self.needs.append(need)

    def poll(self) -> bool:
        self.polls += 1
        return self.polls == 2

    def end(self) -> None:
        self.ends += 1


def test_before_training_the_estimate_reports_whether_memory_is_kept_and_every_step_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedMalloc()
    monkeypatch.setattr(callbacks, "Malloc", lambda: played)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model()), estimates=True)
    (prepared,) = of_kind(events, Prepared)
    assert played.needs == [prepared.effective["memory"]["estimate_bytes"]] != [0]
    assert prepared.effective["malloc"] == "keeps large blocks"
    assert played.polls >= of_kind(events, Finished)[0].step
    assert played.ends == 1
    assert [warned.message for warned in of_kind(events, Warned)] == [callbacks._SCARCE]


@pytest.mark.parametrize(
    ("device", "memory", "requested", "needs"),
    [
        ("cpu", {"memory": {"estimate_bytes": 7}}, [7], [3 * 5]),
        ("cpu", {}, [0], [3 * 5]),
        ("cpu", {"memory": None}, [0], [3 * 5]),
        ("cuda", {"memory": {"estimate_bytes": 7}}, [], []),
    ],
    ids=["rank 0", "another rank", "not estimated", "gpu"],
)
def test_all_ranks_keep_memory_by_rank_0_s_estimate_for_those_of_their_machine(
    device: str, memory: Any, requested: list[int], needs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, text = PlayedMalloc(), []
    monkeypatch.setattr(callbacks, "Malloc", lambda: played)
    monkeypatch.setattr(callbacks.ranks, "broadcast_number", lambda number: text.append(number) or 5)
    monkeypatch.setattr(callbacks.ranks, "local_world_size", lambda: 3)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(device=torch.device(device)), notes={}, num_tokens=0.0, state=None
    )
    callbacks.JobCallback(
        job_spec(tmp_path, tiny_model()), NullEventWriter(), trainer, tmp_path / "control", memory
    )._keep_memory()
    assert (text, played.needs) == (requested, needs)


def test_without_save_steps_a_long_epoch_is_saved_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "SAVE_SECONDS", 0.0)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model()))
    saved = [(saved.kind, saved.step) for saved in of_kind(events, CheckpointSaved)]
    assert saved == [("step", 1), ("step", 2), ("final", 3)]


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, job_spec(tmp_path / name, tiny_model(), seed=seed))
        weights.append((tmp_path / name / "checkpoints" / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_adam_has_the_decay_of_weights_in_its_moments_and_adamw_beside_them(tmp_path: Path) -> None:
    found = {}
    for name in ("adam", "adamw"):
        optimizer = OptimizerSpec(name=name, learning_rate=1e-3, weight_decay=0.1)
        _, events = run(tmp_path / name, job_spec(tmp_path / name, tiny_model(), n_epochs=2, optimizer=optimizer))
        found[name] = losses(events)
    assert found["adam"][0] == found["adamw"][0]
    assert found["adam"][-1] != found["adamw"][-1]


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ("sft", {}, {0: 6, 1: 6}),
        ("sft", {"checkpoint_every": 2}, {0: 6, 1: 3}),
        ("dpo", {"checkpoint_every": 2, "lora": LORA}, {0: 9, 1: 6}),  # the reference forwards, and recomputes nothing
    ],
)
def test_of_every_second_block_or_of_all_activations_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, changes: Any, expected: dict[int, int]
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    calls: dict[int, int] = {}
    original = LlamaAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[self.layer_idx] = calls.get(self.layer_idx, 0) + 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counted)
    spec = job_spec(tmp_path, tiny_model(), algorithm, gradient_checkpointing=True, **changes)
    run(tmp_path, spec)
    # At the end the export asks the trained model and the one that it has written, once each.
    assert calls == {block: count + 2 for block, count in expected.items()}


def test_an_adapter_is_what_was_requested(tmp_path: Path) -> None:
    lora = LoraSpec(target_modules=("q_proj", "gate_proj"), rank=3, alpha=7, use_dora=True)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), lora=lora))
    config = json.loads((of_kind(events, CheckpointSaved)[-1].path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (3, 7, True)
    assert sorted(config["target_modules"]) == ["gate_proj", "q_proj"]


def test_an_evaluation_stops_after_the_given_number_of_batches(tmp_path: Path) -> None:
    def evaluated(root: Path, **changes: Any) -> float:
        _, events = run(root, job_spec(root, tiny_model(), validation_rows=SFT_ROWS, batch_size=2, **changes))
        return of_kind(events, Evaluated)[-1].metrics["eval_loss"]

    first_rows = job_spec(tmp_path, tiny_model(), validation_rows=SFT_ROWS[:4], batch_size=2)
    _, events = run(tmp_path / "c", first_rows)
    capped = evaluated(tmp_path / "a", max_validation_steps=2)
    assert capped == pytest.approx(of_kind(events, Evaluated)[-1].metrics["eval_loss"], rel=1e-6)
    assert capped != pytest.approx(evaluated(tmp_path / "b"), rel=1e-6)


def test_sequences_longer_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), max_seq_length=4096))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "2048 positions" in failed.message


def test_a_default_length_beyond_the_positions_of_the_model_is_lowered_with_a_warning(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), max_seq_length=4096, max_seq_length_is_default=True)
    _, events = run(tmp_path, spec)
    assert of_kind(events, Finished)
    assert [event.message for event in of_kind(events, Warned) if "max_seq_length" in event.message] == [
        "max_seq_length is 2048, the positions of the model, instead of the default 4096: set the provider option "
        "max_seq_length to choose it"
    ]


def test_learning_rate_follows_warmup_and_schedule(tmp_path: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e-3, warmup_steps=2, scheduler="constant")
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), n_epochs=2, optimizer=optimizer))
    rates = [point.metrics["learning_rate"] for point in of_kind(events, Progress)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3])


def test_warmup_stable_decay_ends_in_a_cosine_of_the_requested_steps(tmp_path: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e-3, warmup_steps=2, scheduler="warmup_stable_decay", decay_steps=2)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), n_epochs=2, optimizer=optimizer))
    rates = [point.metrics["learning_rate"] for point in of_kind(events, Progress)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 1e-3, 1e-3, 5e-4])


def test_a_job_too_short_for_its_warmup_and_decay_fails_before_its_first_step(tmp_path: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e-3, warmup_steps=2, scheduler="warmup_stable_decay", decay_steps=2)
    status, events = run(tmp_path, job_spec(tmp_path, tiny_model(), optimizer=optimizer))
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "num_warmup_steps 2 and lr_decay_steps 2 are more than the 3 optimizer steps" in failed.message
    assert not of_kind(events, Prepared)


def test_a_model_without_a_chat_template_gets_the_default_one_and_keeps_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from llama_stack_provider_trl.recipes.data.chat import DEFAULT_CHAT_TEMPLATE

    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(chat_template=False)))
    assert any("no chat template" in warning.message for warning in of_kind(events, Warned))
    assert (
        AutoTokenizer.from_pretrained(of_kind(events, CheckpointSaved)[-1].path).chat_template == DEFAULT_CHAT_TEMPLATE
    )


@pytest.mark.parametrize(("file", "algorithm"), [("instruct_999.jsonl", "sft"), ("preference_300.jsonl", "dpo")])
def test_real_data_trains_without_a_special_case(tmp_path: Path, file: str, algorithm: str) -> None:
    rows = [json.loads(line) for line in (shared_dir() / "data" / file).read_text().splitlines()]
    steps = 20 if FULL else 4
    spec = job_spec(
        tmp_path, tiny_model(), algorithm, rows=rows, max_steps_per_epoch=steps, batch_size=2, max_seq_length=512
    )
    status, events = run(tmp_path, spec)
    assert status == 0
    assert len(losses(events)) == steps
    report = of_kind(events, Prepared)[0].effective["data"]
    assert report["num_rows"] == len(rows)
    assert report["kept"] + report["dropped"] == len(rows)


def test_a_model_id_that_cannot_be_reached_fails_the_job(tmp_path: Path) -> None:
    _, events = run(tmp_path, job_spec(tmp_path, "no-such-org/no-such-model"))
    assert of_kind(events, Failed)[0].reason is Reason.invalid_model


def test_a_module_that_the_model_does_not_have_is_answered_with_those_it_has(tmp_path: Path) -> None:
    for name, nearest in (("query_key_value", ""), ("q_prj", "; the nearest is q_proj")):
        lora = LoraSpec(target_modules=(name,), rank=2, alpha=4)
        (tmp_path / name).mkdir()
        _, events = run(tmp_path / name, job_spec(tmp_path / name, tiny_model(), lora=lora))
        (failed,) = of_kind(events, Failed)
        assert failed.reason is Reason.invalid_request
        assert name in failed.message
        assert f"k_proj, o_proj, q_proj, v_proj{nearest}." in failed.message


def test_a_loss_that_is_no_number_ends_the_job_instead_of_wasting_the_rest(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), n_epochs=5, optimizer=OptimizerSpec(learning_rate=1e30, max_grad_norm=0.0))
    _, events = run(tmp_path, spec)
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.diverged
    assert "became nan at step 2" in failed.message
    last = of_kind(events, Progress)[-1]
    assert last.not_finite
    assert set(last.not_finite).isdisjoint(last.metrics)
    assert f"{last.not_finite[0]} became" in failed.message


def test_rows_that_leave_nothing_to_train_on_fail_the_job(tmp_path: Path) -> None:
    rows = [{"prompt": "Why? " * 50, "completion": "Because."}]
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), rows=rows, max_seq_length=16))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_dataset
    assert "max_seq_length" in failed.message


def test_the_tokenizer_of_a_checkpoint_is_the_one_that_trained(plain: list[Any]) -> None:
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(of_kind(plain, CheckpointSaved)[-1].path)
    assert saved.chat_template == tiny_tokenizer().chat_template
    assert saved.eos_token == tiny_tokenizer().eos_token


def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    model = tmp_path / "own-code"
    shutil.copytree(tiny_model(), model)
    (model / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM, LlamaConfig\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    status, events = run(tmp_path / "no", job_spec(tmp_path / "no", model))
    assert (status, of_kind(events, Failed)[0].reason) == (1, Reason.invalid_model)
    assert "code of its own" in of_kind(events, Failed)[0].message
    for algorithm in ("sft", "dpo"):
        spec = job_spec(tmp_path / algorithm, model, algorithm, trust_remote_code=True)
        assert run(tmp_path / algorithm, spec)[0] == 0
