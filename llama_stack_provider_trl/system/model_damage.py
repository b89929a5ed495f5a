"""Damage of a model's file that its first bytes, its size or its header show: what is wrong, and what to do.

Downloads leave such files: `git clone` without Git LFS, an error page saved under a file's name, a transfer that broke
off. Libraries report them as a failed parse, or not at all. Also which files a model's weights are read from.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable
from io import BufferedReader

from .texts import decoded, refuse_encoding

CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json")
FAST_TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
"""Those that are read where there is no `FAST_TOKENIZER`."""
_ADDED_TOKENS = "added_tokens_decoder"
_ADDED_TOKENS_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Those that are read where `TOKENIZER_CONFIG` has no `_ADDED_TOKENS`."""
DISPENSABLE_FILES = ("generation_config.json", "chat_template.jinja")
"""Those that are ignored with a warning where they hold nothing: `config.json` and `tokenizer_config.json` have what is
used then."""
INDEX_ENDING = ".index.json"
WEIGHTS = (
    "model.safetensors",
    f"model.safetensors{INDEX_ENDING}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX_ENDING}",
)
"""In the order in which transformers looks for them: it loads the first one that is there."""
NO_WEIGHTS = f"it has no file of weights, expected one of {', '.join(WEIGHTS)}: download them, or name a complete model"
_OF_TOKENIZER = re.compile(r"token|vocab|merges|tekken|spiece|sentencepiece|bpe|\.(model|spm)$", re.IGNORECASE)
"""In the name of a file that some tokenizer of transformers is read from."""
NO_TOKENIZER = f"it has no file of a tokenizer, such as {FAST_TOKENIZER}: download it, or name a complete model"
EMBEDDED_ADAPTER = (
    "adapter_config.json lies beside its config.json, so that transformers would load the adapter into the model: move "
    "it to a directory of its own"
)
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
"""PEFT reads it where there are no safetensors, and so do merges; an adapter is continued from safetensors only."""
ADAPTER_FILES = ("adapter_config.json", ADAPTER_WEIGHTS)
MOST_HEADER = 100_000_000
"""Bytes. The library safetensors reads no longer header."""
SMALL = 1 << 20
"""Bytes of JSON that are parsed; of a longer file the first and the last byte are checked."""
_AGAIN = "download it again"
_MARK = b"\xef\xbb\xbf"
_POINTER = b"version https://git-lfs.github.com/spec/"
_TEMPLATE = ".jinja"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|\?xml)[\s>]", re.IGNORECASE)


def damage_of(name: str, file: BufferedReader, most_header: int = MOST_HEADER) -> str | None:
    """What is wrong with a file, as the rest of a sentence that begins with its name; None: nothing is seen.

    Args:
        most_header: bytes of a safetensors file's header that are parsed; a longer one is compared with the file's
            size only.
    """
    size, start = os.fstat(file.fileno()).st_size, file.read(512)
    if is_blank(start) and size <= len(start) and name in DISPENSABLE_FILES:
        return None
    if not size:
        return f"is empty: {_AGAIN}"
    if start.startswith(_POINTER):
        return "is a Git LFS pointer and not the file itself: run `git lfs pull` in the model's directory"
    if _PAGE.match(start) and not (name.endswith(_TEMPLATE) and _is_template(file)):
        return f"is a web page, such as the error page of a download: {_AGAIN}"
    if name.endswith(".safetensors"):
        return _damage_of_weights(file, size, start, most_header)
    if name.endswith(".bin"):
        return _damage_of_pickle(file, size, start)
    if name.endswith(".json"):
        return _encoding_of_json(start) or _damage_of_json(name, file, size)
    return _damage_of_template(file) if name.endswith(_TEMPLATE) else None


def tokenizer_files(configuration: bytes | None, *, is_fast: bool) -> list[str]:
    """The files that transformers reads a tokenizer from.

    Args:
        configuration: content of its `TOKENIZER_CONFIG`, or the beginning of a large one; None: it has none.
        is_fast: it has a `FAST_TOKENIZER`.
    """
    files = [FAST_TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja", *(() if is_fast else _SLOW_TOKENIZER_FILES)]
    try:
        found = {} if configuration is None else json.loads(configuration)
    except (ValueError, RecursionError):
        return files
    has_added = not isinstance(found, dict) or _ADDED_TOKENS in found
    return files if has_added else [*files, *_ADDED_TOKENS_FILES]


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether a directory with these entries has what a tokenizer is read from."""
    return any(map(_OF_TOKENIZER.search, names))


def _encoding_of_json(start: bytes) -> str | None:
    if start.startswith(_MARK):
        return "begins with a byte order mark, which transformers does not read: save it as UTF-8 without one"
    try:
        refuse_encoding(start)
    except ValueError as error:
        return f"cannot be read, {error}"
    return None


def _is_template(file: BufferedReader) -> bool:
    """Whether a file that begins as a page has what a template of pages has."""
    file.seek(0)
    content = file.read(SMALL)
    return b"{{" in content or b"{%" in content


def _damage_of_template(file: BufferedReader) -> str | None:
    file.seek(0)
    try:
        decoded(file.read(SMALL) if os.fstat(file.fileno()).st_size <= SMALL else b"")
    except ValueError as error:
        return f"cannot be read, {error}"
    return None


def is_blank(content: bytes) -> bool:
    """Whether a text file with this content holds nothing."""
    return not content.strip(b"\xef\xbb\xbf \t\r\n")


def files_in_index(content: bytes) -> list[str]:
    """The files that an index of weights names, sorted. Raises ValueError: it is no index."""
    try:
        return sorted({str(name) for name in json.loads(content)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(_shown(error)) from error


def tensors_in(name: str, file: BufferedReader) -> list[str]:
    """Names of the tensors in a safetensors file, or in an index. Raises ValueError: it is none, or its JSON has more
    than `SMALL` bytes."""
    size = SMALL + 1 if name.endswith(INDEX_ENDING) else int.from_bytes(file.read(8), "little")
    content = file.read(min(size, SMALL + 1))
    if len(content) > SMALL:
        raise ValueError(f"more than {SMALL} bytes of names")
    try:
        found = json.loads(content)
        return [*(found["weight_map"] if name.endswith(INDEX_ENDING) else found).keys()]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(_shown(error)) from error


def missing_from_index(index: str, names: list[str]) -> str:
    """What is wrong with a file that is not there, as `damage_of` has it."""
    return (
        f"is missing, which {index} names as one of {len(names)} files of weights: download it, or name a complete "
        "model"
    )


def _damage_of_pickle(file: BufferedReader, size: int, start: bytes) -> str | None:
    """Of a file that torch.save wrote: a zip archive, whose directory is at its end, or (before torch 1.6) a pickle."""
    if start.startswith(b"PK"):
        if zipfile.is_zipfile(file):
            return None
        return f"is cut off, it has {size} bytes and no directory of its parts at its end: {_AGAIN}"
    return None if start.startswith(b"\x80") else f"is no file of weights, it begins with {start[:16]!r}: {_AGAIN}"


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


def _damage_of_json(name: str, file: BufferedReader, size: int) -> str | None:
    file.seek(0)
    whole = f"{_AGAIN}, or write it with save_pretrained"
    if size <= SMALL:
        try:
            found = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            return f"cannot be read, it is no JSON ({_shown(error)}): {whole}"
        if isinstance(found, dict) or (name in DISPENSABLE_FILES and not found):
            return None
        return f"cannot be read, it is no JSON object: {whole}"
    first = file.read(512)
    file.seek(-512, os.SEEK_END)
    if not first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return f"cannot be read, it is no JSON object: {whole}"
    if not file.read().rstrip().endswith(b"}"):
        return f"is cut off, it has {size} bytes and no closing brace at its end: {whole}"
    return None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
