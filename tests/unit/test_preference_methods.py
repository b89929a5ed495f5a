"""How preference methods beside DPO are requested, and what is refused of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.requests.bodies import (
    SupervisedFineTuneRequest,
    algorithm_of,
)
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.preference import REQUESTED
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import with_parts
from llama_stack_provider_trl.specs.custom import ALGORITHMS
from llama_stack_provider_trl.specs.job import Algorithm, RowNames
from llama_stack_provider_trl.specs.methods import METHODS, CpoSpec, KtoSpec, OrpoSpec, RewardSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, check_rows, parse_row
from llama_stack_provider_trl_remote.service.http.bodies import PreflightBody
from tests.tiny import REPOSITORY
from tests.unit.preference_requests import request, resolved, spec_of

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("config", "algorithm", "expected"),
    [
        ({"type": "orpo"}, "orpo", OrpoSpec()),
        ({"type": "orpo", "beta": 0.5}, "orpo", OrpoSpec(beta=0.5)),
        ({"type": "cpo"}, "cpo", CpoSpec(loss_type="sigmoid", beta=0.1, alpha=1.0)),
        ({"type": "cpo", "loss_type": "ipo", "alpha": 0.0}, "cpo", CpoSpec(loss_type="ipo", alpha=0.0)),
        ({"type": "simpo"}, "simpo", CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.0, gamma=0.5, alpha=0.0)),
        ({"type": "simpo", "beta": 2.5, "gamma": 1.0, "alpha": 0.1}, "simpo", None),
    ],
)
def test_a_method_gets_its_parameters(config: Any, algorithm: str, expected: Any) -> None:
    spec = spec_of(config)
    expected = expected or CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.5, gamma=1.0, alpha=0.1)
    assert (spec.algorithm, spec.method) == (algorithm, expected)
    assert spec_of(None, method=config).method == expected
    assert spec.train.optimizer.learning_rate == 1e-6
    assert spec_of(config, lora={"rank": 4}).train.optimizer.learning_rate == 1e-5


def test_a_reward_model_gets_its_parameter_and_its_own_learning_rates() -> None:
    spec = spec_of({"type": "reward", "center_rewards_coefficient": 0.01})
    assert (spec.algorithm, spec.method) == ("reward", RewardSpec(center_rewards_coefficient=0.01))
    assert (spec.trains_reward, spec.has_pairs) == (True, True)
    assert spec.train.optimizer.learning_rate == 1e-4
    assert spec_of({"type": "reward"}, lora={"rank": 4}).train.optimizer.learning_rate == 1e-3


def test_rows_of_a_reward_model_are_read_with_margins_where_it_has_them() -> None:
    spec = spec_of({"type": "reward", "margin": True})
    assert spec.method == RewardSpec(margin=True)
    assert spec.data.dataset.names == RowNames(margins=True)
    named = spec_of({"type": "reward", "margin": True}, columns={"margin": "gap"}).data.dataset.names
    assert named == RowNames(columns={"margin": "gap"}, margins=True)
    assert spec_of({"type": "reward"}).data.dataset.names is None
    for method in ("dpo", "orpo", "kto"):
        with pytest.raises(InvalidRequest, match=r"algorithm_config\.margin"):
            spec_of({"type": method, "margin": True})


MANY = {"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}


@pytest.mark.parametrize(
    ("row", "margins"),
    [
        ({**PAIR, "margin": 0.5}, [0.5]),
        ({**PAIR, "margin": "2", "score_chosen": 9, "score_rejected": 1}, [2.0]),
        ({**PAIR, "score_chosen": 9, "score_rejected": 1.5}, [7.5]),
        ({**MANY, "margin": [1, 0]}, [1, 0]),
        ({**MANY, "score_chosen": 3, "score_rejected": [1, 2]}, [2, 1]),
        ({"prompt": "a", "responses": ["b", "c", "d"], "scores": [0.5, 2, 0.5]}, [1.5, 1.5]),
        ({"instruction": "a", "completions": [{"response": r, "overall_score": len(r)} for r in ("b", "cc")]}, [1]),
    ],
)
def test_the_margin_of_a_pair_is_its_column_or_the_difference_of_its_scores(row: Any, margins: list[float]) -> None:
    example = parse_row(row, 0, "reward", names=RowNames(margins=True))
    assert isinstance(example, PreferenceExample)
    assert example.margins == margins
    assert len(example.pairs) == len(margins)
    plain = parse_row(row, 0, "dpo")
    assert isinstance(plain, PreferenceExample)
    assert plain.margins is None
    assert plain.answers == example.answers


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PAIR, "row 0: column margin: found neither a margin nor scores, expected column margin, or scores of both"),
        ({"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2]}, "found neither a margin nor scores"),
        ({**PAIR, "margin": -0.1}, "column margin: found -0.1, expected a number from 0 to 1000000"),
        ({**PAIR, "margin": 1e9}, "expected a number from 0 to 1000000"),
        (
            {**PAIR, "score_chosen": 2e6, "score_rejected": 0},
            "column score_chosen, score_rejected: found scores that differ by 2000000.0, expected at most 1000000",
        ),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [2000000, 0]}, "column scores: found scores that differ"),
        ({**PAIR, "margin": "much"}, "column margin: found text 'much', expected a number"),
        ({**MANY, "margin": 1}, "column margin: found 1 margins, expected 2, one for each rejected answer"),
    ],
)
def test_a_pair_without_a_margin_is_refused_by_its_row_and_column(row: Any, words: str) -> None:
    with pytest.raises(InvalidRows, match=re.escape(words)):
        check_rows([row], "reward", names=RowNames(margins=True))
    check_rows([row], "reward")


def test_margins_that_no_loss_reads_are_named() -> None:
    row = {**PAIR, "margin": 0.5}
    assert check_rows([row], "reward").warnings == ["columns never read: margin"]
    assert check_rows([row], "reward", names=RowNames(margins=True)).warnings == []


def test_kto_gets_its_parameters_and_the_reference_of_dpo(tmp_path: Path) -> None:
    given = {"type": "kto", "beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.0}
    spec = spec_of(given, reference_model="org/reference")
    assert spec.algorithm == "kto"
    assert isinstance(spec.method, KtoSpec)
    assert spec.method.model_dump(exclude={"algorithm", "loss_type", "reference"}) == {
        name: value for name, value in given.items() if name != "type"
    }
    assert spec.reference_source.model == "org/reference"
    moved = with_parts(spec, ModelSource, lambda source: source.model_copy(update={"path": tmp_path}))
    assert moved.reference_source.directory == moved.source.directory == tmp_path
    assert moved.without_model_paths() == spec
    assert spec_of({"type": "kto"}).method == KtoSpec()
    assert spec_of({"type": "kto", "loss_type": "apo_zero_unpaired"}).method == KtoSpec(loss_type="apo_zero_unpaired")


def test_kto_reads_labelled_answers_and_names_what_other_rows_lack() -> None:
    chat = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    rows = [{"prompt": "a", "completion": "b", "label": False}, {**chat, "label": True}]
    assert check_rows(rows, "kto").shapes == {"prompt + completion + label": 2}
    for text, label in (("true", True), ("TRUE", True), (" False ", False), ("false", False)):  # cells of CSV files
        found = parse_row({**chat, "label": text}, 0, "kto")
        assert found == LabelledExample(chat["prompt"], chat["completion"], label)
    for row, use, words in (
        (PAIR, "kto", "write each as two rows"),
        ({"prompt": "a", "completion": "b"}, "kto", "These rows lack a label"),
        ({"prompt": "a", "completion": "b", "label": 1}, "kto", "column label: found a number 1, expected true"),
        (
            {"prompt": "a", "completion": "b", "label": "0"},
            "kto",
            "found text '0', expected true (desirable) or false: a",
        ),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "kto", "found text 'yes', expected true (desirable) or f"),
        ({"prompt": "a", "completion": "", "label": True}, "kto", "column completion: found blank text"),
        ({"prompt": "a", "completion": "b", "label": True}, "dpo", "was the type kto meant"),
    ):
        with pytest.raises(InvalidRows, match="row 1") as refused:
            check_rows([rows[0] if use == "kto" else PAIR, row], use)  # type: ignore[arg-type]
        assert words in str(refused.value)


def test_kto_refuses_a_step_of_one_row() -> None:
    settings = Settings(data_dir=Path("/data"), devices=("cpu",))
    with pytest.raises(InvalidRequest, match="answer of another row") as refused:
        resolve(request({"type": "kto"}, batch_size=1), ProviderOptions(), settings)
    assert refused.value.field == "training_config.data_config.batch_size"
    without_kl = {"type": "kto", "loss_type": "apo_zero_unpaired"}
    assert resolve(request(without_kl, batch_size=1), ProviderOptions(), settings).fields["batch_size"] == 1


def test_smoothed_labels_reach_the_losses_that_have_them() -> None:
    for config in ({"type": "cpo"}, {"type": "simpo"}):
        method = spec_of(config, label_smoothing=0.1).method
        assert isinstance(method, CpoSpec)
        assert method.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({"type": "orpo", "gamma": 0.5}, {}, "algorithm_config.gamma", "ORPO has no such field"),
        ({"type": "orpo", "loss_type": "sigmoid"}, {}, "algorithm_config.loss_type", "its fields are: type, beta"),
        ({"type": "orpo", "betta": 0.5}, {}, "algorithm_config.betta", "; the nearest is 'beta'; its fields are: type"),
        ({"type": "cpo", "gamma": 0.5}, {}, "algorithm_config.gamma", "CPO has no such field"),
        ({"type": "simpo", "reward_clip": 1.0}, {}, "algorithm_config.reward_clip", "SimPO has no such field"),
        ({"type": "orpo", "beta": 0.0}, {}, "algorithm_config.beta", "greater than 0"),
        ({"type": "cpo", "beta": float("inf")}, {}, "algorithm_config.beta", "finite"),
        ({"type": "cpo", "loss_type": "simpo"}, {}, "algorithm_config.loss_type", "send the type 'simpo'"),
        ({"type": "cpo", "loss_type": "hing"}, {}, "algorithm_config.loss_type", "the nearest is 'hinge'"),
        ({"type": "opro"}, {}, "algorithm_config.type", "the nearest is 'orpo'"),
        ({"type": ["orpo"]}, {}, "algorithm_config.type", "string"),
        ({"type": "orpo"}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "ORPO has no form"),
        ({"type": "orpo"}, {"reference_model": "org/b"}, "provider_options.reference_model", "no reference model"),
        (
            {"type": "cpo", "loss_type": "hinge"},
            {"label_smoothing": 0.1},
            "provider_options.label_smoothing",
            "the loss hinge has no form",
        ),
        (
            {"type": "simpo"},
            {"precompute_reference": True},
            "provider_options.precompute_reference",
            "SimPO has no reference model",
        ),
        ({"type": "kto", "gamma": 0.1}, {}, "algorithm_config.gamma", "KTO has no such field"),
        (
            {"type": "kto", "loss_type": "bco"},
            {},
            "algorithm_config.loss_type",
            "expected one of kto, apo_zero_unpaired",
        ),
        ({"type": "kto", "desirable_weight": -1}, {}, "algorithm_config.desirable_weight", "greater than or equal"),
        (
            {"type": "kto", "desirable_weight": 0, "undesirable_weight": 0},
            {},
            "algorithm_config.desirable_weight",
            "no row has a loss",
        ),
        ({"type": "kto"}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "KTO has no form"),
        (
            {"type": "kto"},
            {"precompute_reference": True},
            "provider_options.precompute_reference",
            "which differs in every epoch",
        ),
        ({"type": "reward", "beta": 0.1}, {}, "algorithm_config.beta", "a reward model has no such field"),
        (
            {"type": "reward"},
            {"label_smoothing": 0.1},
            "provider_options.label_smoothing",
            "a reward model has no form",
        ),
        ({"type": "reward"}, {"samples": {"prompts": ["a"]}}, "provider_options.samples", "writes no text"),
        ({"type": "reward"}, {"merge_adapter": True, "lora": {}}, "provider_options.merge_adapter", "is not merged"),
        ({"type": "reward"}, {"peft_method": "ia3", "lora": {}}, "provider_options.peft_method", "plain LoRA only"),
        ({"type": "reward"}, {"adapter": "merge"}, "provider_options.adapter", ""),
        (
            {"type": "reward"},
            {"lora": {"quantize_base": True}},
            "provider_options.lora.quantize_base",
            "plain LoRA only",
        ),
        ({"type": "reward"}, {"lora": {"use_dora": True}}, "provider_options.lora.use_dora", "plain LoRA only"),
        (
            None,
            {"method": {"beta": 0.1}},
            "provider_options.method.type",
            "expected one of orpo, cpo, simpo, reward, kto",
        ),
        (None, {"method": {"type": "dpo"}}, "provider_options.method.type", "DPO has its fields in algorithm_config"),
        (None, {"method": {"type": "orpo", "gama": 1}}, "provider_options.method.gama", "ORPO has no such field"),
        ({"type": "cpo"}, {"method": {"type": "orpo"}}, "algorithm_config.type", "send one of them"),
    ],
)
def test_what_a_method_does_not_have_is_refused_by_name(config: Any, options: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolved(config, **options)
    assert refused.value.field == field
    assert words in str(refused.value)


def test_the_option_belongs_to_preference_optimize() -> None:
    options = ProviderOptions.parse({"method": {"type": "orpo"}})
    with pytest.raises(InvalidRequest, match="belongs to the call preference-optimize"):
        resolve(request(kind=SupervisedFineTuneRequest), options, Settings(data_dir=Path("/data"), devices=("cpu",)))


def test_dpo_fields_that_a_release_requires_beside_the_option_are_noted() -> None:
    found = resolved({"beta": 0.1, "loss_type": "sigmoid"}, method={"type": "simpo", "beta": 2.5})
    assert found.fields["method"].beta == 2.5
    (warning,) = found.warnings
    assert warning.startswith("algorithm_config.beta, algorithm_config.loss_type: no effect")


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.call == "dpo"])
def test_a_body_with_a_preference_method_is_meant_for_preference_optimize(name: str) -> None:
    assert algorithm_of({"algorithm_config": {"type": name}}) == "dpo"
    assert algorithm_of({"provider_options": {"method": {"type": name}}}) == "dpo"
    assert algorithm_of({"algorithm_config": {"type": "LoRA"}, "provider_options": {}}) == "sft"


@pytest.mark.parametrize("algorithm", ["orpo", "reward"])
def test_a_preflight_names_the_call_and_no_method(algorithm: str) -> None:
    body = request({"type": "orpo"}).model_dump(exclude_unset=True)
    assert PreflightBody.model_validate({**body, "algorithm": "dpo"}).algorithm == "dpo"
    with pytest.raises(ValidationError, match="'sft' or 'dpo'"):
        PreflightBody.model_validate({**body, "algorithm": algorithm})


def test_every_method_has_its_entries() -> None:
    assert set(METHODS) == set(get_args(Algorithm)) == {"sft", "dpo", *REQUESTED, *ALGORITHMS.values()}


def test_pairs_are_checked_for_a_preference_method() -> None:
    assert check_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "orpo").num_rows == 1
    with pytest.raises(InvalidRows, match=r"expected for SimPO one of: prompt \+ chosen \+ rejected") as refused:
        check_rows([{"prompt": "a", "completion": "b"}], "simpo")
    assert "These columns are SFT's: was POST /v1/post-training/supervised-fine-tune meant?" in str(refused.value)


def test_the_page_lists_the_fields_of_every_method() -> None:
    text = (REPOSITORY / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    fields = {(name, field) for name, one in REQUESTED.items() for field in one.fields.model_fields if field != "type"}
    assert set(listed) == fields
