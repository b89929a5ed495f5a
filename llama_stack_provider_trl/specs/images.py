"""Images in rows: where a message has one, and its bytes. Needs only the stdlib, and decodes no image.

The content of a message stays text, in which `MARK` stands for each image; the bytes are in its list `images`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..system.json_rows import FORMATS, MOST_BYTES, media_type
from ..system.texts import counted

MARK = "\ufffc"
"""U+FFFC, which Unicode has for an object within a text."""
PLACEHOLDER = "<image>"
"""What stands for an image in texts of rows with a column of images."""
COLUMNS = ("images", "image")
"""Columns with the images of a conversation, in the order of their placeholders."""
PARTS = ("image", "image_url")
"""Types of the parts of a content."""
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII | re.IGNORECASE)
_VALUES = ("image", "image_url", "url", "base64", "bytes", "data", "path")
"""Keys of a part with its image."""
_OF_OBJECTS = ("url", "bytes", "path")
"""Keys of an object with an image."""
Refuse = Callable[[str, str, str], Exception]
"""(where, found, expected) -> the error to raise."""


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image, or stands for one of the column."""
    return isinstance(part, Mapping) and part.get("type") in PARTS


def holds_images(value: Any) -> bool:
    """Whether a column has images, rather than something else under the same name."""
    if isinstance(value, list):
        return any(map(holds_images, value))
    if isinstance(value, Mapping):
        return not {"bytes", "url"}.isdisjoint(value)
    return isinstance(value, str) and _DATA_URI.match(value) is not None


def unread_keys(part: Mapping[str, Any]) -> Iterator[str]:
    """The keys of an image part that nothing reads, each behind the type of the part."""
    for key, value in part.items():
        if value is None or value == "" or key == "type":
            continue
        if key not in (*_VALUES, "index"):
            yield f"{part['type']}.{key}"
        else:
            yield from unread_keys_of_object(key, value)


def unread_keys_of_object(where: str, value: Any) -> Iterator[str]:
    """The keys of an object with an image that nothing reads, each behind `where` it is; of other values none."""
    if isinstance(value, Mapping):
        yield from (f"{where}.{key}" for key, held in value.items() if key not in _OF_OBJECTS and held is not None)


def image_of(part: Mapping[str, Any], where: str, refuse: Refuse) -> bytes | None:
    """The image of a part; None: it stands for the next one of the column. Raises what `refuse` returns."""
    given = [part[key] for key in _VALUES if part.get(key) not in (None, "")]
    if len(given) > 1 and not (part.get("path") is not None and len(given) == 2):
        raise refuse(where, "several images in one part", "one part for each image")
    return read_image(given[0], where, refuse) if given else None


def read_image(value: Any, where: str, refuse: Refuse) -> bytes:
    """The bytes of an image: a data URI, alone or under `url`, or `{"bytes", "path"}` of Parquet files of `datasets`.
    Raises what `refuse` returns."""
    expected = f'a data URI ("data:image/png;base64,..."), or {{"bytes", "path"}} of a Parquet file, with {FORMATS}'
    if isinstance(value, Mapping):
        held = next((value[key] for key in ("url", "bytes") if value.get(key) not in (None, "")), None)
        if isinstance(held, str):
            return read_image(held, where, refuse)
        found = "an object without the bytes of an image"
        if isinstance(held, Mapping) and isinstance(held.get("binary"), str):
            found = f"a binary value ({held['binary'][:40]}) that is no image, or has more than {MOST_BYTES >> 20} MiB"
        elif isinstance(value.get("path"), str):
            found = f"only the path {value['path'][:60]!r}"
        raise refuse(where, found, expected)
    if not isinstance(value, str):
        raise refuse(where, f"an image of type {type(value).__name__}", expected)
    head = _DATA_URI.match(value)
    if head is None:
        is_address = value[:8].lower().startswith(("http://", "https://"))
        found = f"the address {value[:60]!r}, which no training fetches" if is_address else f"{value[:60]!r}"
        raise refuse(where, found, expected)
    try:
        data = base64.b64decode(value[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refuse(where, f"a data URI that is not base64 ({error})", expected) from error
    if len(data) > MOST_BYTES:
        raise refuse(where, f"an image of {len(data) >> 20} MiB", f"at most {MOST_BYTES >> 20} MiB")
    if media_type(data) is None:
        raise refuse(where, "an image of another format", f"{FORMATS}, by its first bytes")
    return data


def has_placeholder(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text of a user has what stands for an image of the column."""
    return any(message["role"] == "user" and PLACEHOLDER in message["content"] for message in messages)


def place_images(
    messages: Sequence[dict[str, Any]], column: str | None, images: Sequence[bytes], refuse: Refuse, where: str
) -> None:
    """Put the images of a row where its messages have placeholders: parts without an image, or `<image>` in a text of a
    user. Without any, all of them stand before the text of the first user turn, as TRL has it. Raises what `refuse`
    returns.

    Args:
        column: that the images are of; None: the row has none.
        where: what the messages are called in errors.
    """
    for message in messages:
        if column is not None and message["role"] == "user" and PLACEHOLDER in message["content"]:
            message.update(_with_marks(message))
    places = [image for message in messages for image in message.get("images", ()) if not isinstance(image, bytes)]
    waiting = len(places)
    first = next((message for message in messages if message["role"] == "user"), None)
    if column is None and waiting:
        raise refuse(where, "an image part without an image", "its image, or a column images with it")
    if column is not None and not waiting and images:
        if first is None:
            raise refuse(column, "images in a conversation without a user", "a user turn")
        first["content"] = MARK * len(images) + first["content"]
        first["images"] = [*images, *first.get("images", ())]
    elif column is not None and waiting != len(images):
        raise refuse(column, counted(len(images), "image"), f"{waiting}, one for each placeholder in the messages")
    numbers = [number if place is None else place for number, place in enumerate(places)]
    if sorted(numbers) != [*range(waiting)]:
        raise refuse(where, f"image parts with the indexes {numbers}", f"each image of {column} once, from 0 on")
    left = iter([images[number] for number in numbers])
    for turn, message in enumerate(messages):
        own = message.get("images", [])
        if message["content"].count(MARK) != len(own) and "images" in message:
            raise refuse(f"{where}, turn {turn}", "the character U+FFFC beside images", "a text without it")
        if not all(isinstance(image, bytes) for image in own):
            message["images"] = [image if isinstance(image, bytes) else next(left) for image in own]


def _with_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a mark in place of each `<image>`."""
    if message["content"].count(MARK) != len(message.get("images", ())):
        return {}  # which the caller refuses
    own, pieces = iter(message.get("images", ())), []
    images: list[bytes | int | None] = []
    for piece in re.split(f"({PLACEHOLDER}|{MARK})", message["content"]):
        if piece == PLACEHOLDER:
            images.append(None)
        elif piece == MARK:
            images.append(next(own, None))
        pieces.append(MARK if piece == PLACEHOLDER else piece)
    return {"content": "".join(pieces), "images": images}


def count_images(messages: Sequence[Mapping[str, Any]] | None) -> int:
    """Images of a conversation."""
    return sum(len(message.get("images", ())) for message in messages or ())


def images_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """The images of a conversation, each with the number of its turn."""
    for turn, message in enumerate(messages):
        for image in message.get("images", ()):
            yield turn, image


def as_parts(content: str, *, has_images: bool) -> list[dict[str, str]]:
    """A content as the parts that chat templates of vision models take.

    Args:
        has_images: it has marks of images.
    """
    parts: list[dict[str, str]] = []
    if not has_images:
        return [{"type": "text", "text": content}]
    for piece in re.split(f"({MARK})", content):
        if piece == MARK:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
