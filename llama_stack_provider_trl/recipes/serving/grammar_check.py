"""Compiles a schema of a request within limits: `python -m llama_stack_provider_trl.recipes.serving.grammar_check`.

Standard input has the schema, standard output gets what is wrong with it. A schema can keep the library busy for hours
(`allOf` of many patterns), in code that cannot be interrupted: this process alone is ended.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

CPU_SECONDS = 2
"""What compiling may take; a schema of a page takes a few ms."""
_MEMORY = 1 << 30
"""Bytes of address space."""
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of an answer. Without a bound an untrained model may write nothing else."""


def matcher_limits() -> Any:
    """What compiling, and the mask of one token, may take: 10 ms, and 40 MB for what is kept."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def grammar_of(schema: str) -> str:
    """The grammar of a JSON schema. Raises ValueError: it is no JSON object."""
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": _WHITE_SPACE, "lenient": False, "coerce_one_of": False}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def main() -> None:
    import llguidance

    schema = sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        problem = llguidance.LLMatcher.validate_grammar(grammar_of(schema), limits=matcher_limits())
    except ValueError as error:
        problem = str(error)
    sys.stdout.write(problem)


if __name__ == "__main__":
    main()
