"""Traces of the memory check that all trainings of the tests share, by content: most train the same few tiny models.

A trace takes as long as all else that such a training does. The key is the product's own; tests of the estimates and of
the cache itself (tests/process/test_memory.py, test_trace_cache.py) share none.

They are kept where isolated trainings write, too: below the checkout all is read-only for these.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_CHECKOUT = hashlib.sha256(str(Path(__file__).resolve().parents[1]).encode()).hexdigest()[:12]
SHARED = Path(tempfile.gettempdir()) / f"tests-traces-{os.getuid()}-{_CHECKOUT}"


@contextmanager
def shared_traces() -> Iterator[None]:
    """While this is open, trainings of this process and of its forks share theirs."""
    from llama_stack_provider_trl.recipes.memory import trace_cache

    own = trace_cache.directory_of

    def directory_of(spec: Any) -> Any:
        return own(spec) and SHARED  # where a job keeps none, it shares none

    with patch.object(trace_cache, "directory_of", directory_of), patch.object(trace_cache, "_TRACES", {}):
        yield
