"""The formula of a grader of type multi: arithmetic over the rewards of its graders. Nothing of it is run as code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MOST_FORMULA, MOST_DEPTH = 2048, 50
"""Characters of a formula, and parentheses within each other."""
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)|([A-Za-z_][A-Za-z0-9_]*)|(\*\*|[-+*/(),^]))", re.ASCII
)


class Function(NamedTuple):
    """A function of formulas."""

    call: Callable[..., float]
    least: int
    most: int
    """Arguments."""


FUNCTIONS = {
    "min": Function(min, 2, 32),
    "max": Function(max, 2, 32),
    "abs": Function(abs, 1, 1),
    "floor": Function(lambda value: float(math.floor(value)), 1, 1),
    "ceil": Function(lambda value: float(math.ceil(value)), 1, 1),
    "exp": Function(math.exp, 1, 1),
    "sqrt": Function(math.sqrt, 1, 1),
    "log": Function(math.log, 1, 1),
}
_Values = Mapping[str, float]
_Part = Callable[[_Values], float]


@dataclass(frozen=True)
class Formula:
    """A formula that is read."""

    names: tuple[str, ...]
    """Graders that it names, in order, each once."""
    _value: _Part

    def value(self, values: _Values) -> float:
        """Its value. Raises ValueError: it has none, or none that is a finite number."""
        try:
            found = self._value(values)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise ValueError(f"the formula has no value for these rewards ({error})") from error
        if not math.isfinite(found):
            raise ValueError(f"the value of the formula is {found}, expected a finite number")
        return found


def parsed(text: str) -> Formula:
    """Read a formula: numbers, names of graders, + - * / ** (or ^), parentheses, and the functions in `FUNCTIONS`.
    Raises ValueError: it is not one; what was found, and where."""
    if len(text) > MOST_FORMULA:
        raise ValueError(f"it has {len(text)} characters, at most {MOST_FORMULA} are supported")
    parser = _FormulaReader(_tokens(text))
    part = parser.total(0)
    if parser.next is not None:
        raise ValueError(f"found {parser.next!r} behind the end of the formula, expected an operator")
    return Formula(tuple(dict.fromkeys(parser.names)), part)


def _tokens(text: str) -> list[str]:
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(
                f"found {text[at:].strip()[:20]!r}, expected a number, the name of a grader, one of + - * / ** ( ) , "
                f"or a function: {', '.join(FUNCTIONS)}"
            )
        found.append(token[0].strip())
        at = token.end()
    return found


def _real_power(base: float, exponent: float) -> float:
    found: float | complex = base**exponent
    if isinstance(found, complex):  # abs would make a number of it
        raise ValueError(f"{base:g} ** {exponent:g} is no real number")
    return found


class _FormulaReader:
    """Recursive descent. Each level of it binds more tightly than the one before."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self.names: list[str] = []

    @property
    def next(self) -> str | None:
        """The token that comes next; None: the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _took(self, *tokens: str) -> str | None:
        if (token := self.next) in tokens:
            self._at += 1
            return token
        return None

    def total(self, depth: int) -> _Part:
        """A sum of products."""
        if depth > MOST_DEPTH:
            raise ValueError(f"it has parts within each other {depth} deep, at most {MOST_DEPTH} are supported")
        terms = [(1.0, self._product(depth))]
        while sign := self._took("+", "-"):
            terms.append((1.0 if sign == "+" else -1.0, self._product(depth)))
        return lambda values: sum(factor * part(values) for factor, part in terms)

    def _product(self, depth: int) -> _Part:
        first = self._signed(depth)
        others = []
        while sign := self._took("*", "/"):
            others.append((sign, self._signed(depth)))

        def value(values: _Values) -> float:
            found = first(values)
            for sign, part in others:
                found = found * part(values) if sign == "*" else found / part(values)
            return found

        return value

    def _signed(self, depth: int) -> _Part:
        sign = 1.0
        while token := self._took("+", "-"):
            sign = -sign if token == "-" else sign
        part = self._power(depth)
        return lambda values: sign * part(values)

    def _power(self, depth: int) -> _Part:
        base = self._single(depth)
        if not self._took("**", "^"):
            return base
        if depth >= MOST_DEPTH:
            raise ValueError(f"it has more than {MOST_DEPTH} parts within each other: make it flatter")
        exponent = self._signed(depth + 1)
        # Floats: a power of whole numbers would be computed to its last digit.
        return lambda values: _real_power(float(base(values)), float(exponent(values)))

    def _single(self, depth: int) -> _Part:
        token = self.next
        if token is None:
            raise ValueError("it ends where a number, a name or a part in parentheses is expected")
        self._at += 1
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            number = float(token)
            if not math.isfinite(number):
                raise ValueError(f"{token} is too large, expected a finite number")
            return lambda values: number
        if token == "(":
            part = self.total(depth + 1)
            self._close()
            return part
        if token[0].isalpha() or token[0] == "_":
            if self.next == "(":
                return self._call(token, depth)
            self.names.append(token)
            return lambda values: float(values[token])
        raise ValueError(f"found {token!r}, expected a number, a name or a part in parentheses")

    def _call(self, name: str, depth: int) -> _Part:
        function = FUNCTIONS.get(name)
        if function is None:
            raise ValueError(f"it calls {name!r}, expected one of {', '.join(FUNCTIONS)}")
        self._at += 1
        arguments = [self.total(depth + 1)]
        while self._took(","):
            arguments.append(self.total(depth + 1))
        self._close()
        if not function.least <= len(arguments) <= function.most:
            expected = str(function.least) if function.least == function.most else f"{function.least} or more"
            raise ValueError(f"{name} has {len(arguments)} arguments, expected {expected}")
        return lambda values: float(function.call(*(part(values) for part in arguments)))

    def _close(self) -> None:
        if not self._took(")"):
            raise ValueError(f"found {self.next!r}, expected )" if self.next else "it ends where ) is expected")
