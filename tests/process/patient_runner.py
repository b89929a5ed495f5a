"""The runner, which gives the processes of a task a thousand seconds to end."""

from __future__ import annotations

import sys

from llama_stack_provider_trl.launch import runner

if __name__ == "__main__":
    runner.GRACE = 1000.0
    runner.main(sys.argv[1:])
