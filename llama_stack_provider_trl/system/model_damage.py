"""Damage of a model's file that its first bytes, its size or its header show: what is wrong, and what to do.

Downloads leave such files: `git clone` without Git LFS, an error page saved under a file's name, a transfer that broke
off. Libraries report them as a failed parse, or not at all.
"""

from __future__ import annotations

import json
import os
import re
from io import BufferedReader

from .texts import decoded, refuse_encoding

CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
"""Those that are read where there is no tokenizer.json."""
WEIGHTS = "model.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MOST_HEADER = 100_000_000
"""Bytes. The library safetensors reads no longer header."""
SMALL = 1 << 20
"""Bytes of JSON that are parsed; of a longer file the first and the last byte are checked."""
_AGAIN = "download it again"
_MARK = b"\xef\xbb\xbf"
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|\?xml)[\s>]", re.IGNORECASE)


def damage_of(name: str, file: BufferedReader, most_header: int = MOST_HEADER) -> str | None:
    """What is wrong with a file, as the rest of a sentence that begins with its name; None: nothing is seen.

    Args:
        most_header: bytes of a safetensors file's header that are parsed; a longer one is compared with the file's
            size only.
    """
    size, start = os.fstat(file.fileno()).st_size, file.read(512)
    if not size:
        return f"is empty: {_AGAIN}"
    if start.startswith(_POINTER):
        return "is a Git LFS pointer and not the file itself: run `git lfs pull` in the model's directory"
    if _PAGE.match(start):
        return f"is a web page, such as the error page of a download: {_AGAIN}"
    if name.endswith(".safetensors"):
        return _damage_of_weights(file, size, start, most_header)
    if name.endswith(".json"):
        return _encoding_of_json(start) or _damage_of_json(file, size)
    return _damage_of_template(file) if name.endswith(".jinja") else None


def _encoding_of_json(start: bytes) -> str | None:
    if start.startswith(_MARK):
        return "begins with a byte order mark, which transformers does not read: save it as UTF-8 without one"
    try:
        refuse_encoding(start)
    except ValueError as error:
        return f"cannot be read, {error}"
    return None


def _damage_of_template(file: BufferedReader) -> str | None:
    file.seek(0)
    try:
        decoded(file.read(SMALL) if os.fstat(file.fileno()).st_size <= SMALL else b"")
    except ValueError as error:
        return f"cannot be read, {error}"
    return None


def _damage_of_weights(file: BufferedReader, size: int, start: bytes, most_header: int) -> str | None:
    header = int.from_bytes(start[:8], "little")
    if size >= 8 and (header > MOST_HEADER or start[8:9] not in (b"{", b"")):
        return f"is no safetensors file, it begins with {start[:16]!r}: {_AGAIN}"
    if size < 8 + header or size < 8:
        least = f"{8 + header} by its first 8" if size >= 8 else "8"
        return f"is cut off, it has {size} bytes, expected at least {least}: {_AGAIN}"
    if header > most_header:
        return None
    file.seek(8)
    try:
        entries = json.loads(file.read(header))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        expected = 8 + header + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return f"has a header that cannot be read ({_shown(error)}): {_AGAIN}"
    if size < expected:
        return f"is cut off, it has {size} bytes, expected {expected} by its header: {_AGAIN}"
    return None


def _damage_of_json(file: BufferedReader, size: int) -> str | None:
    file.seek(0)
    whole = f"{_AGAIN}, or write it with save_pretrained"
    if size <= SMALL:
        try:
            found = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            return f"cannot be read, it is no JSON ({_shown(error)}): {whole}"
        return None if isinstance(found, dict) else f"cannot be read, it is no JSON object: {whole}"
    first = file.read(512)
    file.seek(-512, os.SEEK_END)
    if not first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return f"cannot be read, it is no JSON object: {whole}"
    if not file.read().rstrip().endswith(b"}"):
        return f"is cut off, it has {size} bytes and no closing brace at its end: {whole}"
    return None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
