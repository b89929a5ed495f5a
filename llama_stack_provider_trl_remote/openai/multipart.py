"""Reads the body of an upload as it comes: the fields of a form, and one file, which is never held in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from urllib.parse import unquote

from ..service.http.errors import OpenAIRefused

_MOST_FIELD = 4096
"""Bytes of a field, and of the header of a part."""
_MOST_PARTS = 16
_MOST_BEHIND = 64
"""Bytes of line ends behind the last boundary."""
FILE = "file"
_PARAMETER = re.compile(r';\s*([a-zA-Z*]{1,20})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;"]*))')
"""Of a header (RFC 9110, 5.6.6), in time by its length: `email.message` takes the square of it."""


class Form:
    """A body of multipart/form-data. Raises OpenAIRefused: the Content-Type names no such body.

    Args:
        allowed: names of its fields beside the file.
        file: name of the field with the file.

    Attributes:
        fields: those that were read so far.
        filename: of the file, once its part has begun; None: it has not.
    """

    def __init__(self, content_type: str, allowed: frozenset[str], file: str = FILE) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._allowed, self._file = allowed, file
        kind, parameters = parameters_of(content_type)
        boundary = parameters.get("boundary", "").encode("latin-1", "replace")
        if kind != "multipart/form-data" or not boundary:
            raise OpenAIRefused(
                f"the Content-Type is {content_type[:100]!r}, expected multipart/form-data with a boundary: send "
                f"{', '.join((file, *allowed))} as the fields of a form",
                None,
                "invalid_content_type",
            )
        self._boundary = boundary
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[str, str] = {}
        self._name = ""
        self._parts = 0
        self._content: list[bytes] = []
        self._has_ended = False
        self._behind = 0

    async def file(self, stream: AsyncIterator[bytes], check: Callable[[], None]) -> AsyncIterator[bytes]:
        """The content of the file, while the body is received. Raises OpenAIRefused: the body is no such form, or has
        fields beside those that are allowed.

        Args:
            check: is called before each piece of the file, and at the end: raises where the fields cannot be honoured.
        """
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser

        parser = MultipartParser(
            self._boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._add_header,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        try:
            async for piece in stream:
                if self._has_ended:  # the parser would skip what follows, however much it is
                    self._skip(piece)
                    continue
                parser.write(piece)
                if self._content:
                    check()
                    content, self._content = b"".join(self._content), []
                    yield content
        except FormParserError as error:
            raise _no_form(f"{error}") from error
        if not self._has_ended:
            raise _no_form("it ends before its last boundary")
        if self.filename is None:
            raise OpenAIRefused(
                f"{self._file} is missing: send it as a field of the form", self._file, "missing_required"
            )
        check()

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _no_form(f"it has more than {_MOST_PARTS} parts")
        self._headers = {}

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._bound(self._header)

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bound(self._value)

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").strip().lower()] = self._value.decode("utf-8", "replace").strip()
        self._header, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, found = parameters_of(self._headers.get("content-disposition", ""))
        self._name = found.get("name", "")
        if self._name in self.fields or (self._name == self._file and self.filename is not None):
            raise OpenAIRefused(f"{self._name} is there twice: send it once", self._name, "invalid_value")
        if self._name == self._file:
            self.filename = extended_text(found["filename*"]) if "filename*" in found else found.get("filename", "")
        elif self._name not in self._allowed:
            known = ", ".join((self._file, *sorted(self._allowed)))
            raise OpenAIRefused(
                f"there is no field {self._name[:100]!r}, only {known}: leave it out",
                self._name[:100],
                "unknown_parameter",
            )

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._file:
            self._content.append(bytes(data[start:end]))
        else:
            self._value += data[start:end]
            self._bound(self._value)

    def _end_part(self) -> None:
        if self._name != self._file:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError as error:
                raise OpenAIRefused(f"{self._name} is no UTF-8 text", self._name, "invalid_value") from error
            self._value = bytearray()

    def _end(self) -> None:
        self._has_ended = True

    def _skip(self, piece: bytes) -> None:
        self._behind += len(piece)
        if self._behind > _MOST_BEHIND or piece.strip(b"\r\n"):
            raise _no_form("it has more behind its last boundary")

    def _bound(self, data: bytearray) -> None:
        if len(data) > _MOST_FIELD:
            raise _no_form(f"a field, or the header of one, has more than {_MOST_FIELD} bytes")


def parameters_of(header: str) -> tuple[str, dict[str, str]]:
    """What a header names, and its parameters; of one that is there twice, the first."""
    kind, found = header.partition(";")[0].strip().lower(), dict[str, str]()
    for match in _PARAMETER.finditer(header):
        name, quoted, plain = match.groups()
        found.setdefault(name.lower(), plain.strip() if quoted is None else re.sub(r'\\(["\\])', r"\1", quoted))
    return kind, found


def extended_text(value: str) -> str:
    """A text of RFC 8187: CHARSET'LANGUAGE'ESCAPED."""
    charset, _, text = value.partition("'")
    return unquote(text.partition("'")[2], "latin-1" if charset.lower() == "iso-8859-1" else "utf-8")


def _no_form(problem: str) -> OpenAIRefused:
    return OpenAIRefused(
        f"the body is no whole multipart/form-data: {problem[:200]}; send the file again", None, "invalid_form"
    )
