"""What the loss covers: decoded, it is the answers and the tokens that end them, whatever the chat template does."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows, JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.prepare import (
    TruncationCounter,
    read_examples,
    tokenize_dpo,
    tokenize_kto,
    tokenize_sft,
)
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, SftExample
from tests.process.talks import (
    _LAST_USER_TURN_IN_CAPITALS,
    _NUMBER_OF_TURNS,
    _SYSTEM_IN_LAST_USER_TURN,
    _WITHOUT,
    END_OF_DIALOG,
    SMOLLM,
    SYSTEM,
    TALK,
    THINKING,
    THINKING_WITH_TOOLS,
    TRIMMING,
    prepare,
    trained,
)
from tests.tiny import qwen_tokenizer, shared_dir, tiny_tokenizer

ANSWERS = [message["content"] for message in TALK if message["role"] == "assistant"]


@pytest.fixture(scope="module")
def qwen() -> Any:
    return qwen_tokenizer()


@pytest.fixture(params=["plain offsets", "trimmed offsets"])
def chatml(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer(trim_offsets=request.param == "trimmed offsets")


@pytest.mark.parametrize("first", [[], [SYSTEM]], ids=["no system turn", "system turn"])
def test_every_answer_of_a_dialog_and_its_end_are_trained(qwen: Any, chatml: Any, first: list[Any]) -> None:
    for tokenizer in (qwen, chatml):
        dataset, report = prepare(tokenizer, SftExample(first + TALK, None))
        assert trained(tokenizer, dataset[0]) == [f"{answer}<|im_end|>\n" for answer in ANSWERS]
        assert report.trained_tokens == sum(label != -100 for label in dataset[0]["labels"])
        assert report.total_tokens == report.max_tokens == len(dataset[0]["input_ids"])


def test_a_template_that_adds_a_system_turn_adds_it_once(chatml: Any) -> None:
    chatml.chat_template = SMOLLM
    dataset, _ = prepare(chatml, SftExample(TALK, None))
    assert trained(chatml, dataset[0]) == [f"{answer}<|im_end|>\n" for answer in ANSWERS]
    assert chatml.decode(dataset[0]["input_ids"]).count("You are SmolLM.") == 1


def test_answers_are_found_where_a_template_drops_earlier_thoughts(chatml: Any) -> None:
    chatml.chat_template = THINKING
    talk = [dict(message) for message in TALK]
    talk[3]["content"] = "<think>\nhm\n</think>\n\nBerlin."
    dataset, report = prepare(chatml, SftExample(talk, None))
    # Each as generation writes it: without its thought the second could not be generated.
    assert [trained(chatml, row) for row in dataset] == [
        ["<think>\n\n</think>\n\nTwo, I think. 😊<|im_end|>\n"],
        ["<think>\nhm\n</think>\n\nBerlin.<|im_end|>\n"],
        ["<think>\n\n</think>\n\nBye.<|im_end|>\n"],
    ]
    assert any(warning.startswith("1 rows are trained as several sequences") for warning in report.warnings)


def test_tool_results_are_not_trained_where_a_template_drops_the_thoughts_before_them(chatml: Any) -> None:
    chatml.chat_template = THINKING_WITH_TOOLS
    thought, tool = "<think>\na\n</think>\n\n", {"role": "tool", "content": "17 degrees"}
    calls = [
        {"role": "assistant", "content": f"{thought}call"},
        tool,
        {"role": "assistant", "content": f"{thought}Warm."},
    ]
    dataset, _ = prepare(chatml, SftExample([TALK[0], *calls, *TALK[4:]], None))
    assert [trained(chatml, row) for row in dataset] == [
        [f"{thought}call<|im_end|>\n", f"{thought}Warm.<|im_end|>\n"],
        ["Bye.<|im_end|>\n"],
    ]


def test_a_template_that_ends_the_last_turn_differently_trains_no_header(chatml: Any) -> None:
    chatml.chat_template = END_OF_DIALOG
    dataset, _ = prepare(chatml, SftExample(TALK, None))
    first, second, last = ANSWERS
    assert trained(chatml, dataset[0]) == [
        f"{first}<|im_end|>\n",
        f"{second}<|im_end|>\n",
        f"{last}<|im_end|>\n<|endoftext|>",
    ]


def test_a_template_that_trims_content_trains_what_it_writes(chatml: Any) -> None:
    chatml.chat_template = TRIMMING
    dataset, _ = prepare(chatml, SftExample(TALK, None))
    assert trained(chatml, dataset[0]) == [f"{answer.strip()}<|im_end|>" for answer in ANSWERS]


def test_a_dialog_that_the_model_opens_is_trained_from_its_first_word(chatml: Any) -> None:
    dataset, _ = prepare(chatml, SftExample([{"role": "assistant", "content": "Hello!"}, *TALK], None))
    assert trained(chatml, dataset[0])[0] == "Hello!<|im_end|>\n"


def test_a_tokenizer_without_a_template_is_given_one_that_ends_answers_in_eos() -> None:
    tokenizer = tiny_tokenizer(chat_template=False)
    dataset, report = prepare(tokenizer, SftExample([SYSTEM, *TALK], None))
    assert trained(tokenizer, dataset[0]) == [f"{answer}<|im_end|>" for answer in ANSWERS]
    assert tokenizer.decode(dataset[0]["input_ids"]).startswith(
        "### System:\nBe brief.\n\n### User:\nWhat is 1 + 1?\n\n###"
    )
    assert report.warnings == [
        "the tokenizer has no chat template: it was given a plain one (### User: ... ### Assistant: ...)"
    ]
    assert prepare(tokenizer, SftExample(TALK, None))[1].warnings == []


def test_rows_with_control_tokens_in_their_texts_are_counted_and_the_first_is_named(chatml: Any) -> None:
    odd = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}, *TALK[1:]]
    stop = [*TALK[:-1], {"role": "assistant", "content": "<|endoftext|>"}]
    (found,) = prepare(chatml, SftExample(TALK, None), SftExample(odd, None), SftExample(stop, None))[1].warnings
    counted = "2 of 3 rows have control tokens of the tokenizer in the text of a turn, first '<|im_end|>' in row 1: "
    assert found.startswith(counted)
    pair = PreferenceExample.of(TALK[:1], TALK[1:2], [{"role": "assistant", "content": "<|im_end|>"}])
    labelled = LabelledExample(odd[:1], TALK[1:2], True)
    for report in (
        tokenize_dpo([pair], chatml, 1024).collect()[1],
        tokenize_kto([labelled], chatml, 1024).collect()[1],
    ):
        assert any(
            "control tokens of the tokenizer" in one and "'<|im_end|>' in row 0" in one for one in report.warnings
        )
    chatml.split_special_tokens = True
    assert not any("control tokens" in one for one in prepare(chatml, SftExample(odd, None))[1].warnings)


def test_the_given_template_is_saved_with_the_tokenizer(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer(chat_template=False)
    prepare(tokenizer, SftExample(TALK, None))
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_tokenizer_that_begins_texts_with_bos_gets_one_bos_in_the_given_template() -> None:
    from tokenizers import processors

    tokenizer = tiny_tokenizer(chat_template=False)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    for example in (SftExample(TALK, None), SftExample(TALK[:2], 1), SftExample(None, None, "Once")):
        ids = prepare(tokenizer, example)[0][0]["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_without_offsets_trains_the_same_answers() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    dataset, _ = prepare(tokenizer, SftExample(TALK, None))
    # Python tokenizers drop white space in front of a special token.
    assert trained(tokenizer, dataset[0]) == [f"{answer.rstrip()}</s>" for answer in ANSWERS]


def test_train_on_input_trains_every_token(chatml: Any) -> None:
    dataset, report = prepare(chatml, SftExample(TALK, None), SftExample(TALK[:2], 1), train_on_input=True)
    assert dataset["labels"][:] == dataset["input_ids"][:]
    assert report.trained_tokens == report.total_tokens - 2  # nothing predicts the first token of a row


def test_a_plain_text_is_trained_whole_and_ends_in_eos_once(chatml: Any) -> None:
    texts = ["Once upon a time", "The end.<|im_end|>"]
    dataset, _ = prepare(chatml, *(SftExample(None, None, text) for text in texts))
    assert [trained(chatml, row) for row in dataset] == [["Once upon a time<|im_end|>"], ["The end.<|im_end|>"]]


def test_rows_keep_their_order_whatever_their_shapes(chatml: Any) -> None:
    examples = [
        SftExample(None, None, "One"),
        SftExample(TALK[:2], 1),
        SftExample(TALK, None),
        SftExample(None, None, "Two"),
    ]
    dataset, _ = prepare(chatml, *examples)
    assert [trained(chatml, row)[-1] for row in dataset] == [
        "One<|im_end|>",
        "Two, I think. 😊<|im_end|>\n",
        "Bye.<|im_end|>\n",
        "Two<|im_end|>",
    ]


def test_cut_and_dropped_rows_are_counted(chatml: Any) -> None:
    short = SftExample(TALK[:2], 1)
    long_answer = SftExample([TALK[0], {"role": "assistant", "content": "word " * 100}], 1)
    long_prompt = SftExample([{"role": "user", "content": "word " * 100}, TALK[1]], 1)
    dataset, report = prepare(chatml, short, long_answer, long_prompt, limit=60)
    assert (report.num_rows, report.kept, report.truncated, report.dropped) == (3, 2, 1, 1)
    assert max(map(len, dataset["input_ids"])) == 60
    assert report.max_tokens > 100
    assert report.warnings == [
        "1 of 3 rows were cut to max_seq_length=60 tokens and lack the end of the answer "
        f"(the longest has {report.max_tokens})",
        "1 of 3 rows were dropped: within max_seq_length=60 tokens nothing is left to train on",
    ]


def test_cut_on_the_left_rows_lose_their_beginning_but_for_the_token_that_begins_them(chatml: Any) -> None:
    long_answer = SftExample([TALK[0], {"role": "assistant", "content": "word " * 100}], 1)
    long_prompt = SftExample([{"role": "user", "content": "word " * 100}, TALK[1]], 1)
    whole, _ = prepare(chatml, SftExample(TALK[:2], 1), long_answer, long_prompt)
    dataset, report = prepare(chatml, SftExample(TALK[:2], 1), long_answer, long_prompt, limit=60, side="left")
    assert (report.kept, report.truncated, report.dropped) == (3, 2, 0)
    assert dataset[0] == whole[0]
    for row, uncut in zip(dataset, whole, strict=True):
        assert {name: ids[-60:] for name, ids in uncut.items()} == row
    assert trained(chatml, dataset[2]) == [TALK[1]["content"] + "<|im_end|>\n"]
    assert "2 of 3 rows were cut to max_seq_length=60 tokens and lack their beginning" in report.warnings[0]
    chatml.bos_token = "<|im_start|>"
    begun, _ = prepare(chatml, long_prompt, limit=60, side="left")
    assert begun[0]["input_ids"] == whole[2]["input_ids"][:1] + whole[2]["input_ids"][-59:]
    assert begun[0]["labels"] == whole[2]["labels"][:1] + whole[2]["labels"][-59:]


def test_a_dataset_of_which_nothing_is_left_fails_the_job_with_the_cure(chatml: Any) -> None:
    with pytest.raises(JobFailure, match=r"none of the 1 rows .* max_seq_length=8: raise max_seq_length") as caught:
        prepare(chatml, SftExample(TALK[:2], 1), limit=8)
    assert caught.value.reason == "invalid_dataset"
    with pytest.raises(JobFailure, match="the dataset is empty"):
        prepare(chatml)


def test_a_row_that_the_template_refuses_fails_the_job_by_number(chatml: Any) -> None:
    chatml.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + chatml.chat_template
    )
    with pytest.raises(JobFailure, match=r"row 1: .*refuses the turns system, user, assistant: System role") as caught:
        prepare(chatml, SftExample(TALK[:2], 1), SftExample([SYSTEM, *TALK[:2]], 2))
    assert caught.value.reason == "invalid_dataset"


def test_a_template_that_is_none_is_the_fault_of_the_model(chatml: Any) -> None:
    chatml.chat_template = "{% for message in messages %}{{ message['content'] }}"
    with pytest.raises(JobFailure, match=r"the model's chat template is no Jinja template: .* in line 1\.") as caught:
        prepare(chatml, SftExample(TALK[:2], 1))
    assert caught.value.reason == "invalid_model"


def test_a_template_that_drops_the_answer_fails_the_job(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for message in messages %}{{ message['role'] + ':' }}"
        "{% if message['role'] != 'assistant' %}{{ message['content'] }}{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    with pytest.raises(JobFailure, match=r"row 0: .*leaves out the answer's text") as caught:
        prepare(chatml, SftExample(TALK[:2], 1))
    assert caught.value.reason == "invalid_model"


@pytest.mark.parametrize("answer", ["A", "the end", "assistant", "  end of utterance\n"])
def test_an_answer_that_the_template_itself_writes_elsewhere_is_no_answer(chatml: Any, answer: str) -> None:
    chatml.chat_template = (
        "{% for message in messages %}{{ message['role'] + ', An Assistant, to the end of utterance:' }}"
        "{% if message['role'] != 'assistant' %}{{ message['content'] }}{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    reply = [{"role": "assistant", "content": answer}]
    for tokenized in (
        lambda: tokenize_sft([SftExample(TALK[:1] + reply, 1)], chatml, 1024),
        lambda: tokenize_sft([SftExample(TALK[:1] + reply, None)], chatml, 1024, train_on_input=True),
        lambda: tokenize_dpo([PreferenceExample.of(TALK[:1], reply, reply)], chatml, 1024),
        lambda: tokenize_kto([LabelledExample(TALK[:1], reply, True)], chatml, 1024),
    ):
        with pytest.raises(JobFailure, match=r"row 0: .*leaves out the answer's text"):
            tokenized().collect()


_TOOLS_BEFORE_LAST_TURN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{% if loop.last %}{{ '[TOOLS] [] [/TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [_SYSTEM_IN_LAST_USER_TURN, _TOOLS_BEFORE_LAST_TURN, _NUMBER_OF_TURNS, _LAST_USER_TURN_IN_CAPITALS]
)
@pytest.mark.parametrize("prompt", [[SYSTEM, *TALK[:1]], [SYSTEM, *TALK[:3]]], ids=["system turn", "earlier answer"])
def test_the_loss_covers_no_prompt_that_is_written_differently_before_an_answer(
    chatml: Any, template: str, prompt: list[Any]
) -> None:
    chatml.chat_template = template
    chosen, rejected = [{"role": "assistant", "content": "Pomme."}], [{"role": "assistant", "content": "Prune."}]
    dataset, report = prepare(chatml, SftExample(prompt + chosen, len(prompt)))
    (text,) = trained(chatml, dataset[0])
    assert text.strip() == "Pomme.<|im_end|>"
    assert sum("writes the prompt differently" in warning for warning in report.warnings) == 1
    (pair,), _ = tokenize_dpo([PreferenceExample.of(prompt, chosen, rejected)], chatml, 1024).collect()
    assert chatml.decode(pair["chosen_ids"]).strip() == "Pomme.<|im_end|>"
    assert chatml.decode(pair["rejected_ids"]).strip() == "Prune.<|im_end|>"
    assert pair["prompt_ids"] + pair["chosen_ids"] == dataset[0]["input_ids"]
    (row,), _ = tokenize_kto([LabelledExample(prompt, chosen, True)], chatml, 1024).collect()
    assert (row["prompt_ids"], row["completion_ids"]) == (pair["prompt_ids"], pair["chosen_ids"])


_ONLY_FIRST_SYSTEM_TURN = _WITHOUT.replace("m['role'] not in ROLES", "loop.first or m['role'] != 'system'")
_TOOL = {"role": "tool", "content": '{"degrees": 31}'}


@pytest.mark.parametrize(
    ("template", "turns", "counts"),
    [
        (_WITHOUT.replace("ROLES", "['system']"), [SYSTEM, *TALK[:2]], "1 of 2 rows (1 system)"),
        (_WITHOUT.replace("ROLES", "['tool']"), [*TALK[:2], _TOOL, TALK[3]], "1 of 2 rows (1 tool)"),
        (
            _WITHOUT.replace("ROLES", "['tool', 'system']"),
            [SYSTEM, *TALK[:2], _TOOL, _TOOL, TALK[3]],
            "1 of 2 rows (1 system, 2 tool)",
        ),
        (_ONLY_FIRST_SYSTEM_TURN, [SYSTEM, *TALK[:2], SYSTEM, *TALK[2:4]], "1 of 2 rows (1 system)"),
        (_SYSTEM_IN_LAST_USER_TURN, [SYSTEM, *TALK[:2]], "1 of 2 rows (1 system)"),
    ],
)
def test_turns_that_the_template_leaves_out_are_counted_by_role(
    chatml: Any, template: str, turns: list[Any], counts: str
) -> None:
    chatml.chat_template = template
    answer, plain = len(turns) - 1, TALK[:2]
    for report in (
        prepare(chatml, SftExample(turns, None), SftExample(plain, None))[1],
        prepare(chatml, SftExample(turns, answer), SftExample(plain, 1))[1],
        prepare(chatml, SftExample(turns, None), SftExample(plain, None), train_on_input=True)[1],
        tokenize_dpo(
            [
                PreferenceExample.of(turns[:-1], turns[-1:], plain[1:]),
                PreferenceExample.of(plain[:1], plain[1:], turns[-1:]),
            ],
            chatml,
            1024,
        ).collect()[1],
        tokenize_kto(
            [LabelledExample(turns[:-1], turns[-1:], True), LabelledExample(plain[:1], plain[1:], False)], chatml, 1024
        ).collect()[1],
    ):
        (warning,) = [warning for warning in report.warnings if "leaves out turns" in warning]
        assert counts.replace("rows", "pairs") in warning or counts in warning
    whole, report = prepare(tiny_tokenizer(), SftExample([SYSTEM, *TALK[:2], _TOOL, TALK[3]], None))
    assert len(whole) == 1
    assert not [warning for warning in report.warnings if "leaves out" in warning]


def test_a_template_that_reads_contents_is_believed(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' and not m['content'].startswith('{') %}"
        "{{ raise_exception('no JSON') }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    )
    dataset, report = prepare(chatml, SftExample([*TALK[:2], _TOOL, TALK[3]], None))
    assert len(dataset) == 1
    assert not [warning for warning in report.warnings if "leaves out" in warning]


def test_turns_that_the_template_changes_are_not_left_out(chatml: Any) -> None:
    for change in ("upper", "title", "trim", "replace('turn', '')"):
        chatml.chat_template = _WITHOUT.replace("m['role'] not in ROLES", "true").replace(
            "+ m['content'] +", f"+ (m['content'] | {change} if m['role'] != 'assistant' else m['content']) +"
        )
        dataset, report = prepare(chatml, SftExample([SYSTEM, *TALK[:2]], None))
        assert len(dataset) == 1
        assert not [warning for warning in report.warnings if "leaves out" in warning]


def test_turns_are_counted_where_the_template_refuses_other_contents(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and '</think>' not in m['content'] %}"
        "{{ raise_exception('no thoughts') }}{% endif %}{% endfor %}" + _WITHOUT.replace("ROLES", "['system']")
    )
    answer = {"role": "assistant", "content": "<think>1</think>Two"}
    _, report = prepare(chatml, SftExample([SYSTEM, TALK[0], answer], None), SftExample([TALK[0], answer], None))
    (warning,) = [warning for warning in report.warnings if "leaves out turns" in warning]
    assert "1 of 2 rows (1 system)" in warning


def test_a_template_that_does_not_end_answers_in_eos_is_a_warning(qwen: Any) -> None:
    _, report = prepare(qwen, SftExample(TALK[:2], 1))
    assert len(report.warnings) == 1
    assert "not in the tokenizer's eos_token '<|endoftext|>'" in report.warnings[0]


PAIR = PreferenceExample.of(TALK[:1], [TALK[1]], [{"role": "assistant", "content": "Three."}])


def test_a_pair_has_its_prompt_once_and_answers_with_their_end(chatml: Any) -> None:
    dataset, report = tokenize_dpo([PAIR], chatml, 1024).collect()
    assert {column: chatml.decode(ids) for column, ids in dataset[0].items()} == {
        "prompt_ids": "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n",
        "chosen_ids": "Two, I think. 😊<|im_end|>\n",
        "rejected_ids": "Three.<|im_end|>\n",
    }
    lengths = [len(ids) for ids in dataset[0].values()]
    assert report.total_tokens == 2 * lengths[0] + lengths[1] + lengths[2]
    assert report.trained_tokens == lengths[1] + lengths[2]


def test_cut_and_dropped_pairs_are_counted(chatml: Any) -> None:
    words = "word " * 100
    same_start = PreferenceExample.of(
        TALK[:1], [{"role": "assistant", "content": words + "a"}], [{"role": "assistant", "content": words + "b"}]
    )
    long_prompt = PreferenceExample.of([{"role": "user", "content": words}], *PAIR.answers)
    dataset, report = tokenize_dpo([PAIR, same_start, long_prompt], chatml, 60).collect()
    assert (report.num_rows, report.kept, report.truncated, report.dropped) == (3, 2, 1, 1)
    assert len(dataset[1]["prompt_ids"] + dataset[1]["chosen_ids"]) == 60
    assert "1 pairs differ only in what was cut: they carry no signal" in report.warnings
    with pytest.raises(JobFailure, match="none of the 1 pairs"):
        tokenize_dpo([PAIR], chatml, 5).collect()


@pytest.mark.parametrize(("unit", "made"), [("pair", "pair"), ("row", "sequence")])
def test_rows_of_which_several_examples_are_made_are_counted_beside_them(chatml: Any, unit: str, made: str) -> None:
    counter, chat = TruncationCounter(None, None, 4), Chat(chatml)
    lengths = [(1, 2), (3, 4, 5), (9,)]  # of sequences whose first token is not trained
    for number, row in enumerate(counter.read(lengths)):
        for length in row:
            counter.cut_row([number] * length, [number] * length)
    report = counter.report(unit, chat)
    assert (report.num_rows, report.examples, report.kept, report.dropped) == (3, 6, 5, 1)
    assert (report.truncated, report.largest_id, report.largest_id_row) == (2, 2, 2)
    chat.lost.add(["system"], 1)
    assert counter.warnings(unit, chat) == [
        f"3 rows make 6 {made}s",
        "the chat template leaves out turns of 1 of 3 rows (1 system), first in row 1: the model does not see them. "
        "Put their text into user turns, or correct the template",
        f"2 of 6 {made}s were cut to max_seq_length=4 tokens and lack the end of the answer (the longest has 9)",
        f"1 of 6 {made}s were dropped: the loss covers none of their tokens",
    ]


def test_cut_on_the_left_pairs_lose_the_beginning_of_their_prompt_before_they_lose_an_answer(chatml: Any) -> None:
    words = {"role": "user", "content": "word " * 100}
    long_prompt = PreferenceExample.of([words], *PAIR.answers)
    all_long = PreferenceExample.of([words], [{**words, "role": "assistant"}], PAIR.answers[1])
    pairs = [PAIR, long_prompt, all_long]
    whole, _ = tokenize_dpo(pairs, chatml, 1024).collect()
    dataset, report = tokenize_dpo(pairs, chatml, 60, "left").collect()
    assert (report.kept, report.truncated, report.dropped) == (3, 2, 0)
    assert dataset[0] == whole[0]
    answer = len(whole[1]["chosen_ids"])
    assert dataset[1] == {**whole[1], "prompt_ids": whole[1]["prompt_ids"][answer - 60 :]}
    assert dataset[2]["prompt_ids"] == whole[2]["prompt_ids"][-1:]
    assert dataset[2]["chosen_ids"] == whole[2]["chosen_ids"][:59]
    assert dataset[2]["rejected_ids"] == whole[2]["rejected_ids"]


def test_the_real_instructions_lose_nothing(qwen: Any) -> None:
    examples = list(read_examples(shared_dir() / "data" / "instruct_999.jsonl", "sft"))[:100]
    dataset, report = prepare(qwen, *examples)
    assert (report.kept, report.truncated) == (100, 0)
    for row, example in zip(dataset, examples, strict=True):
        assert example.messages is not None
        assert trained(qwen, row) == [f"{example.messages[-1]['content']}<|im_end|>\n"]


def test_a_line_is_read_as_it_was_checked(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"text": "a"}\n{"text": "b", "unread": %s}\n' % ("7" * 5000))
    assert [example.text for example in read_examples(path, "sft")] == ["a", "b"]


def test_a_line_that_is_not_json_is_refused_by_number(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(InvalidRows, match="row 1: not JSON"):
        list(read_examples(path, "sft"))
