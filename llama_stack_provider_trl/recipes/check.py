"""Checks rows of a user: `python -m llama_stack_provider_trl.recipes.check SPEC RESULT`.

Reads a JobSpec whose rows are the ones to check. Writes one JSON object to RESULT: `max_seq_length`, `data`,
`inference` and `warnings` of a preview of all rows, or `reason` and `message` of what would fail the job on them. It
reads no weights.
"""

from __future__ import annotations

import sys
from typing import Any

from ..specs.job import JobSpec
from ..specs.preflight import PreviewSpec
from .imports import quick_imports
from .results import write_result


def main(argv: list[str]) -> int:
    return write_result(argv, lambda text: checked(JobSpec.model_validate_json(text)))


def checked(spec: JobSpec) -> dict[str, Any]:
    """The counts and warnings of all rows of a job. Raises JobFailure: what would fail the job on them."""
    with quick_imports():
        from .preview import examined
    found = examined(spec, PreviewSpec(rows=1), lambda: None, every_row=True)
    return found.model_dump(mode="json", include={"max_seq_length", "data", "inference", "warnings"})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
