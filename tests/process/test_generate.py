"""The recipe of `generate` jobs: how tokens are chosen, and that a batch gives the answers of each prompt alone."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.answers import by_transformers as transformers_answerer
from llama_stack_provider_trl.recipes.answers.by_transformers import TransformersAnswerer
from llama_stack_provider_trl.recipes.answers.generate import AnswerFile, Questions, _check_recorded
from llama_stack_provider_trl.recipes.model.generation import Sampler
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.work import GenerateSpec
from tests.tiny import tiny_model

pytestmark = pytest.mark.process


def work(**changes: object) -> GenerateSpec:
    fields = {"output_dataset_id": "a", "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "seed": 1}
    return GenerateSpec.model_validate({**fields, "samples_per_prompt": 1, **changes})


def spec_of(root: Path) -> JobSpec:
    rows = DatasetRef(dataset_id="r", path=root / "r", sha256="", num_rows=3)
    return JobSpec.of(
        **{"job_uuid": "g", "model": str(tiny_model()), "output_name": "g"},
        **{"checkpoint_dir": root, "dataset": rows, "n_epochs": 1, "batch_size": 4, "dtype": "fp32"},
        optimizer=OptimizerSpec(learning_rate=1e-3),
    )


def chosen(sampler: Sampler, scores: torch.Tensor) -> list[int]:
    return sampler(torch.zeros(len(scores), 1, dtype=torch.long), scores).argmax(-1).tolist()  # type: ignore[arg-type]


def test_tokens_are_chosen_with_their_probabilities_and_none_beyond_top_p() -> None:
    scores = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    counted: dict[float, Counter[int]] = {}
    for top_p in (1.0, 0.75):
        sampler = Sampler(work(top_p=top_p), [random.Random("a")], lambda: None)
        counted[top_p] = Counter(chosen(sampler, scores)[0] for _ in range(4000))
    shares = [counted[1.0][token] / 4000 for token in range(3)]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.03)
    assert [counted[0.75][token] / 4000 for token in range(3)] == pytest.approx([0, 0.625, 0.375], abs=0.03)
    cold = Sampler(work(temperature=0.01), [random.Random("b")], lambda: None)
    assert {chosen(cold, scores)[0] for _ in range(100)} == {1}
    coldest = Sampler(work(temperature=5e-324, top_p=5e-324), [random.Random("b")], lambda: None)
    assert chosen(coldest, scores) == [1]
    assert chosen(Sampler(work(temperature=0), [random.Random("c")], lambda: None), scores) == [1]


def test_the_choice_of_a_sequence_does_not_depend_on_the_others_of_its_batch() -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    alone = [chosen(Sampler(work(), [random.Random(str(n))], lambda: None), scores[n : n + 1])[0] for n in range(3)]
    together = chosen(Sampler(work(), [random.Random(str(n)) for n in range(3)], lambda: None), scores)
    assert together == alone


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_rounding_of_logits_changes_no_choice_among_tokens_that_are_nearly_as_probable(top_p: float) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = 0.02 * torch.randn(400, 1024, generator=generator)  # as of an untrained model
    found = [
        chosen(Sampler(work(top_p=top_p), [random.Random(str(n)) for n in range(400)], lambda: None), given)
        for given in (scores, scores + 1e-6 * torch.randn(scores.shape, generator=generator))
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) > 200


def test_a_number_next_to_1_gives_the_last_token_that_is_kept() -> None:
    class AlmostOne(random.Random):
        def random(self) -> float:
            return 1 - 2**-53

    scores = torch.log(torch.tensor([[0.2, 0.5, 0.1, 0.2]]))
    assert chosen(Sampler(work(), [AlmostOne()], lambda: None), scores) == [3]
    assert chosen(Sampler(work(top_p=0.6), [AlmostOne()], lambda: None), scores) == [1]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_model_whose_numbers_are_not_finite_fails_the_job_with_one_sentence(wrong: float, top_p: float) -> None:
    scores = torch.log(torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
    sampler = Sampler(work(top_p=top_p), [random.Random("a"), random.Random("b")], lambda: None)
    scores[0, 1] = -torch.inf  # a token that cannot be chosen
    assert chosen(sampler, scores)[0] == 0
    scores[1, 0] = wrong
    with pytest.raises(JobFailure, match=r"numbers are not finite, .*: lower the learning rate") as failed:
        chosen(sampler, scores)
    assert failed.value.reason is Reason.diverged


def test_prompts_of_a_batch_have_the_logits_and_greedy_answers_that_they_have_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path)
    seen: list[torch.Tensor] = []

    class Recording(Sampler):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            seen.append(scores.clone())
            return super().__call__(input_ids, scores)

    monkeypatch.setattr(transformers_answerer, "Sampler", Recording)
    answerer = TransformersAnswerer(spec, work(temperature=0), torch.device("cpu"))
    prompts = [[{"role": "user", "content": text}] for text in ("What is a fox?", "Add", "The dog " * 9)]
    encoded = [answerer.encode(prompt, row) for row, prompt in enumerate(prompts)]
    assert len({len(ids) for ids in encoded}) == 3
    found = answerer.answer(encoded, [random.Random("x")] * 3, lambda: None)
    for row, (ids, answer) in enumerate(zip(encoded, found, strict=True)):
        logits = answerer.model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(seen[0][row], logits, atol=1e-5)
        alone = answerer.model.generate(input_ids=torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        assert answer.text == answerer.tokenizer.decode(alone[0, len(ids) :], skip_special_tokens=True)


def test_an_adapter_of_peft_answers_within_the_same_limits_and_has_to_fit(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] is None
    spec = spec_of(tmp_path).model_copy(
        update={"adapter": AdapterSpec(model=str(tmp_path / "adapter"), use="continue")}
    )
    answerer = TransformersAnswerer(spec, work(temperature=0, max_new_tokens=3), torch.device("cpu"))
    encoded = [answerer.encode([{"role": "user", "content": "What is a fox?"}], 0)]
    (answer,) = answerer.answer(encoded, [random.Random("x")], lambda: None)
    assert answer.tokens <= 3
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = {name.replace("layers.0", "layers.7"): weight for name, weight in weights.items()}
    save_file(moved, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(JobFailure, match="weights are in only one of it and this model"):
        TransformersAnswerer(spec, work(), torch.device("cpu"))


def test_of_a_file_of_answers_whole_batches_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    lines = [json.dumps({"row": row}) + "\n" for row in range(7)]
    for text, kept in (
        ("", 0),
        ("".join(lines[:2]), 0),
        ("".join(lines[:3]) + lines[3][:5], 3),
        ("".join(lines[:5]), 3),
        ("".join(lines[:6]) + lines[6].rstrip("\n"), 6),
        ("".join(lines), 7),
    ):
        path.write_text(text)
        with closing(AnswerFile(path, 3, 7)) as answers:
            assert answers.count == kept
        assert path.read_text() == "".join(lines[:kept])


def test_answers_in_other_places_than_theirs_are_refused_by_their_number(tmp_path: Path) -> None:
    """Lines that have changed places: what a job after it reads as the answers of a row would be of another one."""
    path, prompts = tmp_path / "answers", [[{"role": "user", "content": "a"}]] * 2
    lines = [
        json.dumps({"row": row, "sample": sample, "prompt": prompts[row]}) + "\n" for row in (0, 1) for sample in (0, 1)
    ]
    for order, found in (
        ((0, 1, 2, 3), ""),
        ((1, 0, 2, 3), "row 0: answer 0 in .* is sample 1 of it, where sample 0 of row 0 belongs"),
        ((0, 1, 1, 3), "row 0: answer 2 in .* is sample 1 of it, where sample 0 of row 1 belongs"),
    ):
        path.write_text("".join(lines[number] for number in order))
        refused = pytest.raises(JobFailure, match=found) if found else nullcontext()
        with closing(AnswerFile(path, 2, 4)) as answers, refused:
            _check_recorded(answers, Questions(prompts), 2)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_tokens_of_many_answers_are_those_of_each_alone(top_p: float) -> None:
    scores = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))

    def tokens(numbers: list[int]) -> list[int]:
        sampler = Sampler(work(top_p=top_p), [random.Random(number) for number in numbers], lambda: None)
        return chosen(sampler, scores[numbers])

    together = tokens([*range(40)])
    assert together == [token for number in range(40) for token in tokens([number])]
    assert len(set(together)) > 20
