"""Tool calls, thoughts and weights under the templates of known model families: trained is what inference sees."""

from __future__ import annotations

import json
import random
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.forms import as_content
from llama_stack_provider_trl.recipes.data.prepare import tokenize_dpo, tokenize_kto, tokenize_prompts, tokenize_sft
from llama_stack_provider_trl.recipes.data.spans import tokens_behind
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.tokenize import SftEncoder
from llama_stack_provider_trl.recipes.data.turns import turn_text
from llama_stack_provider_trl.specs.events import Prepared, Progress
from llama_stack_provider_trl.specs.rows import parse_row
from tests.process.tool_rows import (
    _TEMPLATES,
    CALL,
    ENDS,
    HERMES,
    ROW,
    TALK,
    TOOL,
    WRITTEN,
    _generated,
    example_of,
    row_for,
    runs,
    tokenizer_of,
    trained,
)
from tests.required import FULL
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_trained_of_calls_and_thoughts_is_as_written_out(name: str) -> None:
    found = trained(tokenizer_of(name), row_for(name))
    assert [*chain(*found)] == [*chain(*WRITTEN[name])]
    # A token of the tiny vocabulary spans the border behind Llama's header: then each answer has its own sequence.
    assert len(found) == len(WRITTEN[name]) or name == "llama3_1"


@pytest.mark.parametrize("written", ["arguments", "arguments | tojson"])
def test_arguments_are_written_as_json_once(written: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
        "{% for call in m['tool_calls'] or [] %}"
        f"{{{{ call['function']['name'] }}}} {{{{ call['function'].{written} }}}}"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    talk = [TALK[1], {"role": "assistant", "tool_calls": [CALL]}]
    assert trained(tokenizer, {"messages": talk}) == [['weather {"city": "Köln \\"Deutz\\""}<|im_end|>\n']]


def test_a_template_without_tools_is_refused_by_what_it_lacks() -> None:
    for name, what in (("gemma3", "writes no tools"), ("phi3", "writes no tools"), ("deepseekv3", "writes no tools")):
        with pytest.raises(JobFailure, match=rf"row 0: .*{what}"):
            trained(tokenizer_of(name), ROW)
    for name in ("gemma3", "deepseek_r1_distill"):
        with pytest.raises(JobFailure, match=r"row 0: .*writes no tool calls and their results"):
            trained(tokenizer_of(name), {"messages": TALK})


def test_calls_beside_content_that_a_template_drops_are_refused_by_the_turn() -> None:
    talk = [*TALK[1:2], {**TALK[2], "reasoning_content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]}]
    with pytest.raises(JobFailure, match=r"row 0: .*refuses the turns user, assistant: This model only"):
        trained(tokenizer_of("llama3_1"), {"messages": talk})
    other = {**CALL, "id": "c2", "function": {"name": "news", "arguments": {}}}
    talk[1] = {**talk[1], "tool_calls": [CALL, other]}
    with pytest.raises(JobFailure, match=r"row 0, turn 1: it calls 'news', which the model's chat template does not"):
        trained(tokenizer_of("gptoss"), {"messages": talk})


@pytest.mark.parametrize("name", WRITTEN)
def test_each_trained_turn_follows_what_inference_renders(name: str) -> None:
    """Against transformers alone, with messages as a client of a chat service sends them."""
    tokenizer, generator = tokenizer_of(name), random.Random(name)
    proven, refused = 0, list[str]()
    for _ in range(200 if FULL else 40):
        row = row_for(name, _generated(generator))
        if not any({"tool_calls", "reasoning_content"} & message.keys() for message in row["messages"]):
            continue
        try:
            ((*sequences,),) = SftEncoder(Chat(tokenizer)).encode([(0, example_of(row))])
        except JobFailure as error:
            refused.append(str(error))
            continue
        begins = []
        for ids, labels in sequences:
            for at, label in enumerate(labels):
                if label != IGNORED and (not at or labels[at - 1] == IGNORED):
                    begins.append(ids[:at])
        answers = [turn for turn, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert len(begins) == len(answers)
        for turn, begin in zip(answers, begins, strict=True):
            text = tokenizer.apply_chat_template(
                _sent(name, row["messages"][:turn]), tools=row.get("tools"), add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.decode(begin) == text
            assert begin == tokenizer(text, add_special_tokens=False)["input_ids"]
            proven += 1
    assert proven > 20
    assert all(message.startswith("row 0") for message in refused)


def _sent(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form that the documentation of each family asks for."""
    found, ids = [], [message["tool_calls"][0]["id"] for message in messages if message.get("tool_calls")]
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            (call,) = message["tool_calls"]
            function = dict(call["function"])
            if name != "deepseekv3":
                function["arguments"] = json.loads(function["arguments"])
            identifier = f"{ids.index(call['id']):09d}" if name == "mistral" else call["id"]
            message |= {"content": "", "tool_calls": [{**call, "id": identifier, "function": function}]}
        elif name == "mistral" and message["role"] == "tool":
            message["tool_call_id"] = f"{ids.index(message['tool_call_id']):09d}"
        # Templates that know no thoughts get them in the text, where they write it before a call.
        if name in ("llama3_1", "qwen2_5", "mistral", "deepseekv3"):
            thought = message.pop("reasoning_content", "")
            is_written = name == "qwen2_5" or (name != "deepseekv3" and not message.get("tool_calls"))
            if thought and is_written:
                message["content"] = as_content(thought, message["content"])
        found.append(message)
    return found


def test_weights_and_options_choose_what_is_trained() -> None:
    tokenizer = tokenizer_of("qwen3")
    talk = [dict(message) for message in TALK]
    talk[4]["weight"] = 0
    call, answer, bye = *WRITTEN["qwen3"][0], *WRITTEN["qwen3"][1]
    assert trained(tokenizer, {**ROW, "messages": talk}) == [[call], [bye]]
    assert trained(tokenizer, ROW, train_on="last_turn") == [[bye]]
    assert trained(tokenizer, {**ROW, "messages": TALK[:5]}, train_on="last_turn") == [[answer]]
    assert trained(tokenizer, {**ROW, "messages": TALK[:5]}, train_on="final_answer") == [
        ["Seven degrees.<|im_end|>\n"]
    ]
    without = "<think>\n\n</think>\n\n"
    assert trained(tokenizer, {**ROW, "messages": TALK[:5]}, reasoning="drop") == [
        [f"{without}{HERMES}"],
        [f"{without}Seven degrees.<|im_end|>\n"],
    ]
    (((ids, labels),),) = SftEncoder(Chat(tokenizer), "all").encode([(0, example_of(ROW))])
    assert ids == labels


def test_results_between_the_answers_of_a_completion_are_not_trained() -> None:
    turns = [("assistant", "call f"), ("tool", "RESULT"), ("assistant", "done")]
    row = {"prompt": TALK[1:2], "completion": [{"role": role, "content": content} for role, content in turns]}
    found = trained(tokenizer_of("qwen2_5"), row)
    assert [*chain(*found)] == ["call f<|im_end|>\n", "done<|im_end|>\n"]


def test_a_call_like_the_one_before_it_is_looked_for_too() -> None:
    calls = [{"name": "add", "arguments": {"a": number}} for number in (1, 2)]
    talk = [TALK[1], {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(JobFailure, match=r"row 0, turn 1: it calls 'add', which"):
        trained(tokenizer_of("gptoss"), {"messages": talk})


def test_an_answer_behind_another_one_under_one_header_is_refused_where_it_cannot_be_divided() -> None:
    talk = [
        TALK[1],
        {"role": "assistant", "content": "First.", "weight": 0},
        {"role": "assistant", "content": "Second."},
    ]
    with pytest.raises(JobFailure, match=r"row 0, turn 2: it is written otherwise"):
        trained(tokenizer_of("gemma4"), {"messages": talk})


def test_a_final_answer_has_no_thought_before_a_call() -> None:
    talk = TALK[1:3]
    ((text,),) = trained(tokenizer_of("gptoss"), {"messages": talk, "tools": [TOOL]}, train_on="final_answer")
    assert "I look it up." not in text
    assert text.endswith('{"city": "Köln \\"Deutz\\""}<|call|>')


def test_an_answer_that_mentions_the_end_of_a_thought_is_trained_as_before() -> None:
    talk = [TALK[1], {"role": "assistant", "content": "Use </think> to end it."}, *TALK[5:]]
    assert trained(tokenizer_of("qwen3"), {"messages": talk})


def test_rows_without_a_trained_turn_are_dropped_and_counted() -> None:
    tokenizer = tokenizer_of("qwen3")
    silent = [TALK[1], {"role": "assistant", "content": "No.", "weight": 0}]
    _, report = tokenize_sft([example_of(ROW), example_of({"messages": silent})], tokenizer, 1024).collect()
    assert (report.num_rows, report.kept, report.dropped) == (2, 2, 1)
    with pytest.raises(JobFailure, match="none of the 1"):
        tokenize_sft([example_of({"messages": silent})], tokenizer, 1024).collect()


def test_pairs_labelled_answers_and_prompts_have_calls_and_tools_too() -> None:
    tokenizer = tokenizer_of("qwen3")
    prompt, call = TALK[:2], {"role": "assistant", "content": "", "tool_calls": [CALL]}
    before = tokenizer.apply_chat_template(prompt, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    pair: Any = parse_row({"prompt": prompt, "chosen": [call], "rejected": "No idea.", "tools": [TOOL]}, 0, "dpo")
    (row,) = tokenize_dpo([pair], tokenizer, 1024).collect()[0]
    assert tokenizer.decode(row["prompt_ids"]) == before
    assert tokenizer.decode(row["chosen_ids"]) == f"<think>\n\n</think>\n\n{HERMES}"
    assert tokenizer.decode(row["rejected_ids"]) == "<think>\n\n</think>\n\nNo idea.<|im_end|>\n"
    labelled: Any = parse_row({"prompt": prompt, "completion": [call], "label": True, "tools": [TOOL]}, 0, "kto")
    (row,) = tokenize_kto([labelled], tokenizer, 1024).collect()[0]
    assert tokenizer.decode(row["prompt_ids"]) == before
    assert tokenizer.decode(row["completion_ids"]) == f"<think>\n\n</think>\n\n{HERMES}"
    question: Any = parse_row({"prompt": prompt, "tools": [TOOL]}, 0, "prompts")
    (row,) = tokenize_prompts([question], tokenizer, 2048, 8).collect()[0]
    assert tokenizer.decode(row["prompt_ids"]) == before
    openai: Any = parse_row(
        {
            "input": {"messages": prompt, "tools": [TOOL]},
            "preferred_output": [call],
            "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
        },
        0,
        "dpo",
    )
    assert openai == pair


def test_a_thought_in_the_content_of_gpt_oss_is_its_analysis() -> None:
    talk = [TALK[1], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}]
    ((text,),) = trained(tokenizer_of("gptoss"), {"messages": talk, "tools": [TOOL]})
    assert text == (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "nemotron_3_nano", "qwen3_5_think", "qwen3_8"])
def test_a_thought_is_trained_behind_the_one_that_generation_begins_wherever_a_row_has_it(name: str) -> None:
    tokenizer, question = tokenizer_of(name), TALK[1]
    tokenizer.add_tokens(["<think>", "</think>"])  # then a token of two line ends spans the border
    before = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    thoughts = ("<think>\nHm.\n</think>\n\nYes.", "<think>Hm.</think>Yes.", "Hm.\n</think>\n\nYes.")
    found = []
    for content in (*thoughts, "\n</think>\n\nYes.", "Yes.", "Use </think> to end it."):
        turn = {"role": "assistant", "content": content}
        for row in ({"messages": [question, turn]}, {"prompt": [question], "completion": [turn]}):
            ((ids, labels),) = SftEncoder(Chat(tokenizer)).encode([(0, example_of(row))])[0]
            (text,) = runs(tokenizer, ids, labels)
            assert tokenizer.decode(ids) == before + text
            assert ids == [*tokenizer(before)["input_ids"], *tokenizer(text)["input_ids"]]
            found.append(re.sub(r"\s", "", text))
        pair: Any = parse_row({"prompt": [question], "chosen": [turn], "rejected": "No."}, 0, "dpo")
        (tokens,) = tokenize_dpo([pair], tokenizer, 1024).collect()[0]
        assert tokens["prompt_ids"] == tokenizer(before)["input_ids"]
        scored = tokens_behind(Chat(tokenizer), [turn_text(Chat(tokenizer), [question, turn], 1, 0)])
        assert scored == [[*tokens["prompt_ids"], *tokens["chosen_ids"]]]  # by a reward model
        found.append(re.sub(r"\s", "", tokenizer.decode(tokens["chosen_ids"])))
    end = ENDS["deepseekv3"] if name.startswith("deepseek") else "<|im_end|>"
    answers = ["Hm.</think>Yes."] * 9 + ["</think>Yes."] * 6 + ["</think>Use</think>toendit."] * 3
    assert found == [answer + end for answer in answers]


def test_every_token_of_a_conversation_with_thoughts_is_trained_where_generation_begins_them() -> None:
    tokenizer = tokenizer_of("deepseek_r1_distill")
    talk = [TALK[1], *({"role": "assistant", "content": f"<think>\nHm {n}.\n</think>\n\nYes."} for n in (1,))]
    chat = Chat(tokenizer)
    (((ids, labels),),) = SftEncoder(chat, "all").encode([(0, example_of({"messages": talk}))])
    assert ids == labels
    assert "<think>\nHm 1.\n</think>\n\nYes." in tokenizer.decode(ids)
    again = [*talk, TALK[1], {"role": "assistant", "content": "<think>\nHm 2.\n</think>\n\nNo."}]
    SftEncoder(chat, "all").encode([(7, example_of({"messages": again}))])
    assert (chat.lost_texts.answers, chat.lost_texts.first_row) == (1, 7)


def test_thoughts_behind_a_missing_tag_are_dropped_where_reasoning_is() -> None:
    talk = [TALK[1], {"role": "assistant", "content": "Hm.\n</think>\n\nYes."}]
    assert trained(tokenizer_of("qwen2_5"), {"messages": talk}, reasoning="drop") == [["Yes.<|im_end|>\n"]]
    assert trained(tokenizer_of("qwen2_5"), {"messages": talk}) == [["Hm.\n</think>\n\nYes.<|im_end|>\n"]]


def test_thoughts_in_the_content_are_the_analysis_of_gpt_oss_with_and_without_their_first_tag() -> None:
    for content in ("<think>\nHm.\n</think>\n\nYes.", "Hm.\n</think>\n\nYes."):
        ((text,),) = trained(tokenizer_of("gptoss"), {"messages": [TALK[1], {"role": "assistant", "content": content}]})
        assert text.startswith("<|channel|>analysis<|message|>Hm.<|end|>")


def _two_calls(*results: dict[str, Any], ids: bool = True) -> dict[str, Any]:
    calls = [
        {"name": name, "arguments": {}, **({"id": f"c{number}"} if ids else {})}
        for number, name in enumerate(("weather", "news"))
    ]
    turns = [{"role": "tool", **result} for result in results]
    return {"messages": [TALK[1], {"role": "assistant", "tool_calls": calls}, *turns, TALK[6]]}


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
@pytest.mark.parametrize("ids", [True, False])
def test_results_get_the_name_of_their_call_by_its_id_its_name_or_their_order(name: str, ids: bool) -> None:
    tokenizer = tokenizer_of(name)
    first, second = {"content": "7"}, {"content": "N"}
    both = 'response:weather{value:<|"|>7<|"|>}<tool_response|><|tool_response>response:news{value:<|"|>N<|"|>}'
    rows = [[first, second], [{**first, "name": "weather"}, second], [{**first, "tool_name": "weather"}, second]]
    if ids:
        rows += [[first, {**second, "call_id": "c1"}], [{**first, "tool_call_id": "c0"}, {**second, "call_id": "c1"}]]
    for results in rows:
        for sequence in SftEncoder(Chat(tokenizer)).encode([(0, example_of(_two_calls(*results, ids=ids)))])[0]:
            text = tokenizer.decode(sequence[0])
        assert both in text
    named = _two_calls({**second, "name": "news"}, first, ids=ids)
    assert "response:news" in tokenizer.decode(SftEncoder(Chat(tokenizer)).encode([(0, example_of(named))])[0][-1][0])


@pytest.mark.parametrize(
    "results",
    [[{"content": "7"}], [{"content": "7"}] * 3, [{"content": "7", "tool_call_id": "of none"}]],
    ids=["one of two", "three of two", "an unknown id"],
)
def test_a_result_whose_call_is_not_known_is_refused_where_the_template_writes_its_name(results: Any) -> None:
    row = _two_calls(*results)
    for name in ("gemma4", "gemma4_v5"):
        with pytest.raises(JobFailure, match=r"row 0, turn 2: it is a tool's result that names no call before it"):
            trained(tokenizer_of(name), row)
    assert trained(tokenizer_of("qwen3"), row)


@pytest.mark.parametrize(
    "name", ["qwen3_5_think", "qwen3_5_nothink", "qwen3_8", "qwen3", "llama3_1", "nemotron_3_nano"]
)
def test_a_conversation_may_begin_with_an_answer(name: str) -> None:
    tokenizer, hi = tokenizer_of(name), {"role": "assistant", "content": "Hi."}
    end = "<|eot_id|>" if name == "llama3_1" else "<|im_end|>\n"
    yes = {"role": "assistant", "content": "Yes."}
    for before in ([], TALK[:1]):
        for rest in (
            [TALK[1], yes],
            [TALK[1], yes, TALK[5], {**yes, "weight": 0}],
            [TALK[1], {**yes, "thinking": "Hm."}],
        ):
            (first, *_), *_ = trained(tokenizer, {"messages": [*before, hi, *rest]})
            assert first.removeprefix("</think>") == f"Hi.{end}"
        ((only,),) = trained(tokenizer, {"messages": [*before, {**hi, "weight": 0}, TALK[1], yes]})
        assert only.endswith(f"Yes.{end}")
    with pytest.raises(
        JobFailure, match=r"row 0, turn 0: it is an answer before any question\. Expected a user's turn"
    ):
        trained(tokenizer, {"messages": [{**hi, "tool_calls": [CALL]}, TALK[1], yes]})


def test_answers_that_are_only_a_thought_are_not_trained_without_it() -> None:
    only = {"role": "assistant", "content": "<think>\nHm.\n</think>"}
    rows = [[TALK[1], only], [TALK[1], only, TALK[5], TALK[6]], [TALK[1], {**only, "tool_calls": [CALL]}]]
    for name in ("qwen2_5", "qwen3", "qwen3_5_think"):
        tokenizer, chat = tokenizer_of(name), Chat(tokenizer_of(name))
        encoded = SftEncoder(chat, reasoning="drop").encode(
            [(n, example_of({"messages": row})) for n, row in enumerate(rows)]
        )
        texts = [[text for sequence in sequences for text in runs(tokenizer, *sequence)] for sequences in encoded]
        assert texts[0] == []
        assert [text.endswith("Bye.<|im_end|>\n") for text in texts[1]] == [True]
        assert "weather" in texts[2][0]
        assert "2 answers are only a thought, which reasoning 'drop' leaves out: not trained" in [
            *chat.warnings("row", 3)
        ]
    examples = [example_of({"messages": row}) for row in rows]
    _, report = tokenize_sft(examples, tokenizer_of("qwen3"), 1024, reasoning="drop").collect()
    assert (report.kept, report.dropped) == (2, 1)


def test_rows_that_lose_all_their_answers_with_their_thoughts_are_refused_by_reasoning() -> None:
    only = [TALK[1], {"role": "assistant", "content": "<think>\nHm.\n</think>"}]
    with pytest.raises(
        JobFailure, match="none of the 1 rows has a token to train on: 1 answers are only a thought, wh"
    ):
        tokenize_sft([example_of({"messages": only})], tokenizer_of("qwen3"), 1024, reasoning="drop").collect()
    rows = [example_of({"messages": talk}) for talk in (only, TALK[5:])]
    _, report = tokenize_sft(rows, tokenizer_of("qwen3"), 1024, reasoning="drop").collect()
    assert "1 of 2 rows were dropped: the loss covers none of their tokens" in report.warnings


def test_a_call_that_is_not_written_is_refused_where_it_is_not_trained_though_its_words_are_in_the_text() -> None:
    tokenizer = tokenizer_of("gptoss")
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Paris")]
    question = {"role": "user", "content": "Is the weather of city Rome, or Paris, warm?"}
    talk = [
        question,
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": t} for t in "78"),
        TALK[6],
    ]
    pair: Any = parse_row({"prompt": talk[:-1], "chosen": "7.", "rejected": "8."}, 0, "dpo")
    prompt: Any = parse_row({"prompt": talk[:-1]}, 0, "prompts")
    example = example_of({"messages": talk})
    for tokenized in (
        tokenize_dpo([pair], tokenizer, 1024),
        tokenize_prompts([prompt], tokenizer, 2048, 8),
        tokenize_sft([example], tokenizer, 1024, train_on="last_turn"),
        tokenize_sft([example], tokenizer, 1024, train_on_input=True),
    ):
        with pytest.raises(
            JobFailure, match=r"row 0, turn 1: it calls 'weather', which .* not write \(call 1 of the turn\)"
        ):
            tokenized.collect()
    one = [question, {**talk[1], "tool_calls": calls[:1]}, *talk[3:]]
    assert trained(tokenizer, {"messages": one}, train_on="last_turn")


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "deepseek_r1_distill", "glm4moe", "qwen2_5"]
)
def test_a_final_answer_has_no_empty_thought_before_it(name: str) -> None:
    talks = [
        [TALK[1], {"role": "assistant", "content": content}] for content in ("Yes.", "<think>\nHm.\n</think>\n\nYes.")
    ]
    found = [trained(tokenizer_of(name), {"messages": talk}, train_on="final_answer") for talk in talks]
    assert found[0] == found[1]
    assert found[0][0][0].startswith("Yes.")


def test_a_job_trains_on_calls(tmp_path: Path) -> None:
    """With a sequence for each answer: rows are rows, and steps are made of sequences."""
    rows = [{**ROW, "messages": [*TALK[:-1], {"role": "assistant", "content": f"Bye {n}."}]} for n in range(8)]
    shutil.copytree(tiny_model(), model := tmp_path / "model")
    (model / "chat_template.jinja").write_text((_TEMPLATES / "qwen3.jinja").read_text())
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, rows=rows, batch_size=4, max_seq_length=1024))
    assert status == 0
    (prepared,) = of_kind(events, Prepared)
    assert prepared.num_rows == 16
    assert len(of_kind(events, Progress)) == 4
