"""Files of a model that do not agree with each other: the job completes with a warning, or is refused in one sentence
before its first step. `TRL_TESTS=full` tries every kind of each damage on every architecture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.trainer_utils import align_special_tokens

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.answers.by_transformers import TransformersAnswerer
from llama_stack_provider_trl.recipes.build import build_trainer
from llama_stack_provider_trl.recipes.model.agreement import read_generation_config
from llama_stack_provider_trl.recipes.model.saving import write_configuration
from llama_stack_provider_trl.recipes.preflight import preflight_attempt
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    EventWriter,
    Failed,
    Preflighted,
    Previewed,
    Reason,
    Warned,
    iter_events,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec, OptimizerSpec, SampleMessage, SamplesSpec
from llama_stack_provider_trl.specs.methods import DistillationSpec, GrpoSpec, KtoSpec, RewardSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.preflight import PreflightSpec, PreviewSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.work import GenerateSpec
from tests.process.stored_models import ARCHITECTURES, VOCABULARY, whole
from tests.required import FULL
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, of_kind, reference_to, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

assert len(ARCHITECTURES) == 22
NEW = "<new>"
UNWRITABLE: tuple[dict[str, Any], ...] = (
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
    {"top_k": 5},
    {"typical_p": 0.5, "min_p": 0.1},
    {"num_return_sequences": 3},
    {"num_beams": 2, "num_return_sequences": 3},
    {"early_stopping": True, "length_penalty": 2.0},
    {"early_stopping": "soon"},
    {"max_new_tokens": -1},
    {"max_new_tokens": "many"},
    {"temperature": "0.5"},
    {"suppress_tokens": 5, "forced_eos_token_id": 5},
    {"suppress_tokens": [2], "forced_eos_token_id": 2},
    {"cache_implementation": "none such"},
    {"watermarking_config": {"greenlist_ratio": 2.0}},
    {"compile_config": {"mode": "default"}},
    {"pad_token_id": -1},
    {"eos_token_id": "</s>"},
    {"output_scores": True},
)
"""Values of generation_config.json that transformers refuses to write, and a part of them to read."""


def changed(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


def with_generation(number: int) -> Callable[[Path], None]:
    return lambda model: changed(model / "generation_config.json", **UNWRITABLE[number])


def with_generation_in_config(model: Path) -> None:
    (model / "generation_config.json").unlink(missing_ok=True)
    changed(model / "config.json", do_sample=False, temperature=0.6)


def with_token(**special: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_special_tokens(special)
        tokenizer.save_pretrained(model)

    return spoil


def with_pad_in_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config.get("text_config", config)["pad_token_id"] = VOCABULARY
    (model / "config.json").write_text(json.dumps(config))


DAMAGES: dict[str, dict[str, Callable[[Path], None]]] = {
    "generation config": {
        **{
            "-".join((*values, *([str(again)] if again else []))): with_generation(number)
            for number, values in enumerate(UNWRITABLE)
            for again in [sum(values.keys() == earlier.keys() for earlier in UNWRITABLE[:number])]
        },
        "in config.json": with_generation_in_config,
    },
    "pad": {"tokenizer": with_token(pad_token="[PAD]"), "config": with_pad_in_config},
    "row": {
        "added": with_token(additional_special_tokens=[NEW]),
        "eos": with_token(eos_token=NEW),
    },
}
"""What is wrong with one file by itself, and another vocabulary: test_model_checks.py, test_damaged_models.py."""
assert len(DAMAGES["generation config"]) == len(UNWRITABLE) + 1
CELLS = [
    pytest.param(architecture, damage, variant, id=f"{architecture}-{damage}-{variant}")
    for number, architecture in enumerate(ARCHITECTURES)
    for damage, variants in DAMAGES.items()
    for variant in variants
    # In CI every variant on one architecture, every damage on one whose configuration is in parts.
    if FULL or architecture == "llama" or (architecture == "gemma3" and variant == [*variants][number % len(variants)])
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def damaged(source: Path, target: Path, spoil: Callable[[Path], None]) -> Path:
    shutil.copytree(source, target)
    spoil(target)
    return target


def outcome(root: Path, spec: JobSpec) -> tuple[list[str], Path] | JobFailure:
    """Warnings of a job that can be trained, and the files of its export beside the weights; or how it is refused
    before its first step."""
    events = root / "events.jsonl"
    try:
        built = build_trainer(spec, torch.device("cpu"), EventWriter(events))
    except JobFailure as failure:
        return failure
    align_special_tokens(built.trainer.model, built.trainer.processing_class)  # as Trainer does before the first step
    write_configuration(built.policy.model, root / "export", torch.float32)
    built.trainer.processing_class.save_pretrained(root / "export")
    return [event.message for event in of_kind(iter_events(events), Warned)], root / "export"


@pytest.mark.parametrize(("architecture", "damage", "variant"), CELLS)
def test_files_that_do_not_agree_are_repaired_or_refused_before_the_first_step(
    tmp_path: Path, models: Path, architecture: str, damage: str, variant: str
) -> None:
    model = damaged(whole(models, architecture), tmp_path / "model", DAMAGES[damage][variant])
    rows = [*SFT_ROWS[:3], {"prompt": "Write", "completion": NEW if damage == "row" else "it"}]
    spec = job_spec(tmp_path, model, rows=rows, preflight="off", padding_free=False, max_seq_length=64)
    found = outcome(tmp_path, spec)
    if isinstance(found, JobFailure):
        assert found.reason == Reason.invalid_model
        assert damage == "row" or variant == "config"
        named = f"config.json has pad_token_id {VOCABULARY}" if damage == "pad" else f"for the token {NEW!r}"
        assert named in found.message
        assert f"the model has {VOCABULARY} embeddings" in found.message
        assert damage != "row" or "row 3 of the dataset 'rows'" in found.message
        return
    warnings, export = found
    assert damage != "row"
    written = AutoConfig.from_pretrained(export)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(written)
    pad = written.get_text_config().pad_token_id
    assert pad is None or pad < VOCABULARY
    assert AutoTokenizer.from_pretrained(export).pad_token_id < VOCABULARY
    GenerationConfig.from_pretrained(export).validate(strict=True)
    if variant != "config":
        assert any(("cannot write" in warning or "pads with" in warning) for warning in warnings)


@pytest.fixture
def llama(models: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    return lambda damage, variant: damaged(whole(models, "llama"), tmp_path / "model", DAMAGES[damage][variant])


@pytest.mark.parametrize(
    ("damage", "variant", "changes"),
    [
        ("generation config", "do_sample-temperature-top_p", {"save_steps": 1}),
        ("generation config", "early_stopping", {"lora": LORA, "merge_adapter": True}),
        ("pad", "tokenizer", {"save_steps": 1, "padding_free": False}),
        ("pad", "tokenizer", {"lora": LORA, "merge_adapter": True, "algorithm": "dpo", "rows": DPO_ROWS[:4]}),
        ("pad", "tokenizer", {"algorithm": "reward", "rows": DPO_ROWS[:4], "method": RewardSpec()}),
    ],
    ids=["generation", "generation-merged", "pad", "pad-pairs-merged", "pad-reward"],
)
def test_a_job_on_files_that_were_repaired_completes_and_its_checkpoints_load(
    tmp_path: Path, llama: Callable[[str, str], Path], damage: str, variant: str, changes: dict[str, Any]
) -> None:
    model = llama(damage, variant)
    fields = {"algorithm": "sft", "rows": SFT_ROWS[:4], "max_seq_length": 64, **changes}
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, fields.pop("algorithm"), **fields))
    assert (status, of_kind(events, Failed)) == (0, [])
    (warning,) = [event.message for event in of_kind(events, Warned) if str(model) in event.message]
    assert ("generation_config.json of" in warning) == (damage == "generation config")
    for saved in of_kind(events, CheckpointSaved):
        if not (saved.path / "config.json").exists():
            continue  # an adapter
        assert AutoConfig.from_pretrained(saved.path).pad_token_id in (0, 2)
        assert AutoTokenizer.from_pretrained(saved.path).pad_token_id < VOCABULARY
        auto = AutoModelForSequenceClassification if fields.get("method") else AutoModelForCausalLM
        loaded = auto.from_pretrained(saved.path)
        if not fields.get("method"):
            assert (loaded.generation_config.temperature, loaded.generation_config.early_stopping) == (None, None)


@pytest.mark.parametrize(
    ("values", "written", "change"),
    [
        (
            {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]},
            "what is exported has do_sample true for temperature 0.6, top_p 0.9",
        ),
        (
            {"do_sample": False, "temperature": 0.6, "max_new_tokens": 9, "eos_token_id": [2, 5]},
            {"do_sample": False, "max_new_tokens": 9, "eos_token_id": [2, 5]},
            "what is exported lacks temperature 0.6",
        ),
        (
            {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, "</s>", 5, -1]},
            {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 5]},
            "what is exported has eos_token_id [2, 5] for [2, '</s>', 5, -1]",
        ),
        (
            {"suppress_tokens": [1, 2, 3], "forced_eos_token_id": 2},
            {"suppress_tokens": [1, 3], "forced_eos_token_id": 2},
            "what is exported has suppress_tokens [1, 3] for [1, 2, 3]",
        ),
        (
            {"top_k": 5, "cache_implementation": "none", "max_new_tokens": -1},
            {"do_sample": True, "top_k": 5},
            "what is exported has do_sample true for top_k 5; lacks cache_implementation 'none', max_new_tokens -1",
        ),
    ],
)
def test_of_a_generation_configuration_only_what_cannot_be_written_is_changed(
    models: Path, tmp_path: Path, values: dict[str, Any], written: dict[str, Any], change: str
) -> None:
    model = damaged(whole(models, "llama"), tmp_path / "model", lambda _: None)
    (model / "generation_config.json").write_text(json.dumps(values))
    config, warning = read_generation_config(ModelSource(model=str(model)))
    assert warning.endswith(change)
    config.pad_token_id = 0  # as a trainer sets it
    config.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert {
        name: value for name, value in found.items() if name not in ("pad_token_id", "transformers_version")
    } == written


@pytest.mark.parametrize("content", ["", "[]", "null"])
def test_an_empty_generation_configuration_is_what_the_configuration_has(
    models: Path, tmp_path: Path, content: str
) -> None:
    model = damaged(whole(models, "llama"), tmp_path / "model", lambda _: None)
    (model / "generation_config.json").write_text(content)
    changed(model / "config.json", eos_token_id=[2, 5])
    spec = job_spec(tmp_path, model, preflight="off", max_seq_length=64)
    warnings, export = outcome(tmp_path, spec)
    assert any("generation_config.json of" in one and "holds no values" in one for one in warnings)
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


ROWS: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "Write", "completion": NEW},
    "dpo": {"prompt": "Write", "chosen": "it", "rejected": NEW},
    "kto": {"prompt": f"Write {NEW}", "completion": "it", "label": True},
    "grpo": {"prompt": f"Write {NEW}"},
    "distillation": {"prompt": f"Write {NEW}"},
}
METHODS: dict[str, Any] = {
    "kto": KtoSpec(),
    "grpo": GrpoSpec(
        rewards=(RewardSource(name="regex", check=AnswerCheck(type="regex", pattern="[0-9]")),),
        max_completion_length=8,
    ),
    "distillation": DistillationSpec(reference=reference_to("the model"), max_completion_length=8),
}


@pytest.mark.parametrize("algorithm", ROWS)
@pytest.mark.parametrize("part", ["rows", "validation_rows"])
def test_a_token_without_an_embedding_is_refused_by_its_row_in_every_kind_of_rows(
    tmp_path: Path, llama: Callable[[str, str], Path], algorithm: str, part: str
) -> None:
    model = llama("row", "added")
    names = {"completion": "it", "chosen": "yes", "rejected": "no", "prompt": "Write", "label": True}
    fine = {name: names[name] for name in ROWS[algorithm]}
    rows = {"rows": [fine] * 2, part: [fine, ROWS[algorithm]]}
    method = METHODS.get(algorithm)
    if algorithm == "distillation":
        method = method.model_copy(update={"reference": reference_to(str(model))})
    spec = job_spec(tmp_path, model, algorithm, **rows, method=method, batch_size=1, max_seq_length=64)
    with pytest.raises(JobFailure) as caught:
        build_trainer(spec, torch.device("cpu"), EventWriter(tmp_path / "events.jsonl"))
    assert caught.value.reason == Reason.invalid_model
    assert f"row 1 of the dataset 'rows': the tokenizer gives id {VOCABULARY}" in caught.value.message


def test_a_prompt_of_samples_with_such_a_token_is_refused_by_its_number(
    tmp_path: Path, llama: Callable[[str, str], Path]
) -> None:
    prompts = tuple((SampleMessage(role="user", content=text),) for text in ("Write", NEW))
    samples = SamplesSpec(prompts=prompts, max_new_tokens=4)
    spec = job_spec(tmp_path, llama("row", "added"), samples=samples, max_seq_length=64)
    with pytest.raises(JobFailure, match=r"samples.prompts\[1\]: the tokenizer gives id .* for the token '<new>'"):
        build_trainer(spec, torch.device("cpu"))


def test_a_prompt_to_answer_with_such_a_token_is_refused_by_its_row(
    tmp_path: Path, llama: Callable[[str, str], Path]
) -> None:
    spec = job_spec(tmp_path, llama("row", "added"))
    work = GenerateSpec(
        output_dataset_id="a", max_new_tokens=4, temperature=1.0, top_p=1.0, seed=1, samples_per_prompt=1
    )
    answerer = TransformersAnswerer(spec, work, torch.device("cpu"))
    assert answerer.encode([{"role": "user", "content": "Write"}], 0)
    with pytest.raises(JobFailure, match=r"row 7: the tokenizer gives id .* for the token '<new>'"):
        answerer.encode([{"role": "user", "content": NEW}], 7)


@pytest.mark.parametrize(
    ("damage", "variant"), [("pad", "tokenizer"), ("generation config", "top_k"), ("row", "added")]
)
def test_a_preflight_finds_what_the_job_would(
    tmp_path: Path, llama: Callable[[str, str], Path], damage: str, variant: str
) -> None:
    rows = [{"prompt": "Write", "completion": f"{NEW} {'word ' * 80}"}]
    warmup = OptimizerSpec(learning_rate=1e-3, warmup_steps=9)
    more = {"lora": LORA.model_copy(update={"rank": 33})} if damage == "pad" else {}
    spec = job_spec(tmp_path, llama(damage, variant), rows=rows, max_seq_length=64, optimizer=warmup, **more)
    events = tmp_path / "events.jsonl"
    attempt = AttemptSpec(job=spec, attempt=1, run_dir=tmp_path, preflight=PreflightSpec(device="cpu"))
    shown = attempt.model_copy(update={"preflight": PreflightSpec(device="cpu", preview=PreviewSpec())})
    preflight_attempt(shown, EventWriter(events))
    (preview,) = of_kind(iter_events(events), Previewed)
    if damage == "row":
        with pytest.raises(JobFailure, match="row 0 of the dataset 'rows': the tokenizer gives id") as caught:
            preflight_attempt(attempt, EventWriter(events))
        assert f"the job fails: {caught.value.message}" in preview.warnings
        return
    preflight_attempt(attempt, EventWriter(events))
    (found,) = of_kind(iter_events(events), Preflighted)
    assert any(spec.source.model in warning for warning in found.warnings)
    assert any("the warmup of 9 steps" in warning for warning in found.warnings)
    assert any("were cut to max_seq_length=64" in warning for warning in found.warnings)
    assert any("rank 33 is larger than" in warning for warning in found.warnings) == (damage == "pad")
    assert preview.warnings == found.warnings


def test_the_files_of_a_model_that_agree_are_left_as_they_are(tmp_path: Path, models: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 5, "eos_token_id": [2, 5]}
    spoil = lambda model: changed(model / "generation_config.json", **values)  # noqa: E731
    spec = job_spec(tmp_path, damaged(whole(models, "llama"), tmp_path / "model", spoil), max_seq_length=64)
    found = outcome(tmp_path, spec)
    assert not isinstance(found, JobFailure)
    warnings, export = found
    assert not [warning for warning in warnings if spec.source.model in warning]
    written = json.loads((export / "generation_config.json").read_text())
    assert {name: written[name] for name in values} == values
    assert AutoTokenizer.from_pretrained(export).pad_token_id == 0
