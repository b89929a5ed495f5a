"""The fifteen kinds of faults that trainers are known to have with rows, and tests of them by their numbers.

What is elsewhere, what is right here, and the module that tests more of it, or for 5, 6, 8 and 10 all of it:

1. Templates disagree on arguments and blank contents: what one takes is found by rendering (test_tool_templates).
2. Arguments are encoded twice, tools are missing at inference: decoded once, the same on both sides (test_tool_calls).
3. Arguments as text raise TypeError in the template: text is parsed (test_tool_calls).
4. A template lacks generation marks, no label is left: labels by the places of answers (test_data_ends).
5. A row that is cut has no label left, the loss is NaN: dropped, counted, refused if all are (test_data_masks).
6. The mask is lost when rows are packed: it is packed with them (test_packing).
7. Messages are rendered one by one: conversations are rendered whole (test_tool_templates).
8. Thoughts of earlier turns differ at inference: a sequence for each answer (test_lost_turns, test_tool_templates).
9. The header of an answer carries loss: it is part of the prompt (test_data_ends).
10. KTO ignores tools: every method renders them (test_tool_templates).
11. Tables merge the keys of all rows: null and NaN are absent (test_tool_calls).
12. The role tool is unknown: it is a role, and what a template leaves out is counted (test_rows, test_lost_turns).
13. Masks are found by the text of markers: by token offsets (test_data_ends).
14. The common prefix of a pair shrinks: answers begin where the prompt ends (test_data_spans, test_row_pairs).
15. Padding is eos, so the end is never learnt: the token that ends an answer is trained (test_data_ends).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.prepare import tokenize_dpo, tokenize_prompts, tokenize_sft
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.tokenize import SftEncoder
from llama_stack_provider_trl.specs.rows import parse_row
from tests.process.tool_rows import TOOL, example_of, runs, tokenizer_of, trained
from tests.tiny import CHATML, tiny_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
USER, ANSWER = {"role": "user", "content": "Warm?"}, {"role": "assistant", "content": "Yes."}
CALL = {"name": "weather", "arguments": {"city": "Köln"}}
CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7"}
_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['tool_calls'] %}CONTENT"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] + ' ' }}ARGUMENTS{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _raise_if(condition: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('content') }}}}{{% endif %}}"


@pytest.mark.parametrize(
    "arguments", ["{{ call['function']['arguments'] }}", "{{ call['function']['arguments'] | tojson }}"]
)
@pytest.mark.parametrize("content", ["", "m['content'] != ''", "m['content'] is defined"])
def test_1_each_template_gets_arguments_and_blank_contents_as_it_takes_them(arguments: str, content: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _CALLS.replace("ARGUMENTS", arguments).replace("CONTENT", content and _raise_if(content))
    assert trained(tokenizer, {"messages": [USER, CALLING]}) == [['weather {"city": "Köln"}<|im_end|>\n']]


def test_2_arguments_that_were_encoded_twice_are_decoded_and_generation_has_the_tools_of_training() -> None:
    tokenizer = tokenizer_of("qwen3")
    twice = {**CALLING, "tool_calls": [{**CALL, "arguments": '"{\\"city\\": \\"Köln\\"}"'}]}
    row = {"messages": [USER, twice], "tools": [TOOL]}
    assert trained(tokenizer, row) == trained(tokenizer, {"messages": [USER, CALLING], "tools": [TOOL]})
    prompt: Any = parse_row({"prompt": [USER], "tools": [TOOL]}, 0, "prompts")
    (asked,), _ = tokenize_prompts([prompt], tokenizer, 2048, 8).collect()
    (((ids, _),),) = SftEncoder(Chat(tokenizer)).encode([(0, example_of(row))])
    assert ids[: len(asked["prompt_ids"])] == asked["prompt_ids"]
    assert '"name": "weather", "description"' in tokenizer.decode(asked["prompt_ids"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano"])
def test_3_arguments_as_text_reach_templates_that_read_an_object(name: str) -> None:
    as_text = {**CALLING, "tool_calls": [{**CALL, "arguments": '{"city": "Köln"}'}]}
    tokenizer = tokenizer_of(name)
    assert trained(tokenizer, {"messages": [USER, as_text]}) == trained(tokenizer, {"messages": [USER, CALLING]})


def _published() -> list[Any]:
    files = [path for path in sorted(_TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")]
    return [pytest.param(path.stem, id=path.stem) for path in files]


@pytest.mark.parametrize("name", _published())
def test_4_and_15_answers_and_their_end_are_trained_without_marks_in_the_template(name: str) -> None:
    tokenizer = tokenizer_of(name)
    tokens = sorted({*re.findall(r"<[^<>\s'\"]+>", tokenizer.chat_template)})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.eos_token
    assert "{% generation" not in tokenizer.chat_template
    try:
        examples = [
            example_of({"messages": [USER, ANSWER, USER, ANSWER]}),
            example_of({"prompt": "Warm?", "completion": "Yes."}),
        ]
        encoded = SftEncoder(Chat(tokenizer)).encode([*enumerate(examples)])
    except JobFailure:
        pytest.skip("it takes no plain text")
    for sequences, count in zip(encoded, (2, 1), strict=True):
        texts = [text for sequence in sequences for text in runs(tokenizer, *sequence)]
        assert len(texts) == count
        for text in (
            texts[-1:] if name == "gptoss" else texts
        ):  # whose generation ends in <|return|>, and turns in <|end|>
            _, answer, end = text.rpartition("Yes.")
            assert answer
            assert any(token in tokenizer.get_added_vocab() for token in tokenizer.tokenize(end))


def test_7_a_conversation_is_rendered_whole_for_templates_that_refuse_parts_of_it() -> None:
    tokenizer = tokenizer_of("qwen3_5_think")  # refuses messages without a user's turn
    thought = "<think>\nHm.\n</think>\n\nYes."
    talk = [USER, {**CALLING, "reasoning_content": "Look."}, RESULT, {**ANSWER, "content": thought}]
    ((call, answer),) = trained(tokenizer, {"messages": talk})
    assert call.startswith("Look.\n</think>")
    assert answer == "Hm.\n</think>\n\nYes.<|im_end|>\n"


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "glm4moe", "deepseek_r1_distill", "gptoss"])
def test_9_what_generation_renders_carries_no_loss(name: str) -> None:
    tokenizer = tokenizer_of(name)
    before = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    for row in ({"messages": [USER, ANSWER]}, {"prompt": "Warm?", "completion": "Yes."}):
        (((ids, labels),),) = SftEncoder(Chat(tokenizer)).encode([(0, example_of(row))])
        untrained = [token for token, label in zip(ids, labels, strict=True) if label == IGNORED]
        assert tokenizer.decode(untrained) == before


def test_11_keys_of_other_rows_that_a_table_adds_are_not_trained() -> None:
    tokenizer = tokenizer_of("qwen3")
    merged = {**CALLING, "tool_calls": [{**CALL, "arguments": {"city": "Köln", "days": None, "on": float("nan")}}]}
    assert trained(tokenizer, {"messages": [USER, merged]}) == trained(tokenizer, {"messages": [USER, CALLING]})


def test_12_results_of_tools_are_turns_and_one_that_a_template_leaves_out_is_counted() -> None:
    row = {"messages": [USER, {**ANSWER, "content": "Look."}, RESULT, ANSWER]}
    _, report = tokenize_sft([example_of(row)], tokenizer_of("qwen3"), 1024).collect()
    assert (report.kept, report.lost_turns) == (1, [])
    _, report = tokenize_sft([example_of(row)], tokenizer_of("gemma4"), 1024).collect()
    (message,) = report.lost_turns
    assert "leaves out turns of 1 of 1 rows (1 tool), first in row 0" in message


def test_13_text_that_looks_like_a_marker_moves_no_label() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("<|im_start|>assistant\nNo.", "assistant\n", "<|im_end|>", "\n\n"):
        question, answer = {**USER, "content": f"{text} Warm?"}, {**ANSWER, "content": f"Yes. {text} So."}
        assert trained(tokenizer, {"messages": [question, answer]}) == [[f"Yes. {text} So.<|im_end|>\n"]]


def test_14_no_answer_of_a_pair_loses_the_tokens_that_both_begin_with() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    pair: Any = parse_row({"prompt": "Warm?", "chosen": "The dog is warm.", "rejected": "The dog is cold."}, 0, "dpo")
    (row,), _ = tokenize_dpo([pair], tokenizer, 1024).collect()
    assert tokenizer.decode(row["prompt_ids"]).endswith("Warm?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(row["chosen_ids"]) == "The dog is warm.<|im_end|>\n"
    assert tokenizer.decode(row["rejected_ids"]) == "The dog is cold.<|im_end|>\n"
