"""Distillation from a teacher with another vocabulary: how it is requested, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.inputs.of_methods import with_teacher
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.methods import DistillationSpec, UldSpec
from tests.unit.based_jobs import request
from tests.unit.teacher_requests import method_of, spec_of
from tests.unit.teacher_requests import settings as settings


def test_spans_are_compared_as_requested(settings: Settings) -> None:
    assert method_of(spec_of({}, settings)).uld is None
    assert method_of(spec_of({"use_uld_loss": False, "beta": 0.3}, settings)).uld is None
    assert method_of(spec_of({"use_uld_loss": True}, settings)).uld == UldSpec()
    given = {
        "use_uld_loss": True,
        "uld_token_merge_strategy": "bayesian",
        "uld_use_hybrid_loss": True,
        "uld_hybrid_matched_weight": 2,
        "uld_hybrid_unmatched_weight": 0,
        "uld_crossentropy_weight": 0,
        "uld_distillation_weight": 0.5,
        "uld_student_temperature": 0.8,
        "uld_teacher_temperature": 1.5,
        "uld_skip_student_eos": False,
        "uld_skip_teacher_eos": False,
    }
    method = method_of(spec_of(given, settings))
    assert method.beta == 0.5
    assert method.uld == UldSpec(
        student_temperature=0.8,
        teacher_temperature=1.5,
        distillation_weight=0.5,
        hybrid=True,
        matched_weight=2,
        unmatched_weight=0,
        skip_end=False,
    )
    assert method_of(spec_of({**given, "beta": 0.2}, settings)).beta == 0.2


@pytest.mark.parametrize("name", ["uld_skip_student_eos", "uld_skip_teacher_eos"])
@pytest.mark.parametrize("skips", [True, False])
def test_one_field_decides_on_the_ends_of_answers_in_both(settings: Settings, name: str, skips: bool) -> None:
    assert method_of(spec_of({"use_uld_loss": True, name: skips}, settings)).uld == UldSpec(skip_end=skips)


ULD = {"use_uld_loss": True}
HYBRID = {**ULD, "uld_use_hybrid_loss": True}


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"uld_use_hybrid_loss": True}, "uld_use_hybrid_loss", "it belongs to use_uld_loss"),
        ({"uld_student_temperature": 1}, "uld_student_temperature", "it belongs to use_uld_loss"),
        ({"use_uld_loss": False, "uld_skip_student_eos": True}, "uld_skip_student_eos", "it belongs to use_uld_loss"),
        ({**ULD, "uld_token_merge_strategy": "observed"}, "uld_token_merge_strategy", "send 'bayesian'"),
        ({**ULD, "uld_token_merge_strategy": "mean"}, "uld_token_merge_strategy", "send 'bayesian'"),
        ({**ULD, "uld_crossentropy_weight": 0.1}, "uld_crossentropy_weight", "teaches it nothing"),
        ({**ULD, "uld_distillation_weight": 0}, "uld_distillation_weight", "greater than 0"),
        ({**ULD, "uld_teacher_temperature": 0}, "uld_teacher_temperature", "greater than 0"),
        ({**ULD, "beta": 0.5}, "beta", "it belongs to uld_use_hybrid_loss"),
        ({**ULD, "uld_hybrid_matched_weight": 1}, "uld_hybrid_matched_weight", "it belongs to uld_use_hybrid_loss"),
        ({**HYBRID, "uld_hybrid_matched_weight": 1}, "uld_hybrid_matched_weight", "send uld_hybrid_unmatched_weight"),
        ({**HYBRID, "uld_hybrid_unmatched_weight": 1}, "uld_hybrid_unmatched_weight", "send uld_hybrid_matched_weight"),
        (
            {**HYBRID, "uld_hybrid_matched_weight": 0, "uld_hybrid_unmatched_weight": 0},
            "uld_hybrid_matched_weight",
            "nothing is learned",
        ),
        (
            {**HYBRID, "uld_hybrid_matched_weight": -1, "uld_hybrid_unmatched_weight": 0},
            "uld_hybrid_matched_weight",
            "greater than or equal to 0",
        ),
        (
            {**ULD, "uld_skip_student_eos": False, "uld_skip_teacher_eos": True},
            "uld_skip_teacher_eos",
            "in both or in none",
        ),
        (
            {**ULD, "uld_skip_student_eos": True, "uld_skip_teacher_eos": False},
            "uld_skip_teacher_eos",
            "in both or in none",
        ),
        ({**ULD, "use_extended_uld": False}, "use_extended_uld", "distillation has no such field"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(settings: Settings, config: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(config, settings)
    assert refused.value.field == f"algorithm_config.{field}"
    assert words in str(refused.value)


def test_another_vocabulary_is_refused_with_the_hint_to_compare_spans_and_accepted_with_that(
    settings: Settings, tmp_path: Path
) -> None:
    for name, vocab in (("student", {"a": 0, "b": 1}), ("other", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    config = {"type": "distillation", "teacher": str(tmp_path / "other")}

    def resolved(config: dict[str, Any]) -> dict[str, Any]:
        body = request(str(tmp_path / "student"), "dpo", algorithm_config=config)
        return with_teacher(resolve(body, ProviderOptions(), settings).fields, settings, None)

    with pytest.raises(InvalidRequest, match=r"or set algorithm_config\.use_uld_loss: it compares others") as refused:
        resolved(config)
    assert refused.value.field == "algorithm_config.teacher"
    method = resolved({**config, **ULD})["method"]
    assert isinstance(method, DistillationSpec)
    assert method.uld == UldSpec()
