"""No regular expression of the product takes more than linear time for a text that somebody else wrote: Python's `re`
tries each way to divide a text among repeats, holds the interpreter meanwhile, and cannot be interrupted."""

from __future__ import annotations

import ast
import re
import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.tiny import REPOSITORY

PACKAGES = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
SEARCHES = frozenset(("search", "findall", "finditer", "sub", "subn", "split"))
"""Calls that try a pattern from each position of a text."""
OPEN = SEARCHES | {"compile"}
"""Those, and what may be used so."""
CALLS = OPEN | {"match", "fullmatch"}
UNBOUNDED = 1000
"""Repeats, from which on a text decides how often."""
ALL = frozenset(range(257))
"""Characters: those of one byte, and one for all others."""
KNOWN = {
    "cli/main.py": "the words of the person at the terminal",
    "cli/promotion.py": "the words of the person at the terminal",
    "openai/multipart.py": "a second parameter within a first one has the quotation mark that ends it",
    "requests/trackers.py": "a name of at most 64 characters",
    "service/loading.py": "the operator's file",
    "system/fork.py": "lines of /proc/self/maps",
}
"""Files with a pattern that is found, and what its texts are."""
CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
OTHER = "\u4e2d"


def _of_category(category: Any) -> frozenset[int]:
    pattern = re.compile(CATEGORIES[category])
    return frozenset(one for one in ALL if pattern.match(chr(one) if one < 256 else OTHER))


def _of_set(items: Sequence[tuple[Any, Any]]) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    for operation, value in items:
        if operation is ops.NEGATE:
            return ALL - _of_set(items[1:])
        if operation is ops.LITERAL:
            found |= {min(value, 256)}
        elif operation is ops.RANGE:
            found |= frozenset(range(min(value[0], 256), min(value[1], 256) + 1))
        else:
            found |= _of_category(value)
    return found


Node = tuple[Any, Any]
REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
"""Possessive ones give nothing back."""


def _parts(node: Node) -> list[list[Node]]:
    """The sequences of which one stands at this node; empty: it is one character, or none."""
    operation, value = node
    if operation in (*REPEATS, ops.POSSESSIVE_REPEAT):
        return [list(value[2])]
    if operation is ops.SUBPATTERN:
        return [list(value[3])]
    if operation is ops.BRANCH:
        return [list(branch) for branch in value[1]]
    return [list(value)] if operation is ops.ATOMIC_GROUP else []


def _characters(node: Node) -> frozenset[int]:
    """All that a node may take from a text."""
    operation, value = node
    match operation:
        case ops.LITERAL:
            return frozenset((min(value, 256),))
        case ops.NOT_LITERAL:
            return ALL - {value}
        case ops.ANY:
            return ALL - {10}
        case ops.IN:
            return _of_set(value)
        case ops.GROUPREF:
            return ALL
    return frozenset().union(*(_characters(one) for part in _parts(node) for one in part))


def _is_empty(node: Node) -> bool:
    """Whether a node can take nothing."""
    operation, value = node
    if operation in (ops.AT, ops.ASSERT, ops.ASSERT_NOT, ops.GROUPREF):
        return True
    if operation in (*REPEATS, ops.POSSESSIVE_REPEAT) and value[0] == 0:
        return True
    return any(all(map(_is_empty, part)) for part in _parts(node)) if _parts(node) else False


def _is_unbounded(node: Node) -> bool:
    return node[0] in REPEATS and node[1][1] >= UNBOUNDED


def _paths(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The sequences of characters, repeats and assertions that a pattern may take, without its groups."""
    if not nodes:
        yield []
        return
    first, *rest = nodes
    if _is_unbounded(first) or not _parts(first):
        heads: list[list[Node]] = [[first]]
    else:
        heads = [path for part in _parts(first) for path in _paths(part)]
        if first[0] in (*REPEATS, ops.POSSESSIVE_REPEAT) and first[1][0] == 0:
            heads.append([])
    for tail in _paths(rest):
        for head in heads:
            yield [*head, *tail]


def faults(pattern: str | bytes, *, is_searched: bool) -> Iterator[str]:
    """Why a pattern takes more than linear time for some text."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    for path in _paths(list(parser.parse(text))):
        yield from _divided(path)
        if is_searched:
            yield from _begun_again(path)


def _divided(path: Sequence[Node]) -> Iterator[str]:
    for place, node in enumerate(path):
        if not _is_unbounded(node):
            continue
        taken = _characters(node)
        for inner in _paths(list(node[1][2])):
            yield from _divided(inner)
            ends = [one for one in inner if _is_unbounded(one)]
            if any(
                all(_characters(one) & _characters(other) for other in inner if not _is_empty(other)) for one in ends
            ):
                yield "a repeat in a repeat takes the same characters"
        for position, other in enumerate(path[place + 1 :], place + 1):
            if _is_unbounded(other) and _characters(other) & taken and not all(map(_is_empty, path[position + 1 :])):
                yield "two repeats in a row take the same characters, and what follows may not be there"
            if not _characters(other) & taken and not _is_empty(other):
                break


def _begun_again(path: Sequence[Node]) -> Iterator[str]:
    if path and path[0] == (ops.AT, ops.AT_BEGINNING):
        return
    before: list[Node] = []
    for place, node in enumerate(path):
        if place == 1 and path[0][0] is ops.ASSERT_NOT and path[0][1][0] < 0:
            behind = frozenset().union(*map(_characters, path[0][1][1]))
            if _is_unbounded(node) and behind >= _characters(node):
                return
        may_fail = not all(map(_is_empty, path[place + 1 :]))
        if (
            _is_unbounded(node)
            and may_fail
            and all(
                _characters(one) & _characters(node)
                for one in before
                if one[0] not in (ops.AT, ops.ASSERT, ops.ASSERT_NOT)
            )
        ):
            yield "it is searched from each position, and a repeat takes what it begins with"
        before.append(node)


def _text_of(node: ast.expr) -> str | bytes | None:
    """A pattern as written, with a letter for each name in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
        return "".join(map(str, parts))
    return None


def _searched(tree: ast.AST) -> set[str]:
    """Names on which a module calls what searches."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        call.value.id
        for call in calls
        if isinstance(call, ast.Attribute) and call.attr in SEARCHES and isinstance(call.value, ast.Name)
    }


def _found() -> Iterator[tuple[str, int, str | bytes, bool]]:
    paths = (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py")))
    texts = {path: path.read_text() for path in paths}
    trees = {
        path: ast.parse(text) for path, text in texts.items() if re.search(r"^import re$|\.(sub|search)\(", text, re.M)
    }
    searched = {path: _searched(tree) for path, tree in trees.items()}
    everywhere = {name for names in searched.values() for name in names if not name.startswith("_")}
    for path, tree in trees.items():
        names = {
            id(node.value): target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.func.attr in CALLS):
                continue
            if (text := _text_of(call.args[0])) is not None:
                name = path.relative_to(REPOSITORY).as_posix().partition("/")[2]
                is_named = call.func.attr == "compile" and id(call) in names
                is_searched = names[id(call)] in everywhere | searched[path] if is_named else call.func.attr in OPEN
                yield name, call.lineno, text, is_searched


def test_no_pattern_takes_more_than_linear_time() -> None:
    wrong = [
        (name, f"{name}:{line} {text!r}: {why}")
        for name, line, text, is_searched in _found()
        for why in sorted(set(faults(text, is_searched=is_searched)))
    ]
    assert not [found for name, found in wrong if name not in KNOWN]
    assert {name for name, _ in wrong} >= KNOWN.keys()


@pytest.mark.parametrize(
    ("pattern", "is_searched"),
    [
        (r"\s*\s*x", False),
        (r"(a+)+b", False),
        (r"(a|b+)*c", False),
        (r"[ \t]*([^\r\n]*?)[ \t]*$x", False),
        (r"[^\s']*adapters", True),
        (r"begin .*end", True),
    ],
)
def test_what_takes_longer_is_found(pattern: str, is_searched: bool) -> None:
    assert list(faults(pattern, is_searched=is_searched))


@pytest.mark.parametrize(
    ("pattern", "is_searched"),
    [
        (r"[\s-]+", True),
        (r"(?<![a-z])[a-z]+_", True),
        (r"[\w.-]+(/[\w.-]+)*", False),
        (r"\n[^\n]*x", True),
        (r"^\s*x", True),
    ],
)
def test_what_is_linear_is_not(pattern: str, is_searched: bool) -> None:
    assert not list(faults(pattern, is_searched=is_searched))
