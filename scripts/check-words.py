"""Fail where the repository uses a word of scripts/words.txt: prints file:line, the phrase and the standard term.

python scripts/check-words.py [PATH ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".sh", ".sql", ".yaml", ".yml", ".toml"}
UNCHECKED = ("tests/data/*", "scripts/words.txt", "tests/unit/test_words.py")
"""Data of earlier releases, and the files that must quote the words."""
BREAK = r"(?:_|\s+(?:(?:#|--|//)\s*)?)"
"""Between two words: an underscore, or blanks with at most one comment marker after a line break."""


class Hit(NamedTuple):
    line: int
    phrase: str
    instead: str


class Words:
    """The word list: which expressions to avoid, and where each exemption applies."""

    def __init__(self, text: str) -> None:
        listed, _, exempt = text.partition("# exempt:")
        self.rules = [(_expression(rule), instead) for rule, instead in _pairs(listed, "->", 2)]
        self.exempt = [(path, _expression(rule)) for path, rule, _ in _pairs(exempt.partition("\n")[2], "|>", 3)]

    def hits(self, path: str, text: str) -> Iterator[Hit]:
        """Every listed phrase in a file, in the order of the list."""
        for pattern, rule in self.exempt:
            if fnmatch(path, pattern):
                text = rule.sub(lambda found: re.sub(r"\S", "-", found[0]), text)
        for rule, instead in self.rules:
            for found in rule.finditer(text):
                yield Hit(text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead)


def _pairs(text: str, mark: str, parts: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split(mark)]
            if len(fields) != parts:
                raise SystemExit(f"scripts/words.txt: {line!r} has {len(fields)} fields, expected {parts}")
            yield fields


def _expression(rule: str) -> re.Pattern[str]:
    """A rule as a pattern of whole words; an underscore ends a word too."""
    return re.compile(f"(?<![A-Za-z])(?:{rule.replace(' ', BREAK)})(?![A-Za-z])", re.IGNORECASE)


def unreleased(changelog: str) -> str:
    """CHANGELOG.md up to the first released version: what was released is not rewritten."""
    released = re.search(r"^## \[\d", changelog, re.MULTILINE)
    return changelog[: released.start()] if released else changelog


def files(paths: list[str]) -> list[str]:
    """The tracked and new text files of the repository, or of some paths in it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
    kept = {name for name in names if not any(fnmatch(name, pattern) for pattern in UNCHECKED)}
    return sorted(name for name in kept if Path(name).suffix in SUFFIXES and (REPOSITORY / name).is_file())


def main() -> None:
    words = Words((REPOSITORY / "scripts" / "words.txt").read_text())
    count = 0
    for name in files(sys.argv[1:]):
        text = (REPOSITORY / name).read_text()
        for hit in sorted(words.hits(name, unreleased(text) if name == "CHANGELOG.md" else text)):
            print(f"{name}:{hit.line}: {hit.phrase!r}, expected one of: {hit.instead}")
            count += 1
    if count:
        sys.exit(
            f"check-words: {count} phrases; use the standard term, or add a reasoned exemption to scripts/words.txt"
        )


if __name__ == "__main__":
    main()
