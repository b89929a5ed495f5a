"""Merges models or adapters: `python -m llama_stack_provider_trl.recipes.merge SPEC RESULT`.

Reads a MergeSpec. Writes one JSON object to RESULT: what was written, or `reason` and `message` of the failure.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from ..specs.merge import MergeSpec
from .failures import classify
from .imports import quick_imports


def main(argv: list[str]) -> int:
    """Merge what the spec names; returns the exit status (0 done, 1 failed)."""
    spec = MergeSpec.model_validate_json(Path(argv[1]).read_text())
    with quick_imports():
        from .checkpoint.merge import merge
    try:
        found, failed = merge(spec), False
    except Exception as error:
        traceback.print_exc()
        failure = classify(error)
        found, failed = {"reason": failure.reason, "message": failure.message}, True
    Path(argv[2]).write_text(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
