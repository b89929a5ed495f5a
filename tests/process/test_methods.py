"""Preference methods beside DPO: their losses are those of TRL's own trainers, on the engine that every job has.

CI runs one case of each in few steps; `TRL_TESTS=full` runs every variant for 20 steps, and on several ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.events import CheckpointSaved, Evaluated, Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, RowNames, ShardingSpec
from llama_stack_provider_trl.specs.methods import CpoSpec, KtoSpec, OrpoSpec, RewardSpec
from tests.process.plain_trl import plain_arguments
from tests.process.rank_numbers import numbers
from tests.ranks import Ranks
from tests.required import FULL, IN_FULL, in_full
from tests.tiny import CHATML, tiny_model
from tests.training import LORA, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
STEPS = 20 if FULL else 5

ROWS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": "I would rather not. " * (1 + n % 3)}
    for n in range(40)
]
SIMPO = CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.0, gamma=0.7, alpha=0.0)
METHODS: dict[str, tuple[str, Any]] = {
    "orpo": ("orpo", OrpoSpec(beta=0.3)),
    "cpo": ("cpo", CpoSpec(beta=0.2, alpha=0.5)),
    "cpo-hinge": ("cpo", CpoSpec(beta=0.2, loss_type="hinge")),
    "cpo-ipo": ("cpo", CpoSpec(beta=0.2, loss_type="ipo", alpha=0.0)),
    "cpo-smoothed": ("cpo", CpoSpec(beta=0.2, label_smoothing=0.1)),
    "simpo": ("simpo", SIMPO),
    "simpo-with-alpha": ("simpo", SIMPO.model_copy(update={"alpha": 0.3})),
}
MARGINS = [{**row, "margin": n % 4 / 2} for n, row in enumerate(ROWS)]
REWARDS = {
    "reward": RewardSpec(),
    "reward-margin": RewardSpec(margin=True),
    "reward-centered": RewardSpec(center_rewards_coefficient=0.1),
}
UNPAIRED = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
    for n, row in enumerate(ROWS)
]
KTO = {
    "kto": KtoSpec(beta=0.3, desirable_weight=1.5),
    "kto-apo": KtoSpec(loss_type="apo_zero_unpaired", beta=0.2, undesirable_weight=0.5),
}
CASES = [*METHODS] if FULL else ["orpo", "cpo", "simpo"]
ON_RANKS = ["orpo", "cpo", "simpo", "reward-centered", *KTO]


@pytest.fixture(autouse=True)
def without_the_notice_of_experimental_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template ends an answer with eos, since these trainers of TRL add one that is missing."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model(), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")
    assert tokenizer.chat_template != CHATML
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of one number, whose weights are in its files."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = tmp_path_factory.mktemp("reward") / "tiny"
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(path)
    return path


def trl_trainer(model: Path, root: Path, parameters: Any) -> Any:
    """TRL's own trainer on the same rows, in order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    arguments = plain_arguments(root, per_device_train_batch_size=2)
    kind: Any
    config: Any
    auto: Any = AutoModelForCausalLM
    if isinstance(parameters, RewardSpec):
        auto, kind, coefficient = (
            AutoModelForSequenceClassification,
            RewardTrainer,
            parameters.center_rewards_coefficient,
        )
        config = RewardConfig(**arguments, center_rewards_coefficient=coefficient or None)
    elif isinstance(parameters, KtoSpec):
        fields = ("beta", "loss_type", "desirable_weight", "undesirable_weight")
        kind, config = KTOTrainer, KTOConfig(**arguments, **{name: getattr(parameters, name) for name in fields})
    elif isinstance(parameters, OrpoSpec):
        kind, config = ORPOTrainer, ORPOConfig(**arguments, beta=parameters.beta)
    else:
        of_cpo = {"cpo_alpha": parameters.alpha, "simpo_gamma": parameters.gamma, "loss_type": parameters.loss_type}
        kind, config = (
            CPOTrainer,
            CPOConfig(**arguments, **of_cpo, beta=parameters.beta, label_smoothing=parameters.label_smoothing),
        )

    class InOrder(kind):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder(
        model=auto.from_pretrained(model, dtype="float32"),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list([as_chat(row) for row in rows_of(parameters)[: 2 * STEPS]]),
    )


def rows_of(parameters: Any) -> list[dict[str, Any]]:
    """The rows of the comparison with TRL."""
    if isinstance(parameters, RewardSpec) and parameters.margin:
        return MARGINS
    return UNPAIRED if isinstance(parameters, KtoSpec) else ROWS


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "completion": "assistant"}
    return {name: [{"role": roles[name], "content": value}] if name in roles else value for name, value in row.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_method_gives_the_losses_of_trl_called_directly(model: Path, tmp_path: Path, name: str) -> None:
    algorithm, parameters = METHODS[name]
    trainer = trl_trainer(model, tmp_path, parameters)
    trainer.train()
    expected = [entry for entry in trainer.state.log_history if "loss" in entry]
    spec = job_spec(tmp_path, model, algorithm, rows=ROWS[: 2 * STEPS], shuffle=False, batch_size=2, method=parameters)
    status, events = run(tmp_path, spec)
    assert status == 0
    assert len(expected) == STEPS
    assert losses(events) == pytest.approx([entry["loss"] for entry in expected], rel=1e-4)
    for metric in ("rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected", "nll_loss"):
        if metric != "nll_loss" or not isinstance(parameters, CpoSpec) or parameters.alpha:
            found = [point.metrics[metric] for point in of_kind(events, Progress)]
            assert found == pytest.approx([entry[metric] for entry in expected], rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize("name", KTO if FULL else ["kto"])
def test_kto_gives_the_losses_of_trl_called_directly(model: Path, tmp_path: Path, name: str) -> None:
    trainer = trl_trainer(model, tmp_path, KTO[name])
    trainer.train()
    expected = [entry for entry in trainer.state.log_history if "loss" in entry]
    rows = UNPAIRED[: 2 * STEPS]
    spec = job_spec(tmp_path, model, "kto", rows=rows, shuffle=False, batch_size=2, method=KTO[name])
    status, events = run(tmp_path, spec)
    assert status == 0
    assert len(expected) == STEPS
    assert losses(events) == pytest.approx([entry["loss"] for entry in expected], rel=1e-4)
    if name == "kto":
        assert any(entry["kl"] > 0 for entry in expected)
    for point, entry in zip(of_kind(events, Progress), expected, strict=True):
        common = {name for name in ("kl", "num_tokens") if name in point.metrics}
        common |= {name for name in point.metrics if name.startswith(("rewards/", "logps/"))}
        assert {name: point.metrics[name] for name in common} == pytest.approx(
            {name: entry[name] for name in common}, rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize("name", REWARDS if FULL else ["reward-centered", "reward-margin"])
def test_a_reward_model_gives_the_losses_of_trl_called_directly(reward_model: Path, tmp_path: Path, name: str) -> None:
    trainer = trl_trainer(reward_model, tmp_path, REWARDS[name])
    trainer.train()
    expected = [entry for entry in trainer.state.log_history if "loss" in entry]
    rows = rows_of(REWARDS[name])[: 2 * STEPS]
    spec = job_spec(tmp_path, reward_model, "reward", rows=rows, shuffle=False, batch_size=2, method=REWARDS[name])
    if REWARDS[name].margin:
        named = spec.data.dataset.model_copy(update={"names": RowNames(margins=True)})
        spec = spec.changed(dataset=named)
    status, events = run(tmp_path, spec)
    assert status == 0
    assert losses(events) == pytest.approx([entry["loss"] for entry in expected], rel=1e-4)
    for ours, theirs in (("rewards/margins", "margin"), ("rewards/accuracies", "accuracy"), ("num_tokens",) * 2):
        found = [point.metrics[ours] for point in of_kind(events, Progress)]
        assert found == pytest.approx([entry[theirs] for entry in expected], rel=1e-4, abs=1e-5), ours


@pytest.mark.parametrize(("lora", "dtype"), [(LORA, "bf16"), *in_full((None, "fp32"), (LORA, "fp32"))])
def test_a_language_model_becomes_a_reward_model_that_prefers_chosen_answers(
    tmp_path: Path, lora: Any, dtype: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    faster = OptimizerSpec(learning_rate=5e-3)
    spec = spec_of(tmp_path, "reward", lora=lora, dtype=dtype, n_epochs=2, optimizer=faster)
    status, events = run(tmp_path, spec, estimates=True)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert losses(events)[-1] < 0.7 * losses(events)[0]
    assert of_kind(events, Evaluated)[-1].metrics["eval_rewards/accuracies"] == 1.0
    effective = of_kind(events, Prepared)[0].effective
    assert effective["padding_free"] == "not used: a reward is read at the end of a row"
    assert effective["head_gradients"] == "not used: the method has a head of its own"
    assert effective["memory"]["fits"]
    final = of_kind(events, CheckpointSaved)[-1]
    if lora:
        base = AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)
        loaded: Any = PeftModel.from_pretrained(base, final.path)
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(final.path)
    tokenizer = AutoTokenizer.from_pretrained(final.path)
    rewards = {}
    for answer in ("chosen", "rejected"):
        turns = [{"role": "user", "content": ROWS[30]["prompt"]}, {"role": "assistant", "content": ROWS[30][answer]}]
        given = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            rewards[answer] = float(loaded.eval()(**given).logits)
    assert rewards["chosen"] > rewards["rejected"]
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    resumed = run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-4")[1]
    assert losses(resumed) == losses(events)[4:]


def assert_equal(method: str, one: list[Any], other: list[Any]) -> None:
    """Metrics of two trainings agree to 1e-4 at every point.

    KTO's KL and rewards are differences of log-probabilities, which are about 100 here: 1e-4 is 1e-6 of these.
    """
    for point, again in zip(numbers(one), numbers(other), strict=True):
        assert point.keys() == again.keys()
        for name in point:
            is_difference = method in KTO and ("rewards/" in name or name.endswith("kl"))
            absolute = 1e-4 if is_difference else 1e-5
            assert point[name] == pytest.approx(again[name], rel=1e-4, abs=absolute), name


def spec_of(root: Path, name: str, ranks: int = 1, **changes: Any) -> JobSpec:
    """Eleven rows in steps of four, two epochs (seven by command): the last batch of an epoch is not full."""
    others = ("kto", KTO[name]) if name in KTO else ("reward", REWARDS.get(name))
    algorithm, parameters = METHODS.get(name, others)
    rows = UNPAIRED if name in KTO else ROWS
    fields = {
        "rows": rows[:11],
        "validation_rows": rows[11:16],
        "n_epochs": 7 if FULL else 2,
        "ranks": ranks,
        "batch_size": 2 // ranks,
        "gradient_accumulation_steps": 2,
        "sharding": ShardingSpec() if ranks > 1 else None,
        # At 5e-3 rounding moves KTO's KL by 2e-3 in 20 steps, also between batches with and without padding.
        "optimizer": OptimizerSpec(learning_rate=1e-3),
        "method": parameters,
        "save_steps": 2,
    }
    return job_spec(root, tiny_model(), algorithm, **{**fields, **changes})


@IN_FULL  # tests/process/test_rows_by_method.py
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_sharded_ranks_train_what_one_process_trains_and_continue_exactly(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    status, alone = run(tmp_path / "alone", spec_of(tmp_path / "alone", name))
    assert status == 0
    spec = spec_of(tmp_path / "together", name, 2)
    codes, together = ranks.run(tmp_path / "run", spec)
    assert codes == [0, 0], [event.message for event in of_kind(together, Failed)]
    assert of_kind(together, Prepared)[0].effective["sharding"]["strategy"] == "FULL_SHARD"
    assert_equal(name, alone, together)
    weights = (spec.checkpoint_dir / "final" / "model.safetensors").read_bytes()
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    # In the middle of the second epoch, whose order of rows is not the first one's.
    codes, resumed = ranks.run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-4")
    assert codes == [0, 0]
    assert of_kind(resumed, Progress)[0].step == 5
    assert losses(resumed) == losses(together)[4:]
    assert (spec.checkpoint_dir / "final" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("name", ["orpo", "kto", *in_full("cpo", "simpo")])
def test_the_split_into_batches_changes_no_number_and_the_export_loads(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    one = spec_of(tmp_path / "one", name, batch_size=4, gradient_accumulation_steps=1)
    _, whole = run(tmp_path / "one", one, estimates=True)
    status, parts = run(tmp_path / "parts", spec_of(tmp_path / "parts", name, padding_free=False))
    assert status == 0
    assert_equal(name, whole, parts)
    (evaluation, *_) = of_kind(whole, Evaluated)
    measured = "eval_kl" if name == "kto" else "eval_rewards/accuracies"
    assert {"eval_loss", measured, "eval_rewards/margins"} <= evaluation.metrics.keys()
    effective = of_kind(whole, Prepared)[0].effective
    expected = "not used: ORPO's loss covers prompts too" if name == "orpo" else "used"
    assert effective["padding_free"] == expected
    assert effective["memory"]["fits"]
    final = of_kind(whole, CheckpointSaved)[-1]
    assert AutoModelForCausalLM.from_pretrained(final.path).config.model_type == "llama"


def test_a_method_trains_adapters(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec = spec_of(tmp_path, "orpo", lora=LORA, merge_adapter=True)
    status, events = run(tmp_path, spec)
    assert status == 0
    assert losses(events)[-1] < losses(events)[0]
    assert [saved.kind for saved in of_kind(events, CheckpointSaved)][-2:] == ["final", "merged"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model())
    assert PeftModel.from_pretrained(base, spec.checkpoint_dir / "final").peft_config
