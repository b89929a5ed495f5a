"""Our ids and labels are those of TRL's own preparation, for every way of writing a chat that TRL prepares as we do."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.data.prepare import read_examples, tokenize_dpo, tokenize_sft
from llama_stack_provider_trl.specs.rows import PreferenceExample, SftExample
from tests.process.talks import SYSTEM, TALK
from tests.process.trl_templates import COMPLETIONS, TEMPLATES
from tests.tiny import qwen_tokenizer, shared_dir, tiny_tokenizer


@pytest.fixture(params=list(TEMPLATES.values()), ids=list(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    tokenizer = tiny_tokenizer(trim_offsets=True)
    tokenizer.chat_template = request.param
    return tokenizer


def prepared_by_trl(trainer: str, rows: list[dict[str, Any]], tokenizer: Any, limit: int) -> list[dict[str, Any]]:
    """TRL's preparation without a model: the method reads three attributes of its trainer."""
    import trl
    from datasets import Dataset

    state = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    args = SimpleNamespace(
        max_length=limit,
        truncation_mode="keep_start",
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        shuffle_dataset=False,
    )
    prepare = getattr(trl, trainer)._prepare_dataset
    extra = (False, None, "train") if trainer == "SFTTrainer" else ("train",)
    return list(prepare(state, Dataset.from_list(rows), tokenizer, args, *extra))


def assert_same_sft(tokenizer: Any, examples: list[SftExample], limit: int) -> None:
    ours, report = tokenize_sft(examples, tokenizer, limit).collect()
    split = [(example.messages or [], example.prompt_turns) for example in examples]
    rows = [{"prompt": messages[:turns], "completion": messages[turns:]} for messages, turns in split]
    theirs = prepared_by_trl("SFTTrainer", rows, tokenizer, limit)
    assert [{key: row[key] for key in ("input_ids", "labels")} for row in theirs] == list(ours)
    assert report.dropped == len(examples) - len(theirs)


def assert_same_dpo(tokenizer: Any, pairs: list[PreferenceExample], limit: int) -> None:
    ours, report = tokenize_dpo(pairs, tokenizer, limit).collect()
    rows = [asdict(pair) for example in pairs for pair in example.written_out()]
    theirs = prepared_by_trl("DPOTrainer", rows, tokenizer, limit)
    assert report.dropped == len(pairs) - len(theirs)
    for our, row in zip(ours, theirs, strict=True):
        room = limit - len(row["prompt_ids"])  # TRL's collator makes this cut
        assert our["prompt_ids"] == row["prompt_ids"]
        assert our["chosen_ids"] == row["chosen_ids"][:room]
        assert our["rejected_ids"] == row["rejected_ids"][:room]


def test_sft_labels_equal_trls_under_every_template(tokenizer: Any) -> None:
    prompts = [TALK[:1], TALK[:3], [SYSTEM, *TALK[:5]]]
    examples = [
        SftExample([*prompt, {"role": "assistant", "content": text}], len(prompt))
        for prompt in prompts
        for text in COMPLETIONS
    ]
    # TRL does not give a template, so ours is set before it is used.
    tokenize_sft(examples, tokenizer, 1024).collect()
    for limit in (1024, 40):
        assert_same_sft(tokenizer, examples, limit)


def test_a_dialog_of_one_answer_is_trained_like_prompt_and_completion(tokenizer: Any) -> None:
    examples = [[*TALK[:1], {"role": "assistant", "content": text}] for text in COMPLETIONS]
    dialogs, _ = tokenize_sft([SftExample(messages, None) for messages in examples], tokenizer, 1024).collect()
    answers, _ = tokenize_sft([SftExample(messages, 1) for messages in examples], tokenizer, 1024).collect()
    assert list(dialogs) == list(answers)


def test_preference_ids_equal_trls_under_every_template(tokenizer: Any) -> None:
    pairs = [
        PreferenceExample.of(prompt, [{"role": "assistant", "content": one}], [{"role": "assistant", "content": other}])
        for prompt in (TALK[:1], TALK[:3])
        for one, other in zip(COMPLETIONS, reversed(COMPLETIONS), strict=True)
    ]
    tokenize_dpo(pairs, tokenizer, 1024).collect()
    for limit in (1024, 40):
        assert_same_dpo(tokenizer, pairs, limit)


def test_plain_texts_equal_trls(tokenizer: Any) -> None:
    texts = ["Once upon a time", "The end.<|im_end|>", "  \n x"]
    ours, _ = tokenize_sft([SftExample(None, None, text) for text in texts], tokenizer, 8).collect()
    theirs = prepared_by_trl("SFTTrainer", [{"text": text} for text in texts], tokenizer, 8)
    assert [{key: row[key] for key in ("input_ids", "labels")} for row in theirs] == list(ours)


def test_the_real_rows_equal_trls_with_qwens_tokenizer() -> None:
    qwen = qwen_tokenizer()
    data = shared_dir() / "data"
    assert_same_sft(qwen, list(read_examples(data / "instruct_999.jsonl", "sft"))[:100], 256)
    pairs = list(read_examples(data / "preference_300.jsonl", "dpo"))
    with open(data / "preference_300.jsonl", encoding="utf-8") as file:
        assert [pair.answers[0] for pair in pairs] == [json.loads(line)["chosen"] for line in file]
    assert_same_dpo(qwen, pairs[:60], 512)
