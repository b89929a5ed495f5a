"""Prepares the rows of test_token_shards.py, which kills this process.

python -m tests.process.preparing ROOT WORKERS
"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_stack_provider_trl.recipes.data import shards
from tests.process import test_token_shards as own

if __name__ == "__main__":
    root, workers = sys.argv[1:]
    shards.SHARD_ROWS = own.ROWS_EACH
    shards.workers_for = lambda rows, shards: int(workers)
    print(own.prepare(own.large(Path(root))).source)
