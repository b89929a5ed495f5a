"""Renders conversations with a tokenizer's chat template, and counts the turns that it leaves out."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.images import images_in
from ...specs.job import DroppedTurns, JobSpec
from ...specs.rows import Message, is_plain
from ...specs.tool_calls import Tool
from .endings import Endings, Examples
from .forms import Forms, with_links
from .images import Images
from .marks import CLOSE, OPEN, common_prefix, marked_texts, markings, unmarked, visible
from .templates import rendered
from .tokenizer_calls import call_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ '### ' + message['role'] | capitalize + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Assistant:\n' }}{% endif %}"
)
"""For tokenizers without a template: plain-text role headers, no new tokens, an assistant turn ends in `eos_token`."""


DEFAULT_TEMPLATE_WARNING = (
    "the tokenizer has no chat template: it was given a plain one (### User: ... ### Assistant: ...)"
)


_MOST_SHAPES = 10_000
"""Sequences of roles that are remembered."""


TokenIndex = Callable[[int, bool], int]
"""(position, straddling) -> number of tokens that end at or before a character; if straddling, that begin before it."""


class Rendered(NamedTuple):
    text: str
    unwritten: list[int]
    """The turns that it does not write."""
    partly: list[int]
    """The trained answers that it writes without a part of their text."""


@dataclass
class _LostRows:
    """The rows of which a chat template does not write all."""

    rows: int = 0
    first_row: int = 0

    def _add(self, row: int) -> None:
        self.first_row = row if not self.rows else min(row, self.first_row)
        self.rows += 1

    def _add_rows(self, others: _LostRows) -> None:
        if others.rows:
            self._add(others.first_row)
            self.rows += others.rows - 1


@dataclass
class LostTurns(_LostRows):
    """The turns that a chat template does not write, over all rows."""

    roles: Counter[str] = field(default_factory=Counter)

    def add(self, roles: Sequence[str], row: int) -> None:
        if roles:
            self.roles.update(roles)
            self._add(row)

    def add_all(self, others: LostTurns) -> None:
        self.roles.update(others.roles)
        self._add_rows(others)

    def message(self, unit: str, total: int, owner: str = "the", row: str = "row") -> str | None:
        """What a user should know of them; None: there are none.

        Args:
            owner: whose template it is, where it is not the trained model's.
        """
        if not self.rows:
            return None
        roles = ", ".join(f"{count} {role}" for role, count in sorted(self.roles.items()))
        return (
            f"{owner} chat template leaves out turns of {self.rows} of {total} {unit}s ({roles}), first in {row} "
            f"{self.first_row}: the model does not see them. Put their text into user turns, or correct the template"
        )


@dataclass
class LostTexts(_LostRows):
    """The trained answers that a chat template writes without a part of their text, over all rows."""

    answers: int = 0

    def add(self, answers: int, row: int) -> None:
        if answers:
            self.answers += answers
            self._add(row)

    def add_all(self, others: LostTexts) -> None:
        self.answers += others.answers
        self._add_rows(others)

    def message(self, unit: str, total: int) -> str | None:
        """What a user should know of them; None: there are none."""
        if not self.rows:
            return None
        return (
            f"thoughts, or other text, of {self.answers} answers are not written by the chat template, so they are not "
            f"trained ({self.rows} of {total} {unit}s, first in row {self.first_row}): correct the template, or, where "
            "it leaves out only thoughts of earlier answers, set train_on_input to false: then each answer has a "
            "sequence of its own"
        )


@dataclass
class ControlTokens(_LostRows):
    """The rows whose own texts have control tokens of the tokenizer."""

    first: str = ""

    def add(self, token: str, row: int) -> None:
        self.first = token if not self.rows or row < self.first_row else self.first
        self._add(row)

    def add_all(self, others: ControlTokens) -> None:
        self.first = self.first if self.rows else others.first
        self._add_rows(others)

    def message(self, unit: str, total: int) -> str | None:
        """What a user should know of them; None: there are none."""
        if not self.rows:
            return None
        return (
            f"{self.rows} of {total} {unit}s have control tokens of the tokenizer in the text of a turn, first "
            f"{self.first!r} in row {self.first_row}: they are tokenized as if the chat template had written them, and "
            "may end a turn or begin another one. Take them out of the texts, unless that is meant"
        )


def refuse_lost_turns(
    dropped_turns: DroppedTurns, lost: Iterable[str], where: str = "", reason: Reason = Reason.invalid_dataset
) -> None:
    """Fail a job that is not to lose turns. Raises JobFailure: there are such turns, and the job's `dropped_turns` is
    refuse.

    Args:
        lost: what `LostTurns.message` and `LostTexts.message` have.
    """
    for message in lost if dropped_turns == "refuse" else ():
        raise JobFailure(reason, f"{where}{message}; with dropped_turns 'warn' the job trains without them")


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give a tokenizer without a chat template the default one. Raises JobFailure: `invalid_model` if there is no
    `eos_token` either: such a model could not learn to stop. Returns the warning to show, or None where the tokenizer
    had a template."""
    if tokenizer.chat_template:
        return None
    if tokenizer.eos_token is None:
        raise JobFailure(
            Reason.invalid_model,
            "the tokenizer has neither a chat_template nor an eos_token: set eos_token in its tokenizer_config.json",
        )
    tokenizer.chat_template = default_chat_template(tokenizer)
    return DEFAULT_TEMPLATE_WARNING


def check_chat_template(spec: JobSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Try the template that a job sets for its tokenizer. Raises JobFailure: invalid_request, it is no Jinja;
    invalid_model, it takes more than the limits allow."""
    if spec.data.chat_template is None:
        return
    try:
        rendered(tokenizer, [{"role": "user", "content": "Hello."}], add_generation_prompt=True)
    except TemplateSyntaxError as error:
        found = f"provider_options.chat_template is no Jinja template: {error.message} in line {error.lineno}"
        hint = "Correct it, or leave it out, and the model's own is used"
        raise JobFailure(Reason.invalid_request, f"{found}. {hint}") from error
    except (TemplateError, TypeError, ValueError):
        return  # it may need other turns: the rows show it


def default_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    begins = (
        tokenizer.bos_token_id is not None
        and call_tokenizer(tokenizer, ["a"])["input_ids"][0][0] == tokenizer.bos_token_id
    )
    return ("{{ bos_token }}" if begins else "") + DEFAULT_CHAT_TEMPLATE


class Chat:
    """A tokenizer and its chat template, with counts of what the template changed. `images` reads the images of
    conversations; None: the model reads none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: Images | None = None) -> None:
        self.tokenizer, self.images = tokenizer, images
        self.template_warning: str | None = None
        """The warning that the default template was given."""
        self.forms = Forms(self._applied)
        """What the template takes of turns beside their content."""
        self.expanded = 0
        """Rows of which several sequences were made, each with the turns before an answer as inference has them."""
        self.has_rendered = False
        """Whether a conversation was rendered, and the tokenizer has a template for it."""
        self.diverged = 0
        """Examples whose prompt the template writes differently when the answer follows."""
        self.two_prompts = 0
        """Pairs whose prompt the template writes differently for each answer."""
        self.empty_thoughts = 0
        """Trained answers without a thought, behind a template that begins one in generation."""
        self.only_thoughts = 0
        """Answers that are only a thought, which the option `reasoning` leaves out."""
        self.unplaced_turns = 0
        """Assistant turns whose place in the text is not found, though the template writes them."""
        self.lost = LostTurns()
        self.lost_texts = LostTexts()
        self.controls = ControlTokens()
        self.equal_answers = 0
        """Pairs of different answers that have the same tokens."""
        self.endings = Endings(tokenizer, self.render_part)
        """Where the answers end."""
        self.trained_headers = Examples()
        """Headers of answers that the template does not write in generation, so that the model has to."""
        self._calls_lost: dict[Any, list[tuple[int, int]]] = {}
        """By the kinds of turns: the calls that the template does not write."""
        self._unwritten: dict[tuple[bool, tuple[str, ...]], list[int] | None] = {}
        """By what the last turn is for, and the roles of the turns: the turns that the template does not write; None:
        that depends on the contents, too."""

    @cached_property
    def has_generation_header(self) -> bool:
        prompt: list[Message] = [{"role": "user", "content": OPEN + CLOSE}]
        plain = self.render_part(prompt)
        return plain is None or plain != self.render_part(prompt, add_generation_prompt=True)

    def render(self, messages: Sequence[Message], row: int, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text; `add_generation_prompt` adds the header of the next answer."""
        return self.render_whole(messages, row, add_generation_prompt=add_generation_prompt).text

    def render_counted(self, messages: Sequence[Message], row: int, *, add_generation_prompt: bool = False) -> str:
        """As `render`; what the template does not write is counted. Without `add_generation_prompt` all answers are
        trained."""
        trained_from = None if add_generation_prompt else 0
        found = self.render_whole(messages, row, add_generation_prompt=add_generation_prompt, trained_from=trained_from)
        self.lost.add([messages[turn]["role"] for turn in found.unwritten], row)
        self.lost_texts.add(len(found.partly), row)
        return found.text

    def render_whole(
        self,
        messages: Sequence[Message],
        row: int,
        *,
        add_generation_prompt: bool = False,
        trained_from: int | None = None,
    ) -> Rendered:
        """As `render`, with the turns that the template does not write. Raises JobFailure: the template refuses the
        conversation, or leaves out the answer.

        Args:
            trained_from: the first turn that is trained; None: none is.
        """
        text = self.written(messages, row, add_generation_prompt=add_generation_prompt)
        unwritten = self.unwritten_turns(messages, text, add_generation_prompt)
        if not add_generation_prompt and _last_answer(messages) in unwritten:
            raise _left_out(row)
        trained = [] if trained_from is None else range(trained_from, len(messages))
        partly = [
            turn
            for turn in trained
            if messages[turn]["role"] == "assistant"
            and turn not in unwritten
            and not self._is_whole(messages, turn, text, add_generation_prompt)
        ]
        return Rendered(text, unwritten, partly)

    def written(self, messages: Sequence[Message], row: int, *, add_generation_prompt: bool = False) -> str:
        """As `render`, without a look at what is written. Raises JobFailure: the template refuses the conversation, or
        writes no tools."""
        self.template_warning = ensure_chat_template(self.tokenizer) or self.template_warning
        self.has_rendered = True
        self._refuse_tools(messages, row)
        try:
            text = self._render(messages, add_generation_prompt)
        except TemplateSyntaxError as error:
            found = f"the model's chat template is no Jinja template: {error.message} in line {error.lineno}"
            hint = "Correct it in the model's tokenizer files, or set the option chat_template"
            raise JobFailure(Reason.invalid_model, f"{found}. {hint}") from error
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}: the model's chat template refuses the turns {roles}: {error}. "
                "Change the row, or the template in the model's tokenizer files",
            ) from error
        for turn, number in self._lost_calls(messages, add_generation_prompt):
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}, turn {turn}: it calls {messages[turn]['tool_calls'][number]['name']!r}, which the model's "
                f"chat template does not write (call {number} of the turn). Expected one call in a turn, and no "
                "content beside it, as most of such templates require",
            )
        return text

    def _lost_calls(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[tuple[int, int]]:
        """Turns and numbers of the calls whose arguments the template does not write. A call's name, and words such as
        its arguments, may be elsewhere in the text: so marks are looked for.

        Which calls are written depends on the kinds of turns: it is found once for each sequence of them.
        """
        if not any(message.get("tool_calls") for message in messages):
            return []
        kinds = tuple(
            (
                message["role"],
                len(message.get("tool_calls", ())),
                not message["content"].strip(),
                "reasoning" in message,
            )
            for message in messages
        )
        key = add_generation_prompt, bool(messages[0].get("tools")), kinds
        if key not in self._calls_lost:
            if len(self._calls_lost) >= _MOST_SHAPES:
                self._calls_lost.clear()
            marked, marks = [], dict[tuple[int, int], str]()
            for turn, message in enumerate(messages):
                calls = []
                for number, call in enumerate(message.get("tool_calls", ())):
                    marks[turn, number] = f"zqcall{turn}of{number}zq"
                    calls.append({**call, "arguments": {"zqkey": marks[turn, number]}})
                marked.append({**message, "tool_calls": calls} if calls else message)
            text = self.render_part(marked, add_generation_prompt=add_generation_prompt)
            lost = [] if text is None else [place for place, mark in marks.items() if mark not in text]
            self._calls_lost[key] = lost
        return self._calls_lost[key]

    def _refuse_tools(self, messages: Sequence[Message], row: int) -> None:
        has_calls = any("tool_calls" in message for message in messages)
        if has_calls and self.forms.names_results and (unknown := with_links(messages)[1]):
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}, turn {unknown[0]}: it is a tool's result that names no call before it, and the model's "
                "chat template writes which tool's it is. Expected the tool_call_id of its call, its name, or a result "
                "for each call, in their order",
            )
        what = ""
        if messages and messages[0].get("tools") and not self.forms.writes_tools:
            what = "tools"
        elif has_calls and self.forms.calls is None:
            what = "tool calls and their results"
        if what:
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}: the model's chat template writes no {what}, and the messages come with them. Name a model "
                "whose template does, correct the template in the model's tokenizer files, or write them out as text "
                "in the messages",
            )

    def unwritten_turns(self, messages: Sequence[Message], text: str, add_generation_prompt: bool) -> list[int]:
        """Turns whose content the template does not write (what an answer thought before may rightly be missing).

        Whether a turn is written mostly depends on the roles alone: where its content is in the text, too, the template
        does not render this row again.
        """
        by_roles = self._unwritten_by_roles(tuple(message["role"] for message in messages), add_generation_prompt)
        unwritten = []
        for turn, message in enumerate(messages):
            if not (content := visible(message)):
                continue
            # A word such as "A" may be among the template's own, and a template may change contents.
            seems_written = content in text
            if by_roles is None or (turn in by_roles) == seems_written:
                is_written = self._is_written(messages, turn, text, add_generation_prompt)
            else:
                is_written = seems_written
            if not is_written:
                unwritten.append(turn)
        return unwritten

    def writes_turn(self, messages: Sequence[Message], turn: int, text: str) -> bool:
        """Whether a turn is written before the header of an answer, where its content is not in the text as it is."""
        return self._is_written(messages, turn, text, True)

    def _is_written(self, messages: Sequence[Message], turn: int, text: str, add_generation_prompt: bool) -> bool:
        """Whether marks in a turn's content are written, or its last word, where the template refuses all marks."""
        found, tried = markings(messages[turn]), []
        for marking in dict.fromkeys([found[0], found[-1]]):
            marked = self.render_part(marking.put_into(messages, turn), add_generation_prompt=add_generation_prompt)
            if marked is None:
                continue
            tried.append(marking.is_in(marked))
            if unmarked(marked) == text:  # else the marks themselves may decide
                return tried[-1]
        return any(tried) if tried else visible(messages[turn]).split()[-1] in text

    def _is_whole(self, messages: Sequence[Message], turn: int, text: str, add_generation_prompt: bool) -> bool:
        """Whether all texts of a turn are written: its thoughts, and what is before and after them."""
        content = messages[turn]["content"].strip()
        if text.count(content) >= sum(message["content"].count(content) for message in messages):
            return True
        tried = []
        for message, count in marked_texts(messages[turn]):
            talk = [*messages[:turn], message, *messages[turn + 1 :]]
            marked = self.render_part(talk, add_generation_prompt=add_generation_prompt)
            if marked is None:
                continue
            tried.append(marked.count(OPEN) >= count and marked.count(CLOSE) >= count)
            if unmarked(marked) == text:  # else the marks themselves may decide
                return tried[-1]
        # Where the template refuses all marks, nothing is known of thoughts that it rewrites.
        return any(tried) or not tried

    def _unwritten_by_roles(self, roles: tuple[str, ...], add_generation_prompt: bool) -> list[int] | None:
        """The turns of a conversation with these roles that are not written; None: the template refuses other contents
        than those of its rows."""
        key = add_generation_prompt, roles
        if key not in self._unwritten:
            if len(self._unwritten) >= _MOST_SHAPES:
                self._unwritten.clear()
            marks = [{"role": role, "content": f"{OPEN}{turn}{CLOSE}"} for turn, role in enumerate(roles)]
            text = self.render_part(marks, add_generation_prompt=add_generation_prompt)
            found = None if text is None else [turn for turn, mark in enumerate(marks) if mark["content"] not in text]
            self._unwritten[key] = found
        return self._unwritten[key]

    def render_part(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """Render the beginning of a conversation; None where the template refuses it, even if it accepts the whole."""
        if not messages:
            return None
        try:
            return self._render(messages, add_generation_prompt)
        except (TemplateError, TypeError, ValueError):
            return None

    def count_controls(self, turns: Iterable[Message], row: int) -> None:
        """Count a row where a text of its turns has a control token."""
        found = self._controls and next(filter(None, (self._controls.search(turn["content"]) for turn in turns)), None)
        if found:
            self.controls.add(found.group(), row)

    @cached_property
    def _controls(self) -> re.Pattern[str] | None:
        """Those of a tokenizer that reads them in texts, too."""
        reads_them = not getattr(self.tokenizer, "split_special_tokens", False)
        tokens = sorted(filter(str.strip, self.endings.special), key=len, reverse=True) if reads_them else []
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def warnings(self, example: str, examples: int) -> Iterator[str]:
        """What a user should know of the template, beside the turns that it leaves out and the ends of answers."""
        if self.template_warning:
            yield self.template_warning
        if self.diverged:
            yield (
                f"{self.diverged} of {examples} {example}s: the chat template writes the prompt differently when the "
                "answer follows; the loss starts where they diverge, or, where that is within the prompt's last turn, "
                "at the answer's own text"
            )
        if self.two_prompts:
            yield (
                f"{self.two_prompts} of {examples} {example}s: the chat template writes the prompt differently for "
                "each answer; both are trained after the prompt that generation has"
            )
        if self.expanded:
            yield (
                f"{self.expanded} rows are trained as several sequences, one for each answer that the chat template "
                "writes differently when other turns follow (such as without its thoughts)"
            )
        if self.empty_thoughts:
            yield (
                f"{self.empty_thoughts} answers have no thought, and the chat template begins one in generation: an "
                "empty thought is trained before them, so the model learns to answer without thinking"
            )
        if self.only_thoughts:
            yield (f"{self.only_thoughts} answers are only a thought, which reasoning 'drop' leaves out: not trained")
        if self.equal_answers:
            yield (
                f"{self.equal_answers} of {examples} {example}s have different answers that the chat template writes "
                "as the same tokens: no signal"
            )
        if self.trained_headers.count:
            yield (
                f"{self.trained_headers.count} answers are trained with their header, such as "
                f"{self.trained_headers.first!r}: the chat template does not write it in generation, so the model has "
                "to. Have the template write it for add_generation_prompt"
            )
        if self.unplaced_turns:
            yield (
                f"{self.unplaced_turns} assistant turns are not trained: the chat template writes something else for "
                "the same turn with a mark in it"
            )

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        turns, tools = self.as_taken(messages)
        text = rendered(self.tokenizer, turns, add_generation_prompt=add_generation_prompt, **tools)
        images = [image for _, image in images_in(messages)]
        return self.images.expanded(text, images) if self.images else text

    def as_taken(self, messages: Sequence[Message]) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
        """A conversation in the form that the template takes, and its tools as an option of rendering."""
        if is_plain(messages) and not self._takes_thoughts_apart(messages) and not self.forms.takes_parts:
            return messages, {}
        tools = {"tools": messages[0]["tools"]} if messages[0].get("tools") else {}
        return self.forms.of(messages), tools

    def _takes_thoughts_apart(self, messages: Sequence[Message]) -> bool:
        """Whether a thought in a content goes elsewhere: under a key of its own (gpt-oss), or behind `<think>`."""
        return not all(map(self.forms.takes_content, messages))

    def _applied(
        self, turns: list[dict[str, Any]], *, add_generation_prompt: bool = False, tools: list[Tool] | None = None
    ) -> str | None:
        """What the template writes of turns in a form of its own; None: it refuses them."""
        self.template_warning = ensure_chat_template(self.tokenizer) or self.template_warning
        try:
            return rendered(self.tokenizer, turns, add_generation_prompt=add_generation_prompt, tools=tools)
        except (TemplateError, TypeError, ValueError):
            return None

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts: the template has already written the special tokens."""
        if not texts:
            return []
        return call_tokenizer(self.tokenizer, texts, add_special_tokens=False)["input_ids"]

    def tokenize_with_index(self, texts: list[str]) -> list[tuple[list[int], TokenIndex]]:
        """Ids, and the positions of their tokens in the text."""
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            return [
                (ids, self._index_from_prefixes(text, ids))
                for text, ids in zip(texts, self.tokenize(texts), strict=True)
            ]
        encoded = call_tokenizer(self.tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [
            (ids, _index_from_offsets(offsets, self._index_from_prefixes(text, ids))) for text, ids, offsets in columns
        ]

    def _index_from_prefixes(self, text: str, ids: list[int]) -> TokenIndex:
        # Without offsets: tokenize the text up to the position, and count the ids that agree.
        return lambda position, straddling: common_prefix(self.tokenize([text[:position]])[0], ids)


def _index_from_offsets(offsets: list[tuple[int, int]], searched: TokenIndex) -> TokenIndex:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]

    def index(position: int, straddling: bool) -> int:
        ended = bisect_right(ends, position)
        if straddling:
            return max(ended, bisect_left(starts, position))
        # Some tokenizers leave spaces out of the offsets: only tokenizing finds the token of a space in such a gap.
        return searched(position, False) if ended < len(starts) and starts[ended] > position else ended

    return index


def _left_out(row: int) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"row {row}: the model's chat template leaves out the answer's text: give the model's tokenizer files a chat "
        "template that writes it, or send one as the provider option chat_template",
    )


def _last_answer(messages: Sequence[Message]) -> int | None:
    return next((turn for turn in reversed(range(len(messages))) if messages[turn]["role"] == "assistant"), None)
