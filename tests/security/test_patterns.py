"""No regular expression of the product takes more than linear time for a text that somebody else wrote: Python's `re`
tries each way to divide a text among repeats, holds the interpreter meanwhile, and cannot be interrupted."""

from __future__ import annotations

import ast
import re
import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.tiny import REPOSITORY

PACKAGES = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
SEARCHES = frozenset(("search", "findall", "finditer", "sub", "subn", "split"))
"""Calls that try a pattern from each position of a text."""
ENDS = frozenset(("fullmatch",))
"""Calls that want the whole text."""
CALLS = SEARCHES | ENDS | {"compile", "match"}
UNBOUNDED = 1000
"""Repeats, from which on a text decides how often."""
SEVERAL = 8
"""Repeats, from which on the ways to divide a text among what is repeated are too many."""
ALL = frozenset(range(257))
"""Characters: those of one byte, and one for all others."""
KNOWN = {
    "cli/main.py: invalid choice: ": "the words of the person at the terminal",
    "cli/promotion.py: (?P<evaluation>x": "the words of the person at the terminal",
    "cli/refusals.py: (made)": "the sentences in the same list, which repeat nothing",
    "export/follower.py: \\w*(KEY|TOKEN|SE": "names of variables of the environment",
    "export/process.py: (HF|HUGGING_?FAC": "names of variables of the environment",
    "export/process.py: MLFLOW_.*": "names of variables of the environment",
    "nodes/pools/kubectl.py: ^error: |error (": "what kubectl prints",
    "openai/multipart.py: ;\\s*([a-zA-Z*]{1": "a parameter within another one has the quotation mark that ends it",
    "recipes/checkpoint/weights.py: .*?\\.\\d+(?=\\.)": "a name of weights, which transformers gives to modules",
    "recipes/data/chat.py: (made)": "texts as they are, one of several",
    "recipes/data/endings.py: x|<[^<>\\s]+>|\\[[": "one of several pieces, none of which begins within another",
    "requests/trackers.py: (made)": "an address that begins with its scheme",
    "requests/trackers.py: registry-.*|.+_(": "a name of at most 64 characters",
    "service/loading.py: \\$\\{env\\.([A-Z0-": "the operator's file",
    "service/security/audit.py: (made)": "a beginning that no token repeats",
    "specs/rows.py: ([\"'])name\\1\\s*:": "the second quotation mark is the first one, which the name lacks",
    "system/data_dir.py: (made)": "the names in the same module",
    "system/data_dir.py: .+\\.stale-\\d+": "a name of a file",
    "system/fork.py: (/\\S*/libgomp\\S*": "lines of /proc/self/maps",
    "system/process.py: ^NSpid:\\t(.*)$": "lines of /proc",
}
"""Patterns that are found, by module and beginning, and what their texts are."""
CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
OTHER = "\u4e2d"


Node = tuple[Any, Any]
REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
"""Possessive ones give nothing back."""
END: Node = (ops.AT, ops.AT_END_STRING)
WITHOUT_WIDTH = (ops.AT, ops.ASSERT, ops.ASSERT_NOT)


class Analysis:
    """Why a pattern takes more than linear time for some text.

    Args:
        is_searched: it is tried from each position of a text.
        to_the_end: it has to take the whole text.
    """

    def __init__(self, pattern: str, flags: int, *, is_searched: bool, to_the_end: bool) -> None:
        self.parsed = parser.parse(pattern, flags)
        self.flags = self.parsed.state.flags
        self.is_searched, self.to_the_end = is_searched, to_the_end
        self.unbounded = UNBOUNDED

    def faults(self) -> set[str]:
        found = set()
        for node in _all(self.parsed):
            if node[0] is ops.GROUPREF_EXISTS or (node[0] is ops.SUBPATTERN and (node[1][1] or node[1][2])):
                found.add("it has a condition, or flags for a part, which nothing here reads")
            if node[0] in REPEATS and node[1][1] >= SEVERAL:
                found |= self._repeated(node)
        for path in self._paths([*self.parsed, *([END] if self.to_the_end else [])]):
            found |= self._divided(path) | (self._begun_again(path) if self.is_searched else set())
        return found

    def _of_category(self, category: Any) -> frozenset[int]:
        pattern = re.compile(CATEGORIES[category])
        return frozenset(one for one in ALL if pattern.match(chr(one) if one < 256 else OTHER))

    def _of_set(self, items: Sequence[Node]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for operation, value in items:
            if operation is ops.NEGATE:
                return ALL - self._of_set(items[1:])
            if operation is ops.LITERAL:
                found |= self._cased({min(value, 256)})
            elif operation is ops.RANGE:
                found |= self._cased(range(min(value[0], 256), min(value[1], 256) + 1))
            else:
                found |= self._of_category(value)
        return found

    def _cased(self, characters: Iterable[int]) -> frozenset[int]:
        found = frozenset(characters)
        if self.flags & re.IGNORECASE:
            found |= {min(256, ord(other)) for one in found if one < 256 for other in chr(one).swapcase()}
        return found

    def _characters(self, node: Node) -> frozenset[int]:
        """All that a node may take from a text."""
        operation, value = node
        match operation:
            case ops.LITERAL:
                return self._cased({min(value, 256)})
            case ops.NOT_LITERAL:
                return ALL - {value}
            case ops.ANY:
                return ALL if self.flags & re.DOTALL else ALL - {10}
            case ops.IN:
                return self._of_set(value)
            case ops.GROUPREF:
                return ALL
        return frozenset().union(*(self._characters(one) for part in _parts(node) for one in part))

    def _paths(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        """The sequences of characters, unbounded repeats and assertions that a pattern may take."""
        if not nodes:
            yield []
            return
        first, *rest = nodes
        if self._is_unbounded(first) or _keeps_all(first) or not _parts(first):
            heads: list[list[Node]] = [[first]]
        else:
            heads = [path for part in _parts(first) for path in self._paths(part)]
            if first[0] in (*REPEATS, ops.POSSESSIVE_REPEAT) and first[1][0] == 0:
                heads.append([])
        for tail in self._paths(rest):
            for head in heads:
                yield [*head, *tail]

    def _is_unbounded(self, node: Node) -> bool:
        return node[0] in REPEATS and node[1][1] >= self.unbounded and node[1][0] != node[1][1]

    def _begins(self, node: Node) -> frozenset[int]:
        """What a node may begin with."""
        if not self._is_unbounded(node):
            return self._characters(node)
        return frozenset().union(*map(self._first, self._paths(list(node[1][2]))))

    def _first(self, path: Sequence[Node]) -> frozenset[int]:
        """What a path may begin with."""
        found: frozenset[int] = frozenset()
        for node in path:
            found |= self._begins(node)
            if not _takes_nothing(node):
                break
        return found

    def _divided(self, path: Sequence[Node]) -> set[str]:
        found = set()
        for place, node in enumerate(path):
            if node[0] in (ops.ASSERT, ops.ASSERT_NOT):
                for inner in self._paths(list(node[1][1])):
                    found |= self._divided([*inner, END])
            if not self._is_unbounded(node):
                continue
            taken = self._characters(node)
            for position, other in enumerate(path[place + 1 :], place + 1):
                common = self._begins(other) & taken
                behind = path[position + 1 :]
                is_safe = all(map(_cannot_fail, behind)) or (behind == [END] and self._characters(other) == ALL)
                if self._is_unbounded(other) and common and not is_safe:
                    found.add("two repeats in a row take the same characters, and what follows may not be there")
                if not common and not _takes_nothing(other):
                    break
        return found

    def _repeated(self, node: Node) -> set[str]:
        """What is wrong with the body of a repeat: each repeat in it divides a text among all of its turns."""
        found = set()
        self.unbounded = 2
        bodies = list(self._paths(list(node[1][2])))
        begins = frozenset().union(*map(self._first, bodies))
        for number, body in enumerate(bodies):
            found |= self._divided([*body, END])
            for place, one in enumerate(body):
                if one[0] in (ops.ASSERT, ops.ASSERT_NOT) and any(other[0] in REPEATS for other in _all(one[1][1])):
                    found.add("a repeat looks ahead each time")
                is_last = all(map(_takes_nothing, body[place + 1 :]))
                if self._is_unbounded(one) and is_last and self._characters(one) & begins:
                    found.add("a repeat in a repeat takes the same characters")
            for other in bodies[number + 1 :]:
                at = next((at for at, pair in enumerate(zip(body, other, strict=False)) if pair[0] != pair[1]), None)
                least = min(len(body), len(other))
                ours, theirs = ((one[at:] if at is not None else one[least:]) for one in (body, other))
                if (self._first(ours) if ours else begins) & (self._first(theirs) if theirs else begins):
                    found.add("branches of a repeat begin alike")
        self.unbounded = UNBOUNDED
        return found

    def _is_behind_none(self, node: Node, repeat: Node) -> bool:
        """Whether a node wants none of a repeat's characters before it."""
        if node[0] is not ops.ASSERT_NOT or node[1][0] > 0 or not self._is_unbounded(repeat):
            return False
        return frozenset().union(*map(self._characters, node[1][1])) >= self._characters(repeat)

    def _begun_again(self, path: Sequence[Node]) -> set[str]:
        if path and path[0] == (ops.AT, ops.AT_BEGINNING) and not self.flags & re.MULTILINE:
            return set()
        before: list[Node] = []
        for place, node in enumerate(path):
            behind = path[place + 1 :]
            if node[0] in (ops.ASSERT, ops.ASSERT_NOT) and node[1][0] > 0:
                for inner in self._paths(list(node[1][1])):
                    if self._begun_again([*before, *inner, END]):
                        return {"it is searched from each position, and looks ahead without end"}
            is_guarded = place == 1 and self._is_behind_none(path[0], node)
            is_within = all(self._characters(one) & self._characters(node) for one in before)
            is_long = self._is_unbounded(node) or _keeps_all(node)
            if is_long and is_within and not is_guarded and not all(map(_cannot_fail, behind)):
                return {"it is searched from each position, and a repeat takes what it begins with"}
            if node[0] is ops.ASSERT and node[1][0] < 0:
                before += node[1][1]
            elif node[0] not in WITHOUT_WIDTH:
                before.append(node)
        return set()


def _all(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes with all that are in them."""
    for node in nodes:
        yield node
        inner = [node[1][1]] if node[0] in (ops.ASSERT, ops.ASSERT_NOT) else _parts(node)
        for part in inner:
            yield from _all(part)


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


def _takes_nothing(node: Node) -> bool:
    """Whether a node can take no character."""
    return node[0] in (*WITHOUT_WIDTH, ops.GROUPREF) or _cannot_fail(node)


def _keeps_all(node: Node) -> bool:
    """Whether a node is an unbounded repeat that gives nothing back."""
    return node[0] is ops.POSSESSIVE_REPEAT and node[1][1] >= UNBOUNDED


def _cannot_fail(node: Node) -> bool:
    return node[0] in (*REPEATS, ops.POSSESSIVE_REPEAT) and node[1][0] == 0


@dataclass(frozen=True)
class Found:
    """A pattern in a module of the product."""

    module: str
    text: str | None
    """With a letter for what a program puts into it; None: it is not known here."""
    flags: int
    calls: frozenset[str]
    """How it is used."""

    @property
    def name(self) -> str:
        return f"{self.module}: {self.text[:16]}" if self.text is not None else f"{self.module}: (made)"

    def faults(self) -> set[str]:
        if self.text is None:
            return {"it is made by a program"}
        ways = {"is_searched": bool(self.calls & SEARCHES), "to_the_end": bool(self.calls & ENDS)}
        return Analysis(self.text, self.flags, **ways).faults()


def _text_of(node: ast.expr, names: dict[str, ast.expr]) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(text)):
            return text.decode("latin-1")
        case ast.JoinedStr():
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        case ast.Name(id=name) if name in names:
            return _text_of(names[name], names)
    return None


def _used(tree: ast.AST) -> dict[str, set[str]]:
    """Name -> what a module calls on it, or gives it to others as."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in CALLS:
            found.setdefault(node.value.id, set()).add(node.attr)
    return found


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def patterns(trees: dict[str, ast.Module]) -> Iterator[Found]:
    everywhere = {
        name: value for tree in trees.values() for name, value in _constants(tree).items() if not name.startswith("_")
    }
    used = {name: _used(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        names = {**everywhere, **_constants(tree)}
        named = {id(value): one for one, value in names.items()}
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if ast.unparse(call.func.value) != "re" or call.func.attr not in CALLS:
                continue
            calls = {call.func.attr}
            if "compile" in calls:
                one = named.get(id(call), "")
                calls = set().union(*(used[module].get(one, ()) for module in used if module == name or one[:1] != "_"))
                calls = calls or SEARCHES | ENDS
            flags = [ast.unparse(arg) for arg in (*call.args[1:], *(key.value for key in call.keywords))]
            asked = sum({getattr(re, part) for part in re.findall(r"\bre\.([A-Z]+)\b", " ".join(flags))})
            yield Found(name, _text_of(call.args[0], names) if call.args else None, asked, frozenset(calls))


def _product() -> dict[str, ast.Module]:
    paths = (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py")))
    texts = {path.relative_to(REPOSITORY).as_posix().partition("/")[2]: path.read_text() for path in paths}
    return {name: ast.parse(text) for name, text in texts.items()}


def test_no_pattern_takes_more_than_linear_time() -> None:
    trees = _product()
    wrong = {one.name: (one.text, why) for one in patterns(trees) if (why := one.faults())}
    assert {name: found for name, found in wrong.items() if name not in KNOWN} == {}
    assert wrong.keys() >= KNOWN.keys()
    for tree in trees.values():  # other ways to call `re` would not be found
        assert not any(isinstance(node, ast.ImportFrom) and node.module == "re" for node in ast.walk(tree))
        assert "import re as" not in ast.unparse(tree)


@pytest.mark.parametrize(
    "call",
    [
        *(r"match(r'\s*\s*x'", r"match(r'(a+)+b'", r"match(r'(a|b+)*c'", r"fullmatch('a*a*'"),
        *(r"match(r'(?:aa|a)*b'", r"match(r'(?:ab*|b)*c'", r"match(r'(?=a*a*b)x'", r"match(r'\w+\s*$|\d+(\.\d+)*\d*$'"),
        *(r"search(r'[ \t]*([^\r\n]*?)[ \t]*$x'", r"search(r'[^\s]*adapters'", r"search(r'begin .*end'"),
        *(r"search(r'\s+$'", r"search(r'a+(?=b)'", r"search(r'(?m)^\s*x'", r"search(r'^\s*x', text, re.MULTILINE"),
        *(r"match(r'[a-z]*[A-Z]*1', text, re.IGNORECASE", r"match(made"),
        *(
            r"match(r'(a{1,2})+b'",
            r"match(r'(?:[a-z]{1,63}\.?)+!'",
            r"match(r'(a{1,9}){1,30}b'",
            r"match(r'(?:a|a){30}b'",
        ),
        *(r"search(r'(?=a*b)c'", r"search(r'x(?=.*y)'", r"match(r'(?:a(?!.*x))*c'", r"search(r'a++b'"),
        *(r"search(r'(?<![a-z])[a-z]+ [a-z ]*!'", r"match(r'(?i:[a-z]*[A-Z]*1)'", r"match(r'(a)?(?(1)a*|b*)a*c'"),
    ],
)
def test_what_takes_longer_is_found(call: str) -> None:
    (one,) = patterns({"new.py": ast.parse(f"re.{call})")})
    assert one.faults()


@pytest.mark.parametrize(
    "call",
    [
        *(r"sub(r'[\s-]+'", r"search(r'(?<![a-z])[a-z]+_'", r"fullmatch(r'[\w.-]+(/[\w.-]+)*'"),
        *(r"search(r'\n[^\n]*x'", r"search(r'^\s*x'", r"match('[a-z]*[A-Z]*1'"),
    ],
)
def test_what_is_linear_is_not(call: str) -> None:
    (one,) = patterns({"new.py": ast.parse(f"re.{call})")})
    assert one.faults() == set()
