"""GRPO whose answers are rewarded by the reward model that another job has trained."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.prepare import TruncationCounter
from llama_stack_provider_trl.recipes.data.tokenize import encode_pairs
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.trainer.grpo import GrpoRecipe
from llama_stack_provider_trl.recipes.trainer.reward_models import RewardScorer
from llama_stack_provider_trl.specs.events import Failed, Prepared, Warned
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec, TruncationSide
from llama_stack_provider_trl.specs.methods import GrpoSpec, RewardSpec
from llama_stack_provider_trl.specs.model_source import ModelName, ModelSource
from llama_stack_provider_trl.specs.rewards import RewardModel, RewardSource
from llama_stack_provider_trl.specs.rows import PreferenceExample
from tests.process.grpo_jobs import LETTER, given_answers, metric
from tests.process.on_policy_ranks import numbers, trained, weights_of
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import save_llama, tiny_model, tiny_tokenizer
from tests.training import DPO_ROWS, LORA, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
ROWS = [{"prompt": f"What is {n} plus {n}?" + " Please." * (n % 3)} for n in range(5)]
KINDS = {"whole": None, "adapter": LORA}
Trained = Callable[[str], RewardModel]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Reward models of jobs, by kind, on a base with another vocabulary than the model that answers has."""
    made: dict[str, RewardModel] = {}

    def train(kind: str) -> RewardModel:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            tokenizer = tiny_tokenizer(vocabulary=400)
            save_llama(root / "base", tokenizer, vocab_size=400, num_key_value_heads=2, **sizes)
            faster = OptimizerSpec(learning_rate=1e-2)
            spec = job_spec(
                root, root / "base", "reward", rows=DPO_ROWS, method=RewardSpec(), lora=KINDS[kind], optimizer=faster
            )
            status, events = run(root / "run", spec)
            assert status == 0, [event.message for event in of_kind(events, Failed)]
            path = spec.checkpoint_dir / "final"
            is_adapter = KINDS[kind] is not None
            made[kind] = RewardModel(
                job_uuid="judge",
                checkpoint="final",
                source=ModelSource(model=str(path)),
                is_adapter=is_adapter,
                base=spec.source if is_adapter else None,
                trained_from=None if is_adapter else ModelName(model=spec.source.model),
            )
        return made[kind]

    return train


def method_of(model: RewardModel, **changes: Any) -> GrpoSpec:
    source = RewardSource(name="judge", model=model, weight=2.0)
    fields = {"rewards": (source, LETTER), "num_generations": 3, "max_completion_length": 6, **changes}
    return GrpoSpec.model_validate(fields)


def spec_of(root: Path, method: GrpoSpec, **changes: Any) -> JobSpec:
    fields = {"rows": ROWS, "batch_size": 2, "n_epochs": 2, "save_steps": 2, "method": method}
    faster = {"optimizer": OptimizerSpec(name="sgd", learning_rate=0.1)}
    return job_spec(root, tiny_model(), "grpo", **{**fields, **faster, **changes})


def expected_rewards(model: RewardModel) -> list[float]:
    """What transformers itself gives the answers of the first step, which are given."""
    ours, theirs = AutoTokenizer.from_pretrained(tiny_model()), AutoTokenizer.from_pretrained(model.own.model)
    assert len(theirs) < len(ours)
    if model.is_adapter:
        assert model.base is not None
        base = AutoModelForSequenceClassification.from_pretrained(model.base.model, num_labels=1)
        loaded: Any = PeftModel.from_pretrained(base, model.own.model)
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(model.own.model)
    rewards = []
    for row in ROWS[:2]:
        turns = [{"role": "user", "content": row["prompt"]}]
        given = ours.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        for ids in given_answers([given["input_ids"]], 3):
            answer = {"role": "assistant", "content": ours.decode(ids, skip_special_tokens=True)}
            read = theirs.apply_chat_template([*turns, answer], return_tensors="pt", return_dict=True)
            with torch.no_grad():
                cut = {name: values[:, : model.max_seq_length] for name, values in read.items()}
                rewards.append(float(loaded.eval()(**cut).logits))
    return rewards


@pytest.mark.parametrize(("kind", "limit"), [("whole", 2048), ("adapter", 2048), ("adapter", 33)])
def test_an_answer_has_what_the_reward_model_gives_it_by_its_own_tokenizer(
    tmp_path: Path, reward_model: Trained, monkeypatch: pytest.MonkeyPatch, kind: str, limit: int
) -> None:
    model = reward_model(kind).model_copy(update={"max_seq_length": limit})
    before = {path.name: path.read_bytes() for path in model.own.directory.iterdir()}
    monkeypatch.setattr(
        GrpoRecipe, "answer", lambda self, prompts, rows: given_answers(prompts, self._grpo.num_generations)
    )
    spec = spec_of(tmp_path, method_of(model, num_generations=3), shuffle=False, n_epochs=1)
    status, events = run(tmp_path, spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    expected = expected_rewards(model)
    assert max(expected) - min(expected) > 1e-3
    found = metric(events, "rewards/judge/mean")[0]
    assert found == pytest.approx(sum(expected) / 6, rel=1e-5)
    assert metric(events, "reward")[0] == pytest.approx(2 * found + 0.5 * metric(events, "rewards/letter/mean")[0])
    assert any(value > 1e-4 for value in metric(events, "grad_norm"))
    assert of_kind(events, Prepared)[0].effective["reward_models"] == [model.own.model]
    assert {path.name: path.read_bytes() for path in model.own.directory.iterdir()} == before


def scorer_of(model: RewardModel) -> RewardScorer:
    return RewardScorer(model, "fp32", torch.device("cpu"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_conversations_are_cut_as_the_pairs_that_the_reward_model_was_trained_on(
    reward_model: Trained, side: TruncationSide
) -> None:
    model = reward_model("whole")
    prompt, texts = [{"role": "user", "content": "What is 1 plus 1? " + "Please. " * 4}], ["It is 2.", "no " * 60]
    tokenizer = AutoTokenizer.from_pretrained(model.own.model)
    pairs = [PreferenceExample.of(prompt, *2 * ([{"role": "assistant", "content": text}],)) for text in texts]
    whole = [ids for (ids,) in encode_pairs(Chat(tokenizer), list(enumerate(pairs)))]
    limit = len(whole[0][0]) + 2  # the second answer alone is longer
    counter = TruncationCounter(tokenizer.eos_token_id, tokenizer.bos_token_id, limit, side)
    cut = [counter.cut_pair(*ids) for ids in whole]
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(model.own.model).eval()
    with torch.no_grad():
        expected = [float(loaded(torch.tensor([[*one[0], *one[1]]])).logits) for one in cut if one]
    cutting = model.model_copy(update={"max_seq_length": limit, "truncation_side": side})
    found = scorer_of(cutting).score([prompt] * 2, texts, [0, 0], lambda: None)
    assert counter.truncated == 2
    assert abs(expected[0] - expected[1]) > 1e-4
    assert found.rewards == pytest.approx(expected, rel=1e-4)
    assert found.without_room == [False, False]


def test_a_prompt_that_leaves_no_room_for_an_answer_is_a_warning_with_its_row(
    tmp_path: Path, reward_model: Trained
) -> None:
    model = reward_model("whole").model_copy(update={"max_seq_length": 40})
    rows = [{"prompt": "What?"}, {"prompt": "What is 1 plus 1? " + "Please. " * 20}]
    status, events = run(tmp_path, spec_of(tmp_path, method_of(model), rows=rows, shuffle=False))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    (warning,) = [event.message for event in of_kind(events, Warned) if "reward model" in event.message]
    assert warning.startswith("row 1: its prompt takes all 40 tokens that the reward model of job 'judge' reads")


def test_a_row_that_the_template_refuses_is_named_by_its_number(reward_model: Trained) -> None:
    scorer = scorer_of(reward_model("whole"))
    scorer._chat.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(JobFailure, match=r"row 41: the model's chat template refuses the turns user, assistant"):
        scorer.score([[{"role": "user", "content": "a"}]] * 2, ["b", "c"], [41, 42], lambda: None)


def test_an_answer_is_scored_at_its_end_whatever_the_template_writes_after_it(reward_model: Trained) -> None:
    scorer = scorer_of(reward_model("whole"))
    given = [[{"role": "user", "content": "What is 1 plus 1?"}]] * 2, ["It is 2.", "No."], [0, 1], lambda: None
    expected = scorer.score(*given).rewards
    for after in ("<|im_start|>assistant\n", "The end."):
        other = scorer_of(reward_model("whole"))
        other._chat.tokenizer.chat_template += f"{{{{ {after!r} }}}}"
        assert other.score(*given).rewards == expected


def read_from(model: RewardModel, directory: Path) -> RewardModel:
    return model.model_copy(update={"source": model.own.model_copy(update={"path": directory})})


def test_a_reward_model_whose_files_lack_its_head_is_refused(tmp_path: Path, reward_model: Trained) -> None:
    whole = reward_model("whole")
    shutil.copytree(whole.own.directory, tmp_path / "headless")
    weights = load_file(tmp_path / "headless" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "headless" / "model.safetensors", {"format": "pt"})
    with pytest.raises(JobFailure, match=r"has no weights for 1 parameters .*score\.weight: .*It is no reward model"):
        scorer_of(read_from(whole, tmp_path / "headless"))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", *in_full("NO_SHARD")])
def test_two_ranks_give_the_rewards_and_weights_of_one_process_and_continue_exactly(
    tmp_path: Path, reward_model: Trained, ranks: Ranks, strategy: str
) -> None:
    method = method_of(reward_model("adapter"))
    alone = spec_of(tmp_path / "alone", method)
    expected = trained(ranks, tmp_path / "alone", alone)
    sharding = {"ranks": 2, "batch_size": 1, "sharding": ShardingSpec(strategy=strategy)}
    spec = spec_of(tmp_path / "together", method, **sharding)
    found = trained(ranks, tmp_path / "together", spec)
    for point, other in zip(numbers(found), numbers(expected), strict=True):
        assert point == pytest.approx(other, rel=1e-3, abs=1e-5)
    weights = weights_of(spec)
    for name, weight in weights_of(alone).items():
        assert torch.allclose(weight, weights[name], rtol=1e-3, atol=1e-5), name
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    resumed = trained(ranks, tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-4")
    assert numbers(resumed) == numbers(found)[4:]
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(spec).items())


def test_a_reward_model_that_cannot_be_loaded_fails_the_job_with_one_sentence(
    tmp_path: Path, reward_model: Trained
) -> None:
    good = reward_model("adapter")
    bad = tmp_path / "bad"
    shutil.copytree(good.own.directory, bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "r": 2}))
    status, events = run(tmp_path, spec_of(tmp_path, method_of(read_from(good, bad))))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_model")
    assert failed.message.startswith(f"adapter {str(bad)!r}: ")
    assert "and [2, 64] in this model. Name an adapter that was trained on this base model" in failed.message


def test_a_reward_models_adapter_without_its_head_is_refused_by_name(tmp_path: Path, reward_model: Trained) -> None:
    good = reward_model("adapter")
    weights = load_file(good.own.directory / "adapter_model.safetensors")
    (head,) = [name for name in weights if name.endswith("score.weight")]  # an export has it
    bad = tmp_path / "bad"
    for modules in (None, ["score"]):
        shutil.copytree(good.own.directory, bad)
        config = json.loads((bad / "adapter_config.json").read_text())
        # To a classifier's modules_to_save PEFT adds the head by itself.
        changes = {"modules_to_save": modules, **({} if modules else {"task_type": None})}
        (bad / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        kept = {name: weight for name, weight in weights.items() if name != head}
        save_file(kept, bad / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(JobFailure) as failed:
            scorer_of(read_from(good, bad))
        assert failed.value.reason == "invalid_model"
        assert str(failed.value).startswith(f"the adapter of the reward model {bad} has no weights for score.weight")
        shutil.rmtree(bad)
    shutil.copytree(good.own.directory, bad)
    lost = next(name for name in weights if name.endswith("lora_B.weight"))
    kept = {name: weight for name, weight in weights.items() if name != lost}
    save_file(kept, bad / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobFailure, match=f"{bad} has no weights for {re.escape(lost)}, which would be random"):
        scorer_of(read_from(good, bad))


def test_the_memory_check_counts_the_reference_that_scores_beside_the_policy(tmp_path: Path) -> None:
    fields = {"rewards": (LETTER,), "num_generations": 3, "max_completion_length": 6}
    without, scoring = (
        estimate(spec_of(tmp_path, GrpoSpec.model_validate({**fields, "beta": beta}), lora=LORA), Batch(6, 40), "cpu")
        for beta in (0.0, 0.1)
    )
    assert scoring.reference == without.reference == 0  # the policy without its adapter
    assert scoring.activations + scoring.logits > without.activations + without.logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_check_counts_reward_models(tmp_path: Path, reward_model: Trained, kind: str) -> None:
    model = reward_model(kind)
    named = model.base or model.trained_from
    assert named is not None
    base = AutoModelForSequenceClassification.from_pretrained(named.model, num_labels=1)
    size = 4 * sum(weight.numel() for weight in base.parameters())
    with_models, without = (
        estimate(spec_of(tmp_path, method), Batch(6, 40), "cpu")
        for method in (method_of(model), GrpoSpec(rewards=(LETTER,), num_generations=3, max_completion_length=6))
    )
    assert with_models.reference - without.reference == size
    assert with_models.total > without.total + size
