"""The preview says whether what is trained is what inference renders before each turn, by a comparison of its own."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.inferred import ComparedTurn, Inference
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.tokenize import Encoded, SftEncoder
from llama_stack_provider_trl.recipes.preview import examined
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Previewed
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.rows import SftExample, parse_row
from tests.process.numbered_rows import NUMBERED
from tests.process.talks import TALK, THINKING_WITH_TOOLS
from tests.process.tool_rows import _TEMPLATES, CALL, ROW, TOOL, WRITTEN, _generated, example_of, row_for, tokenizer_of
from tests.tiny import CHATML, qwen_tokenizer, shared_dir, tiny_model, tiny_tokenizer
from tests.training import job_spec

pytestmark = pytest.mark.process

SHOUTED = CHATML.replace("message['content']", "(message['content'] if loop.last else message['content'] | upper)")
"""Writes earlier turns otherwise than the last one."""
THOUGHTS = [
    {**message, "content": f"<think>\nHm {turn}.\n</think>\n\n{message['content'].strip()}"}
    if message["role"] == "assistant"
    else message
    for turn, message in enumerate(TALK)
]
WEIGHTED = [{**message, "weight": 0} if turn == 1 else message for turn, message in enumerate(TALK)]


def compared(tokenizer: Any, row: dict[str, Any], train_on: Any = "assistant") -> list[ComparedTurn]:
    chat, example = Chat(tokenizer), example_of(row)
    (sequences,) = SftEncoder(chat, train_on).encode([(0, example)])
    return Inference(chat).of_sequences(example, sequences, train_on)


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def previewed(root: Path, algorithm: Any, rows: list[Any], template: str = "", **changes: Any) -> Previewed:
    model = tiny_model()
    if template:
        shutil.copytree(model, model := root / "model")
        (model / "chat_template.jinja").write_text(template)
    spec = job_spec(root, model, algorithm, rows=rows, **{"max_seq_length": 2048, **changes})
    return examined(spec, PreviewSpec(), lambda: None)


@pytest.mark.parametrize("name", WRITTEN)
def test_turns_that_are_trained_behind_what_inference_renders_are_equal(name: str) -> None:
    tokenizer, generator, equal = tokenizer_of(name), random.Random(name), 0
    for _ in range(20):
        row = row_for(name, _generated(generator))
        if not any({"tool_calls", "reasoning_content"} & message.keys() for message in row["messages"]):
            continue
        try:
            found = compared(tokenizer, row)
        except JobFailure:
            continue  # the template writes such a row otherwise than it is: it is not trained
        assert [turn.difference for turn in found] == [""] * len(found)
        equal += len(found)
    assert equal > 10


@pytest.mark.parametrize("template", [CHATML, THINKING_WITH_TOOLS])
@pytest.mark.parametrize("talk", [TALK, THOUGHTS, WEIGHTED])
@pytest.mark.parametrize("train_on", ["assistant", "last_turn", "final_answer"])
def test_templates_that_leave_out_earlier_thoughts_are_equal(template: str, talk: list[Any], train_on: str) -> None:
    found = compared(with_template(template), {"messages": talk}, train_on)
    assert [turn.difference for turn in found] == [""] * len(found)
    answers = [1, 3, 5] if talk is not WEIGHTED else [3, 5]
    assert [turn.turn for turn in found] == (answers if train_on == "assistant" else [5])
    if template is THINKING_WITH_TOOLS and talk is THOUGHTS and train_on == "assistant":
        assert [turn.sequence for turn in found] == [0, 1, 2]


def test_a_template_that_writes_the_number_of_turns_first_is_named(tmp_path: Path) -> None:
    found = previewed(tmp_path, "sft", [{"messages": TALK[:2]}, {"messages": TALK}], NUMBERED)
    assert found.inference.turns == found.inference.different == 4
    first = found.inference.first_different
    assert first.startswith("row 0, turn 1: token "), first
    assert "of ' 2\\n<|im_start|>user" in first
    assert "and at inference ' ' (id 223 of ' 1\\n<|im_start|>user" in first
    assert "correct the model's chat template" in first
    outcomes = [(turn.turn, turn.outcome, bool(turn.reason)) for row in found.rows for turn in row.turns]
    assert outcomes == [(turn, "different", True) for turn in (1, 1, 3, 5)]
    # With a weight each turn has a sequence of its own, behind what inference renders.
    assert [turn.difference for turn in compared(with_template(NUMBERED), {"messages": WEIGHTED})] == ["", ""]


def test_earlier_turns_that_are_written_otherwise_are_named_from_the_first_difference_on() -> None:
    found = compared(with_template(SHOUTED), {"messages": TALK})
    assert [bool(turn.difference) for turn in found] == [True, True, True]
    assert re.search("of 'WHAT IS .* and at inference .* of 'What is", found[0].difference)
    alone = compared(with_template(SHOUTED), {"messages": TALK[:2]})
    assert [bool(turn.difference) for turn in alone] == [True], "the question is the last turn at inference"


def test_real_rows_under_a_real_tokenizer_are_equal_also_where_generation_begins_within_a_thought() -> None:
    tokenizer, rows = qwen_tokenizer(), shared_dir() / "data" / "instruct_999.jsonl"
    examples = [parse_row(json.loads(line), 0, "sft") for line in rows.read_text().splitlines()[:60]]
    for template in ("qwen2_5", "qwen3", "phi3", "qwen3_6"):
        tokenizer.chat_template = (_TEMPLATES / f"{template}.jinja").read_text()
        chat = Chat(tokenizer)
        for example in examples:
            assert isinstance(example, SftExample)
            (sequences,) = SftEncoder(chat).encode([(0, example)])
            (turn,) = Inference(chat).of_sequences(example, sequences, "assistant")
            assert not turn.difference, (template, turn)
    thought = [{**message, "reasoning_content": "Hm."} for message in TALK]
    assert [turn.difference for turn in compared(tokenizer, {"messages": thought})] == [""] * 3


def test_a_token_that_spans_the_border_before_an_answer_is_named() -> None:
    """Llama 3's header ends with two line feeds, which this vocabulary reads as one token only at the end of a text."""
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = (_TEMPLATES / "llama3_training.jinja").read_text()
    found = compared(tokenizer, {"messages": TALK})
    assert all("'\\n' (id " in turn.difference and "'\\n\\n' (id " in turn.difference for turn in found)
    assert [turn.difference for turn in compared(tokenizer, {"messages": WEIGHTED})] == ["", ""]


def broken(labels: list[int], ids: list[int], what: str) -> list[int]:
    first = next(at for at, label in enumerate(labels) if label != IGNORED)
    end = labels.index(IGNORED, first)
    changed = list(labels)
    match what:
        case "early":
            changed[first - 1] = ids[first - 1]
        case "late":
            changed[first] = IGNORED
        case "missing":
            changed[first:end] = [IGNORED] * (end - first)
        case "more":
            changed[0] = ids[0]
        case "short":
            changed[first + 2 : end] = [IGNORED] * (end - first - 2)
        case "whole":
            changed = list(ids)
    return changed


@pytest.mark.parametrize(
    ("what", "turns", "part"),
    [
        ("early", [1], "the loss begins at token"),
        ("late", [1], ", without loss, and at inference the answer begins there"),
        ("missing", [1], "no token of it carries loss"),
        ("more", [5], "carries loss, and belongs to no trained turn"),
        ("short", [1], "is not among the tokens that carry loss"),
        ("whole", [1, 3, 5], "the loss begins at token 0"),
    ],
)
def test_a_loss_on_other_tokens_than_those_of_the_turn_is_named(what: str, turns: list[int], part: str) -> None:
    chat, example = Chat(tiny_tokenizer()), example_of({"messages": TALK})
    ((encoded,),) = SftEncoder(chat).encode([(0, example)])
    ids, labels = encoded
    changed: list[Encoded] = [(ids, broken(labels, ids, what))]
    found = [turn for turn in Inference(chat).of_sequences(example, changed, "assistant") if turn.difference]
    assert [turn.turn for turn in found] == turns
    assert part in found[0].difference


def test_a_sequence_behind_other_tokens_is_named() -> None:
    chat, example = Chat(tiny_tokenizer()), example_of({"messages": TALK})
    ((ids, labels),) = SftEncoder(chat).encode([(0, example)])[0:1][0]
    doubled = ([ids[0], *ids], [IGNORED, *labels])  # a second first token
    found = Inference(chat).of_sequences(example, [doubled], "assistant")
    assert all(turn.difference.startswith("token 1 is ") for turn in found)


def test_an_answer_before_any_question_has_no_inference() -> None:
    (found,) = compared(with_template(CHATML), {"messages": TALK[1:2]})
    assert "renders nothing for the messages before it" in found.difference
    assert found.is_unasked


def test_an_answer_to_a_system_turn_alone_is_compared_where_the_template_writes_that_turn() -> None:
    task = {"messages": [{"role": "system", "content": "Count."}, {"role": "assistant", "content": "One."}]}
    (found,) = compared(with_template(CHATML), task)
    assert (found.difference, found.is_unasked) == ("", False)
    (found,) = compared(with_template(NUMBERED), task)
    assert found.difference
    assert not found.is_unasked


def test_a_greeting_counts_apart_and_the_answers_behind_it_as_ever(tmp_path: Path) -> None:
    hello = {"role": "assistant", "content": "Hello."}
    found = previewed(tmp_path, "sft", [{"messages": [hello, *TALK]}, {"messages": TALK}])
    counts, answers = found.inference, sum(message["role"] == "assistant" for message in TALK)
    assert (counts.unasked, counts.equal, counts.different, counts.turns) == (1, 2 * answers, 0, 2 * answers + 1)
    assert counts.first_different == ""
    assert [turn.outcome for turn in found.rows[0].turns] == ["unasked", *["equal"] * answers]


def test_with_loss_on_every_token_the_turns_before_an_answer_are_compared() -> None:
    assert [turn.difference for turn in compared(with_template(CHATML), {"messages": TALK}, "all")] == [""] * 3
    found = compared(tokenizer_of("qwen3"), ROW, "all")
    assert [bool(turn.difference) for turn in found] == [False, True, False], "the thought before a call is left out"
    assert Inference(Chat(tiny_tokenizer())).of_sequences(SftExample(None, None, "text"), [], "all") == []


def test_turns_of_rows_that_are_cut_count_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "Short?", "completion": "Yes."}, {"prompt": "Short?", "completion": "word " * 80}]
    found = previewed(tmp_path, "sft", rows, max_seq_length=24)
    counts = found.inference
    assert (counts.turns, counts.equal, counts.different, counts.cut) == (2, 1, 0, 1)
    assert [turn.outcome for row in found.rows for turn in row.turns] == ["equal", "cut"]
    assert counts.first_different == ""


def test_pairs_labelled_answers_and_prompts_are_compared_too(tmp_path: Path) -> None:
    talk, tools = ROW["messages"][:2], [TOOL]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    template = (_TEMPLATES / "qwen3.jinja").read_text()
    pair = {"prompt": talk, "chosen": [call], "rejected": ["No.", "Never."], "tools": tools}
    found = previewed(tmp_path / "dpo", "dpo", [pair], template)
    assert (found.inference.turns, found.inference.equal) == (4, 4)
    assert [(turn.part, turn.turn) for turn in found.rows[1].turns] == [("chosen", 2), ("rejected", 2)]
    assert (found.rows[0].tools, found.rows[0].tool_calls) == (1, 1)
    assert found.rows[0].roles == ["system", "user", "assistant", "assistant"]
    labelled = {"prompt": talk, "completion": [call], "label": True, "tools": tools}
    found = previewed(tmp_path / "kto", "kto", [labelled] * 2, template)
    assert (found.inference.turns, found.inference.equal) == (2, 2)
    assert found.rows[0].turns[0].part == "completion"
    digits = RewardSource(name="digits", check=AnswerCheck(type="regex", pattern="[0-9]"))
    method = GrpoSpec(rewards=(digits,), num_generations=2, max_completion_length=4)
    found = previewed(tmp_path / "grpo", "grpo", [{"prompt": "1 + 1?"}], method=method)
    assert (found.inference.turns, found.inference.equal) == (1, 1)
    assert found.rows[0].turns[0].part == "prompt"


def test_an_answer_of_a_pair_behind_another_prompt_is_named(tmp_path: Path) -> None:
    found = previewed(tmp_path, "dpo", [{"prompt": "Well?", "chosen": "Yes.", "rejected": "No."}], NUMBERED)
    assert (found.inference.turns, found.inference.different) == (2, 2)
    assert found.inference.first_different.startswith("row 0, turn 1 (chosen): token ")


def test_a_row_shows_what_it_has_beside_its_texts(tmp_path: Path) -> None:
    talk = [dict(message) for message in ROW["messages"]]
    talk[2]["weight"] = 0
    template = (_TEMPLATES / "qwen3.jinja").read_text()
    found = previewed(tmp_path, "sft", [{**ROW, "messages": talk}, {"text": "Only text."}], template)
    first, second, text = found.rows
    assert first.roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert (first.tools, first.tool_calls, first.untrained_answers) == (1, 1, 1)
    assert [(row.thoughts, row.thoughts_kept) for row in (first, second)] == [(2, 2), (2, 0)]
    assert [[turn.turn for turn in row.turns] for row in (first, second, text)] == [[4], [6], []]
    assert (text.roles, found.inference.turns, found.inference.equal) == ([], 2, 2)
    dropped = previewed(tmp_path / "drop", "sft", [ROW], template, reasoning="drop")
    assert {(row.thoughts, row.thoughts_kept) for row in dropped.rows} == {(2, 0)}
    assert dropped.inference.equal == dropped.inference.turns == 3


def test_a_preview_stops_comparing_where_inference_would_render_too_much() -> None:
    chat, example = Chat(tiny_tokenizer()), example_of({"messages": TALK})
    inference = Inference(chat, most_tokens=10)
    (sequences,) = SftEncoder(chat).encode([(0, example)])
    assert inference.of_sequences(example, sequences, "assistant") == []
    assert inference.left_out == 3
