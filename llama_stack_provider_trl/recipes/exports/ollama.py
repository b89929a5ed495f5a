"""The Modelfile of a GGUF file. Ollama has a template language of its own: the parts of the chat template are found by
rendering it, and put together again they must give the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jinja2 import TemplateError

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.rows import Message
from .reference import Prompt

MODELFILE = "Modelfile"
_TEXTS = ("Xylophone", "Yesterday", "Zeppelin", "Saturday")
_QUOTES = '"""'
type Render = Callable[[list[Message], bool], str]
"""Messages, whether the header of an answer follows -> the prompt."""


class TurnTexts(NamedTuple):
    begin: str
    """Before the first turn of a conversation without a system turn."""
    system: tuple[str, str]
    """Before and behind a system turn, which begins a conversation; equal to `begin` and "" where it has none."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    """Before an answer."""
    has_system: bool

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the Modelfile's template writes."""
        found = "" if self.has_system and messages[0]["role"] == "system" else self.begin
        for message in messages:
            before, behind = {"system": self.system, "user": self.user, "assistant": self.assistant}[message["role"]]
            found += before + str(message["content"]) + behind
        return found + self.answer

    def template(self) -> str:
        """The same in the language of Ollama."""
        turns = [f'{{{{ if eq .Role "user" }}}}{_go(self.user[0])}{{{{ .Content }}}}{_go(self.user[1])}']
        turns += [f'{{{{ else if eq .Role "assistant" }}}}{_go(self.assistant[0])}{{{{ .Content }}}}']
        turns += [f"{_go(self.assistant[1])}{{{{ end }}}}"]
        begin = _go(self.begin)
        if self.has_system:
            system = f"{_go(self.system[0])}{{{{ .System }}}}{_go(self.system[1])}"
            begin = f"{{{{ if .System }}}}{system}{{{{ else }}}}{begin}{{{{ end }}}}"
        return f"{begin}{{{{ range .Messages }}}}{''.join(turns)}{{{{ end }}}}{_go(self.answer)}"


def modelfile(file: str, texts: TurnTexts, ends: Sequence[str]) -> str:
    """The Modelfile of a GGUF file, with the texts of the tokens that end an answer."""
    stops = "".join(f'PARAMETER stop "{_escaped(end)}"\n' for end in ends)
    return f"FROM ./{file}\nTEMPLATE {_QUOTES}{texts.template()}{_QUOTES}\n{stops}"


def turn_texts(render: Render, prompts: Sequence[Prompt], bos: str | None) -> TurnTexts:
    """The parts of a chat template. Raises JobFailure: invalid_model, the template is more than texts around turns.

    Args:
        prompts: which the parts must give, too.
        bos: the text of the token that is written before every prompt anyway; None: none is.
    """
    if any(prompt.messages is None for prompt in prompts):
        raise _refusal("it has no chat template")
    try:
        found = _parts(render)
    except (TemplateError, TypeError, ValueError) as error:
        raise _refusal(f"its chat template writes more than texts around turns ({str(error)[:200]})") from error
    for prompt in prompts:
        if found.prompt(prompt.messages or []) != prompt.text:
            raise _refusal("its chat template writes more than texts around turns")
    if bos:
        system = found.system[0].removeprefix(bos), found.system[1]
        found = found._replace(begin=found.begin.removeprefix(bos), system=system)
    if any(_QUOTES in text for text in (found.begin, found.answer, *found.system, *found.user, *found.assistant)):
        raise _refusal(f"its chat template writes {_QUOTES}, which ends a template in a Modelfile")
    return found


def _parts(render: Render) -> TurnTexts:
    x, y, z, s = _TEXTS
    user: Message = {"role": "user", "content": x}
    answer: Message = {"role": "assistant", "content": y}
    before_x, behind_x = _around(render([user], False), x)
    asked = render([user], True)
    if not asked.startswith(before_x + x + behind_x):
        raise ValueError("the header of an answer changes what is before it")
    dialog = render([user, answer, {"role": "user", "content": z}], False)
    _, rest = _around(dialog, x)
    between, rest = _around(rest, y)
    again, _ = _around(rest, z)
    _, behind_y = _around(render([user, answer], False), y)
    before_user = _without(again, behind_y)
    begin = before_x.removesuffix(before_user)
    system, has_system = (begin, ""), False
    try:
        with_system = render([{"role": "system", "content": s}, user], False)
        before_s, rest = _around(with_system, s)
        behind_s, _ = _around(rest, x)
        system, has_system = (before_s, behind_s.removesuffix(before_user)), True
    except (TemplateError, ValueError):  # it has none
        pass
    return TurnTexts(
        begin=begin,
        system=system,
        user=(before_user, behind_x),
        assistant=(_without(between, behind_x), behind_y),
        answer=asked.removeprefix(before_x + x + behind_x),
        has_system=has_system,
    )


def _around(text: str, part: str) -> tuple[str, str]:
    if text.count(part) != 1:
        raise ValueError("a turn is not written once")
    before, _, behind = text.partition(part)
    return before, behind


def _without(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise ValueError("what is behind a turn depends on the next one")
    return text.removeprefix(beginning)


def _go(text: str) -> str:
    """A text in Go's template language, where two braces begin an action."""
    return text.replace("{{", '{{ "{{" }}')


def _escaped(text: str) -> str:
    if '"' in text or "\n" in text:
        raise _refusal(f"the token {text!r} ends an answer, and a Modelfile cannot name it")
    return text


def _refusal(found: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"the model cannot be exported to Ollama: {found}. Nothing was written; export it to gguf.",
    )
