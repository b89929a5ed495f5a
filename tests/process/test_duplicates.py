"""Examples that are equal are counted: among the training rows, over shards and datasets, and with the validation's."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import load_data
from llama_stack_provider_trl.recipes.data.duplicates import MOST, CountedExamples, ExampleDigests, bits_for, duplicates
from llama_stack_provider_trl.recipes.data.near_duplicates import NearRepeats, RowSequences
from llama_stack_provider_trl.recipes.data.prepare import tokenize_dpo, tokenize_kto, tokenize_prompts, tokenize_sft
from llama_stack_provider_trl.recipes.evaluation.evaluate import evaluate
from llama_stack_provider_trl.recipes.preview import examined
from llama_stack_provider_trl.specs.events import Failed, NullEventWriter, Reason, Warned
from llama_stack_provider_trl.specs.job import JobSpec, MixedDataset
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from llama_stack_provider_trl.specs.rows import LabelledExample, Message, PreferenceExample, PromptExample, SftExample
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import SFT_ROWS, dataset, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
REPEATED = [*SFT_ROWS, SFT_ROWS[3], SFT_ROWS[3], SFT_ROWS[1]]
OF_REPEATED = "3 of 15 training examples repeat an earlier one (row 12 repeats row 3)"
OF_OVERLAP = (
    "2 of 3 validation examples are trained, too (validation row 1 is training row 5): the evaluation does not show "
    "how the model does on new rows"
)
UNSEEN = {"prompt": "What is two?", "completion": "A number."}


def counted(examples: list[int], most: int = MOST, bits: int = 0) -> ExampleDigests:
    digests = ExampleDigests(most=most, bits=bits)
    for row, example in enumerate(examples):
        digests.count(row, [example], [-100, example])
    return digests


def warnings(spec: JobSpec) -> list[str]:
    return load_data(spec, tiny_tokenizer(), NullEventWriter(), 4).warnings


def drawn(rows: int, different: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(different) for _ in range(rows)]


# --- digests ----------------------------------------------------------------------------------------------------------


def test_counts_are_exact_while_all_digests_are_kept() -> None:
    examples = drawn(5000, 3000)
    digests = counted(examples)
    assert digests.bits == 0
    assert digests.repeated(5000) == 5000 - len({*examples})
    first, second = digests.pair or (0, 0)
    assert examples[first] == examples[second]
    assert len({*examples[:second]}) == second  # no earlier row repeats one


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_estimates_repetitions(seed: int) -> None:
    examples = drawn(20_000, 30_000, seed)
    digests = counted(examples, most=2000)
    assert 1000 < len(digests.firsts) <= 2000
    expected = len(examples) - len({*examples})
    assert digests.repeated(len(examples)) == pytest.approx(expected, rel=0.15)


def test_one_example_that_is_repeated_often_is_counted_whether_the_sample_has_it_or_not() -> None:
    has_it = Counter[bool]()
    for often in range(30_000, 30_012):
        examples = [*range(10_000), *[often] * 10_000]
        digests = counted(examples, most=1000)
        assert digests.repeated(len(examples)) == pytest.approx(9999, rel=0.3)
        has_it[bool(digests.repeats)] += 1
    assert len(has_it) == 2


@pytest.mark.parametrize("most", [100, MOST])
def test_parts_have_together_the_digests_of_the_whole(most: int) -> None:
    examples = drawn(3000, 2500)
    whole, begin = counted(examples, most), 0
    united = ExampleDigests(most=most)
    for end in (0, 1, 700, 701, 2900, 3000):
        part = ExampleDigests.read(json.loads(json.dumps(counted(examples[begin:end], most).stored())))
        united.add(part, begin)
        begin = end
    assert (united.bits, united.repeats) == (whole.bits, whole.repeats)
    assert united.firsts == whole.firsts
    assert most < MOST or united.pair == whole.pair is not None


def test_shards_of_a_large_dataset_begin_with_a_sample() -> None:
    assert [bits_for(rows) for rows in (0, 4 * MOST - 1, 4 * MOST, 10_000_000)] == [0, 0, 1, 6]
    examples = drawn(4000, 3000)
    sampled, whole = counted(examples, most=300, bits=1), counted(examples, most=300)
    assert (sampled.bits, sampled.firsts, sampled.repeats) == (whole.bits, whole.firsts, whole.repeats)


def test_an_overlap_of_samples_is_an_estimate() -> None:
    trained = CountedExamples(counted([*range(20_000)], most=2000), 20_000, [("rows", 20_000)])
    validation = CountedExamples(counted([*range(15_000, 25_000)], most=5000), 10_000, [("held", 10_000)])
    (message,) = duplicates("warn", trained, validation)
    words = message.split()
    assert words[0] == "about"
    assert int(words[1]) == pytest.approx(5000, rel=0.2)


# --- examples ---------------------------------------------------------------------------------------------------------


def test_examples_are_equal_with_their_loss_answers_and_labels() -> None:
    turns = (("user", "?"), ("assistant", "y"), ("assistant", "n"))
    ask, yes, no = ({"role": role, "content": content} for role, content in turns)
    chatml = tiny_tokenizer()
    talk = [ask, yes]

    def long(end: str) -> Message:
        return {"role": "assistant", "content": f"{'word ' * 20}{end}"}

    pair, label = PreferenceExample.of, LabelledExample

    def margin(value: float) -> PreferenceExample:
        return pair([ask], [yes], [no], margins=[value])

    cases: list[tuple[Any, int]] = [
        (tokenize_sft([SftExample(talk, None), SftExample(talk, 1)], chatml, 64), 1),
        (tokenize_sft([SftExample(talk * 2, None), SftExample([*talk, ask, yes], 3)], chatml, 64), 0),
        (tokenize_dpo([pair([ask], [yes], [no]), pair([ask], [no], [yes])], chatml, 64), 0),
        (tokenize_dpo([pair([ask], [yes], [no])] * 3, chatml, 64), 2),
        (tokenize_dpo([margin(1.0), margin(0.5), margin(1.0)], chatml, 64, margins=True), 1),
        (tokenize_kto([label([ask], [yes], True), label([ask], [yes], False)], chatml, 64), 0),
        (tokenize_kto([label([ask], [yes], True)] * 2, chatml, 64), 1),
        (tokenize_prompts([PromptExample([ask])] * 2, chatml, 64, 8), 1),
        (tokenize_sft([SftExample([ask, long(word)], None) for word in "yn"], chatml, 20), 1),  # cut
    ]
    for tokenization, expected in cases:
        _, report = tokenization.collect()
        assert tokenization.counter.digests.repeated(report.kept) == expected


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"packed": True, "max_seq_length": 128}, {"token_cache": None}])
def test_a_job_counts_repeated_and_validated_rows_whether_they_are_cached_or_not(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    held = [UNSEEN, SFT_ROWS[5], SFT_ROWS[5]]
    spec = job_spec(tmp_path, tiny_model(), rows=REPEATED, validation_rows=held, **changes)
    for _ in range(2):
        assert warnings(spec)[-2:] == [OF_REPEATED, OF_OVERLAP]


def test_rows_that_are_there_once_have_no_warning(tmp_path: Path) -> None:
    assert not warnings(job_spec(tmp_path, tiny_model(), validation_rows=[UNSEEN]))


def test_rows_that_a_limit_of_steps_leaves_out_are_counted_with_a_note(tmp_path: Path) -> None:
    note = "; rows that a limit of steps or a mixture leaves out are compared, too"
    spec = job_spec(tmp_path, tiny_model(), rows=REPEATED, max_steps_per_epoch=2)
    found = [
        warnings(spec)[-1],
        examined(spec, PreviewSpec(rows=1, first_row=0), lambda: None).warnings[-1],
        warnings(spec.changed(max_steps_per_epoch=4))[-1],
    ]
    assert found == [OF_REPEATED + note, OF_REPEATED + note, OF_REPEATED]
    held = job_spec(tmp_path, tiny_model(), validation_rows=[UNSEEN] * 4 + [SFT_ROWS[5]], max_validation_steps=1)
    assert warnings(held)[-1].endswith(note)


def test_a_mixture_counts_over_its_datasets(tmp_path: Path) -> None:
    def named(name: str, *rows: dict[str, Any]) -> Any:
        return dataset(tmp_path, rows).model_copy(update={"dataset_id": name})

    other = MixedDataset(dataset=named("other", UNSEEN, SFT_ROWS[2]), validation=named("other", SFT_ROWS[7]))
    own = {"dataset": named("own", *SFT_ROWS), "validation": named("own", UNSEEN)}
    repeated, overlap = warnings(job_spec(tmp_path, tiny_model(), **own, mixed_with=(other,)))
    assert repeated.endswith("(row 1 of dataset 'other' repeats row 2 of dataset 'own')")
    assert overlap.startswith(
        "2 of 2 validation examples are trained, too (validation row 0 of dataset 'own' is training row 0 of dataset "
        "'other')"
    )


def test_a_job_warns_or_fails(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), rows=REPEATED)
    status, events = run(tmp_path / "warns", spec)
    assert status == 0
    assert OF_REPEATED in [event.message for event in of_kind(events, Warned)]
    status, events = run(tmp_path / "refuses", spec.changed(duplicates="refuse"))
    (failed,) = of_kind(events, Failed)
    assert failed.reason == Reason.invalid_dataset
    assert failed.message == f"{OF_REPEATED}. With duplicates 'warn' the job trains on them all the same"


def test_an_overlap_is_refused(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), validation_rows=[UNSEEN, SFT_ROWS[5]], duplicates="refuse")
    with pytest.raises(JobFailure, match="1 of 2 validation examples are trained, too"):
        warnings(spec)


def test_a_preview_counts_where_it_reads_all_rows(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), rows=REPEATED)

    def shown(spec: JobSpec, first: int = 0, **more: bool) -> list[str]:
        return examined(spec, PreviewSpec(rows=1, first_row=first), lambda: None, **more).warnings

    assert shown(spec)[-1] == OF_REPEATED
    assert not [warning for warning in shown(spec, 1) if "repeat" in warning]
    refuses = spec.changed(duplicates="refuse")
    assert shown(refuses)[-1].startswith(f"the job fails: {OF_REPEATED}")
    with pytest.raises(JobFailure, match="training examples repeat"):
        shown(refuses, every_row=True)


def test_an_evaluation_has_no_warning_of_its_own_rows(tmp_path: Path) -> None:
    found = evaluate(job_spec(tmp_path, tiny_model(), rows=REPEATED, validation_rows=REPEATED))
    assert not [warning for warning in found["warnings"] if "examples" in warning]


# --- rows that are nearly equal ---------------------------------------------------------------------------------------


def text(seed: int, tokens: int = 100) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(tokens)]


def near(rows: list[list[int]], most_rows: int = 1000, most_hashes: int = 100_000) -> NearRepeats:
    sequences = RowSequences(most_rows, most_hashes)
    for row in rows:
        sequences.count([row[:20], row[20:]])
    return sequences.near_repeats()


def changed(row: list[int], *places: int) -> list[int]:
    return [60_000 if place in places else token for place, token in enumerate(row)]


def test_rows_that_differ_in_few_tokens_are_found_and_equal_and_other_ones_are_not() -> None:
    rows = [text(seed) for seed in range(30)]
    assert near(rows) == (0, 30, None)
    assert near([*rows, rows[4], rows[5]]) == (0, 30, None), "equal rows have a count of their own"
    assert near([*rows, changed(rows[4], 50), changed(rows[3], 3), changed(rows[3], 4)]) == (3, 33, (4, 30))
    assert near([*rows, changed(rows[4], 30, 40, 50, 60, 70, 80)]) == (0, 31, None), "half of it is the same"
    assert near([rows[4][:13], changed(rows[4][:13], 12)]) == (0, 0, None), "too short"
    assert near([]) == (0, 0, None)
    assert near([[]] * 3) == (0, 0, None)


def test_what_many_rows_begin_with_makes_none_of_them_alike() -> None:
    prompt = text(0, 500)
    rows = [[*prompt, *text(seed, 40)] for seed in range(1, 101)]
    assert near(rows).found == 0
    assert near([*rows, changed(rows[7], 539)]).pair == (7, 100)


def test_a_sample_of_large_files_finds_them_too() -> None:
    rows = [text(seed, 400) for seed in range(200)]
    found = near([*rows, *(changed(row, 30, 300) for row in rows[:50])], most_hashes=20_000)
    assert found == (50, 250, (0, 200))
    assert near([*rows, changed(rows[0], 30)], most_rows=200) == (0, 200, None), "rows behind are not looked at"


def test_short_rows_of_a_sampled_file_are_compared_and_those_too_short_are_not_counted() -> None:
    rows = [text(seed, 200) for seed in range(100)]
    copies = [changed(row, 100) for row in rows]
    too_short = [text(seed, 12) for seed in range(100, 150)]  # 8 sequences each
    found = near([*rows, *copies, *too_short], most_hashes=8000)
    assert found.found > 70  # about 24 sequences of each are kept
    assert 180 < found.compared <= 200
    (sentence,) = found.warnings(str)
    assert sentence.startswith(f"{found.found} of {found.compared} compared rows nearly repeat")
    others = near([*rows, *(text(seed, 200) for seed in range(200, 300)), *too_short], most_hashes=8000)
    assert others.found == 0


def test_a_sample_keeps_the_memory_of_what_it_keeps_only() -> None:
    sequences = RowSequences(most_hashes=2000)
    for seed in range(100):
        sequences.count([text(seed, 200)])
    kept = sum((hashes if hashes.base is None else hashes.base).nbytes for hashes in sequences._hashes)
    assert 0 < kept <= 2000 * 8


def variants(row: list[int], number: int) -> list[list[int]]:
    return [[*row[: 25 + of], 60_000 + of, *row[26 + of :]] for of in range(number)]


@pytest.mark.parametrize("number", [20, 30, 200])
@pytest.mark.parametrize("place", [None, 50])
def test_one_row_with_a_token_changed_many_times_is_found_as_often(number: int, place: int | None) -> None:
    row = text(0, 100 + number)
    rows = variants(row, number)
    if place is not None:  # a template: the same token of each
        rows = [[*row[:place], 60_000 + of, *row[place + 1 :]] for of in range(number)]
    assert near(rows) == (number - 1, number, (0, 1))


@pytest.mark.parametrize(("others", "number"), [(100, 30), (30, 300)])
def test_what_many_rows_begin_with_and_a_row_with_a_token_changed_many_times_are_told_apart(
    others: int, number: int
) -> None:
    prompt, template = text(0, 500), text(1, 400)
    different = [[*prompt, *text(seed, 40)] for seed in range(2, others + 2)]
    alike = [[*prompt, *row] for row in variants(template, number)]
    of_all = others + number
    assert near([*different, *alike], most_hashes=1_000_000) == (number - 1, of_all, (others, others + 1))
    mixed = [*different, *alike]
    random.Random(0).shuffle(mixed)
    assert near(mixed, most_hashes=1_000_000)[:2] == (number - 1, of_all)


def test_a_sample_tells_what_many_rows_begin_with_from_a_row_with_a_token_changed_many_times() -> None:
    prompt = text(0, 500)
    assert near([[*prompt, *text(seed, 40)] for seed in range(1, 401)], most_hashes=10_000).found == 0
    assert near(variants(text(0, 300), 200), most_hashes=4000).found > 150


def test_a_preview_names_a_row_that_nearly_repeats_another(tmp_path: Path) -> None:
    long = {"prompt": " ".join(f"What is {number} plus {number}?" for number in range(20)), "completion": "It is blue."}
    rows = [*SFT_ROWS, long, {**long, "completion": "It is grey."}]

    def warned(spec: JobSpec) -> list[str]:
        shown = examined(spec, PreviewSpec(rows=1, first_row=0), lambda: None)
        return [warning for warning in shown.warnings if "nearly" in warning]

    number = len(SFT_ROWS)
    assert warned(job_spec(tmp_path, tiny_model(), rows=rows, max_seq_length=512)) == [
        f"1 of {number + 2} compared rows nearly repeat an earlier one (row {number + 1} nearly repeats row {number}): "
        "80% or more of what is in one of both is in the other, too"
    ]
    assert not warned(job_spec(tmp_path, tiny_model(), rows=SFT_ROWS))
