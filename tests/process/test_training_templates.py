"""What TRL's training templates mark as trained, and what we train under the templates that inference has.

TRL ships, for templates that it knows, a second one: patched so that earlier turns stay as they are, with
`{% generation %}` around what is trained. We keep the template of inference, find the answers in what it writes, and
make several sequences of a conversation where it has to be. Both are compared turn by turn: what is before a trained
turn, and what of it carries loss. Each difference is in `DIFFERENCES`; which side is right is asked of inference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_stop_token_trained

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.tokenize import SftEncoder
from llama_stack_provider_trl.recipes.model.loading import load_job_tokenizer
from llama_stack_provider_trl.specs.chat_templates import OF_TRL
from llama_stack_provider_trl.specs.events import Failed, Progress
from tests.process.tool_rows import CALL, TOOL, example_of, tokenizer_of
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Write texts only as parts of a list, beside images."""
PATCHED = [name for name in OF_TRL if (_TEMPLATES / f"{name}_training.jinja").exists()]
"""Those with a training template."""

ASK = {"role": "user", "content": "How warm is it?"}
SAY = {"role": "assistant", "content": "Seven degrees."}
THANK = {"role": "user", "content": "Thanks."}
BYE = {"role": "assistant", "content": "Bye."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"t": 7}'}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one answer": [ASK, SAY],
    "two answers": [ASK, SAY, THANK, BYE],
    "a system turn": [{"role": "system", "content": "Be brief."}, ASK, SAY],
    "thoughts": [ASK, {**SAY, "reasoning_content": "It says 7."}, THANK, {**BYE, "reasoning_content": "Done."}],
    "a call": [ASK, CALLED, RESULT, SAY],
}

REASONS = {
    "header": "TRL has loss on what inference renders before the answer: a header, a line end, `<think>`, or an empty "
    "thought",
    "context": "TRL's template keeps thoughts, or empty ones, in earlier turns, where inference has none, or begins a "
    "turn where inference continues one; ours has a sequence for each answer, behind what inference renders",
    "text": "ours trains an answer with the thought of its row, or closes the one that inference begins; TRL's "
    "template writes the thought of an earlier answer as it writes earlier turns: not at all, or as an empty one",
    "end": "ours ends an answer as a last turn ends: Phi-3 with its eos, too, and never gpt-oss with the `<|end|>` "
    "that stands for `<|return|>` in earlier turns; TRL trains no token behind a call of Gemma's",
    "refused": "the template writes no tools, or drops calls: TRL trains what is left",
}
"""Why both differ. Before each trained turn, ours has what inference has, which `compared` asserts."""
_ANSWERS = ("one answer", "two answers", "a system turn", "thoughts")
_THINKING = {
    **dict.fromkeys(("one answer", "a system turn", "a call"), "header"),
    **dict.fromkeys(("two answers", "thoughts"), "context header text"),
}
"""Of Qwen 3.5 and 3.6: `<think>`, or an empty thought, is what generation begins with, and no earlier turn has it."""
_NO_TOOLS = {"a call": "refused"}
DIFFERENCES: dict[str, dict[str, str]] = {
    name: of
    for names, of in {
        ("deepseek_r1_distill", "deepseekv3"): {**dict.fromkeys(_ANSWERS, "header text"), **_NO_TOOLS},
        ("diffusion_gemma",): {"thoughts": "text", "a call": "context end"},
        ("glm4moe",): {"thoughts": "text"},
        ("gptoss",): {
            **dict.fromkeys(("one answer", "a system turn", "a call"), "header"),
            "two answers": "end header",
            "thoughts": "header text",
        },
        ("lfm2", "llama3", "qwen2_5_vl"): _NO_TOOLS,
        ("muse_glimmer", "qwen2_5", "qwen3_8"): dict.fromkeys(TALKS, "header"),
        ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"): dict.fromkeys(
            TALKS, "header text"
        ),
        ("phi3", "phi3_5"): {"thoughts": "end", **_NO_TOOLS},
        ("qwen3",): {"two answers": "context text", "thoughts": "context", "a call": "context"},
        ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"): _THINKING,
    }.items()
    for name in names
}
"""Template -> conversation -> keys of `REASONS`. All others are trained alike."""


class Turn(NamedTuple):
    """A trained turn: the text before it, and the text of it that carries loss."""

    before: str
    text: str


def own_turns(tokenizer: Any, talk: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Turn]:
    """As our encoder has them. Raises JobFailure: the template refuses the conversation."""
    row = {"messages": talk, **({"tools": tools} if tools else {})}
    ((*sequences,),) = SftEncoder(Chat(tokenizer)).encode([(0, example_of(row))])
    return [turn for ids, labels in sequences for turn in _runs(tokenizer, ids, [label != IGNORED for label in labels])]


def their_turns(tokenizer: Any, talk: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Turn]:
    """As TRL's training template marks them."""
    found = tokenizer.apply_chat_template(
        _as_taken(tokenizer, talk),
        chat_template=get_training_chat_template(tokenizer),
        tools=tools or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return _runs(tokenizer, found["input_ids"], map(bool, found["assistant_masks"]))


def inferred(tokenizer: Any, talk: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int) -> str:
    """What inference renders before a turn."""
    return str(
        tokenizer.apply_chat_template(
            _as_taken(tokenizer, talk)[:turn], tools=tools or None, add_generation_prompt=True, tokenize=False
        )
    )


def _as_taken(tokenizer: Any, talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form that the template takes."""
    turns, _ = Chat(tokenizer).as_taken(example_of({"messages": talk}).messages or [])
    return [dict(turn) for turn in turns]


def _runs(tokenizer: Any, ids: list[int], trained: Any) -> list[Turn]:
    marks = [*trained, False]
    begins = [at for at, mark in enumerate(marks) if mark and not (at and marks[at - 1])]
    ends = [at for at, mark in enumerate(marks) if not mark and at and marks[at - 1]]
    return [
        Turn(tokenizer.decode(ids[:begin]), tokenizer.decode(ids[begin:end]))
        for begin, end in zip(begins, ends, strict=True)
    ]


def family(name: str) -> Any:
    """The tokenizer of a template, with the tokens that it asks for."""
    tokenizer = tokenizer_of(name)
    if name == "llama3":
        tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    if name == "diffusion_gemma":
        tokenizer.add_tokens(["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"], True)
    return tokenizer


def compared(tokenizer: Any, talk: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """How TRL's training differs from ours, as a key of `REASONS`; empty: in nothing.

    Asserts that ours has before each trained turn what inference has.
    """
    try:
        theirs = their_turns(tokenizer, talk, tools)
    except TemplateError:
        with pytest.raises(JobFailure, match="row 0"):
            own_turns(tokenizer, talk, tools)
        return ""
    try:
        own = own_turns(tokenizer, talk, tools)
    except JobFailure:
        return "refused"
    found, answers = set(), [turn for turn, message in enumerate(talk) if message["role"] == "assistant"]
    for turn, one, other in zip(answers, own, theirs, strict=True):
        before = inferred(tokenizer, talk, tools, turn)
        assert one.before == before
        text = other.text
        if other.before != before:
            found.add("header" if before.startswith(other.before) else "context")
            if (other.before + text).startswith(before):
                text = (other.before + text).removeprefix(before)
        if text != one.text:
            found.add("end" if one.text.startswith(text) or text.startswith(one.text) else "text")
    return " ".join(sorted(found))


@pytest.mark.parametrize("name", PATCHED)
def test_what_is_trained_is_what_trl_marks_or_the_difference_has_a_reason(name: str) -> None:
    tokenizer = family(name)
    found = {talk: compared(tokenizer, turns, [TOOL] if talk == "a call" else []) for talk, turns in TALKS.items()}
    assert {talk: difference for talk, difference in found.items() if difference} == DIFFERENCES.get(name, {})
    assert {key for difference in found.values() for key in difference.split()} <= REASONS.keys()


@pytest.mark.parametrize("name", PATCHED)
def test_the_token_that_ends_an_answer_is_trained(name: str) -> None:
    """By the check that TRL makes of its own templates."""
    tokenizer = family(name)
    assert is_chat_template_stop_token_trained(tokenizer, get_training_chat_template(tokenizer))
    (turn,) = own_turns(tokenizer, TALKS["one answer"], [])
    ids = tokenizer(turn.text.rstrip(), add_special_tokens=False)["input_ids"]
    assert ids[-1] in tokenizer.get_added_vocab().values()


def test_the_names_of_the_option_are_those_of_the_templates_that_trl_ships() -> None:
    shipped = {path.stem for path in _TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")}
    assert {*OF_TRL, *OF_IMAGES} == shipped


def test_a_job_takes_a_template_by_its_name_and_exports_its_text(tmp_path: Path) -> None:
    text = (_TEMPLATES / "qwen3.jinja").read_text()
    losses = []
    for template in ("qwen3", text):
        root = tmp_path / str(len(losses))
        spec = job_spec(root, tiny_model(), rows=[{"messages": TALKS["thoughts"]}] * 2, chat_template=template)
        status, events = run(root / "run", spec)
        assert status == 0, [event.message for event in of_kind(events, Failed)]
        losses.append([event.metrics["loss"] for event in of_kind(events, Progress)])
        assert AutoTokenizer.from_pretrained(spec.checkpoint_dir / "final").chat_template == text
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", OF_TRL)
def test_each_template_by_name_trains_an_answer(tmp_path: Path, name: str) -> None:
    tokenizer = load_job_tokenizer(job_spec(tmp_path, tiny_model(), chat_template=name))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    turns = own_turns(tokenizer, TALKS["two answers"], [])
    assert ["Seven degrees." in turns[0].text, "Bye." in turns[1].text] == [True, True]
