"""What programs print: everything on the terminal goes through here, and nothing in it can act on the terminal.

Names, answers of services, reports of nodes, announcements, log lines and messages of errors come from elsewhere. They
are printed as text: a character that acts on a terminal, hides, or reorders others appears as its escape in JSON
(`\\u001b`), and a line break in a name does not begin a line.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LINE_ENDS = re.compile(r"\r\n|\n|\r")
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Characters of other categories that nothing is drawn for: fillers, joiners, variation selectors."""


_ZWNJ, ZWJ, _EMOJI_STYLE = "\u200c", "\u200d", "\ufe0f"
_JOINED_SCRIPTS = (
    *("ARABIC", "SYRIAC", "NKO", "MANDAIC", "MONGOLIAN", "DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA"),
    *("TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "KHMER", "MYANMAR", "TIBETAN", "BALINESE", "JAVANESE"),
)
"""First words of the Unicode names of letters that are written joined or in conjuncts: between two of them, a joiner
changes what is drawn (Persian, Hindi, Sinhala ...). After Unicode Standard Annex 31, section 2.3."""
_OTHER_EMOJI = "\u203c\u2049\u2139\u2194"
"""Emoji that are punctuation, letters or arrows of mathematics otherwise."""
_KEYCAPS = "#*0123456789"


def hidden_in(text: str) -> Iterator[int]:
    """Positions of the characters of a text that are not drawn, or reorder others.

    Joiners are none between two letters of a script that needs them, nor in a sequence of emoji; nor is the selector
    of the coloured form behind a symbol.
    """
    return (at for at, one in enumerate(text) if not is_shown(one) and not _is_drawn_with_others(text, at))


def _is_drawn_with_others(text: str, at: int) -> bool:
    """Whether an invisible character changes how its neighbours are drawn, as their script needs it."""
    before, character, after = text[at - 1 : at], text[at], text[at + 1 : at + 2]
    if character == _EMOJI_STYLE:
        return _is_symbol(before) or (before in _KEYCAPS and before != "" and after == "\u20e3")
    if character not in (_ZWNJ, ZWJ):
        return False
    if character == ZWJ and _is_symbol(after):
        return _is_symbol(before) or (before == _EMOJI_STYLE and _is_symbol(text[at - 2 : at - 1]))
    script = _joined_script(before)
    if script == "":
        return False
    # A virama and a joiner at the end of a word are a half form, or a chillu of Malayalam.
    return _joined_script(after) == script or (character == ZWJ and unicodedata.combining(before) == 9)


def _is_symbol(character: str) -> bool:
    if character == "":
        return False
    is_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return is_tone or unicodedata.category(character) == "So" or character in _OTHER_EMOJI


def _joined_script(character: str) -> str:
    """The script of a letter or mark that may need a joiner; empty: it needs none."""
    if character == "" or unicodedata.category(character)[0] not in "LM":
        return ""
    script = unicodedata.name(character, "").partition(" ")[0]
    return script if script in _JOINED_SCRIPTS else ""


def is_shown(character: str) -> bool:
    """Whether a character is drawn by itself, or is a space, and does nothing else."""
    # Not printable are control and format characters, halves of surrogate pairs, unassigned ones and separators.
    visible = character.isprintable() or unicodedata.category(character) == "Zs"
    return visible and not _BLANK.match(character)


def shown(text: str) -> str:
    """A text as one line that does nothing to a terminal. JSON remains JSON, with the same content."""
    if text.isascii() and text.isprintable():
        return text
    hidden = set(hidden_in(text))
    return "".join(_escape(one) if at in hidden else one for at, one in enumerate(text))


def _escape(character: str) -> str:
    if short := _SHORT.get(character):
        return short
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def lines_of(text: str) -> list[str]:
    return _LINE_ENDS.split(text)


def indented(text: str) -> list[str]:
    """The lines of a message, the first as it is and the others indented: none of them looks like a message."""
    first, *further = lines_of(text)
    return [first, *(f"    {line}" for line in further if line.strip())]


def show_lines(*lines: str, flush: bool = False, to: TextIO | None = None) -> None:
    """Print lines. Each argument is one, whatever is in it.

    Args:
        to: the stream; None: standard output.
    """
    stream = sys.stdout if to is None else to
    stream.write("".join(f"{_encodable(shown(line), stream)}\n" for line in lines))
    if flush:
        stream.flush()


def show_part(text: str) -> None:
    """Print a part of a text of several lines, which continues with the next part."""
    _write_part(text, sys.stdout)


def _write_part(text: str, stream: TextIO) -> None:
    stream.write("\n".join(_encodable(shown(line), stream) for line in text.split("\n")))
    stream.flush()


def show_json(value: Any, indent: int | None = None, flush: bool = False, to: TextIO | None = None) -> None:
    """Print a value as JSON, all of it in ASCII."""
    # The one control character that JSON leaves as it is.
    text = json.dumps(value, indent=indent).replace("\x7f", "\\u007f")
    show_lines(*lines_of(text), flush=flush, to=to)


def complain(text: str, program: str = "trl-remote") -> None:
    show_lines(*indented(f"{program}: {text}"), flush=True, to=sys.stderr)


def redraw(stream: TextIO, replaced: int, lines: list[str], columns: int) -> None:
    """Replace the last `replaced` lines on a terminal by others, each cut to the width."""
    up = f"\x1b[{replaced - 1}A" if replaced > 1 else ""
    if lines:
        drawn = [_encodable(shown(line)[:columns].ljust(columns), stream) for line in lines]
        stream.write(f"{up}\r" + "\n".join(drawn))
    elif replaced:
        # Below the first of several lines the terminal is cleared to its end.
        rest = "\x1b[J" if up else ""
        stream.write(f"{up}\r{' ' * columns}\r{rest}")
    stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """The text as a stream can take it: one of another encoding than UTF-8 lacks characters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
